"""What the pages say is there: the tests that they name, and the public names in the reference."""

import ast
import inspect
import re
import subprocess
import sys
import tomllib
import types
from pathlib import Path

import pytest

import keras_mp
from benchmarks import results, structure

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "keras_mp"
FIXED = (ROOT / "docs" / "maintainers" / "what-we-fixed.md").read_text()
ARCHITECTURE = (ROOT / "docs" / "maintainers" / "architecture.md").read_text()
ROWS = re.findall(r"^\| (\d+b?) \|(.*)\|$", FIXED, re.MULTILINE)
NAMED = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", FIXED)


def names_in(file):
    """The names of the functions that pytest collects from a file."""
    tree = ast.parse((ROOT / file).read_text())
    scopes = [tree, *(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name.startswith("Test"))]
    return {node.name for scope in scopes for node in scope.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("file, name", NAMED)
def test_a_test_that_the_page_names_is_there(file, name):
    assert name.startswith("test_") and name in names_in(file)


def test_the_faults_are_numbered_without_a_gap_and_each_names_its_test():
    numbers = [int(number) for number, _ in ROWS if number.isdigit()]
    assert len(numbers) >= 24 and numbers == list(range(1, len(numbers) + 1))
    assert [number for number, row in ROWS if "::test_" not in row] == []


def test_every_public_name_is_in_the_reference():
    pages = [path.read_text() for path in (ROOT / "docs" / "api").glob("*.md")]
    documented = {line.split()[1] for page in pages for line in page.splitlines() if line.startswith(":::")}
    public = {name: getattr(keras_mp, name) for name in keras_mp.__all__}
    places = {name: module for name, module in public.items() if isinstance(module, types.ModuleType)}
    assert {f"keras_mp.{name}" for name in public.keys() - places.keys()} <= documented
    assert {f"keras_mp.{place}.{name}" for place, module in places.items() for name in module.__all__} <= documented


def test_the_first_line_of_a_public_docstring_has_ten_words():
    public = {name: getattr(keras_mp, name) for name in keras_mp.__all__}
    for place in [value for value in public.values() if isinstance(value, types.ModuleType)]:
        public |= {f"{place.__name__}.{name}": getattr(place, name) for name in place.__all__}
    for name, value in [item for item in public.items() if isinstance(item[1], type)]:
        public |= {f"{name}.{part}": member for part, member in vars(value).items() if not part.startswith("_")}
    written = {
        name: (inspect.getdoc(value) or "").partition("\n")[0]
        for name, value in public.items()
        if isinstance(value, type | types.FunctionType | property)
        and "keras.src" not in getattr(value, "__module__", "")
    }
    assert len(written) > 100
    assert {name: line for name, line in written.items() if len(line.split()) > 10} == {}


@pytest.mark.parametrize("name", results.TABLES)
def test_the_tables_of_a_page_are_current(name):
    assert (ROOT / "docs" / name).read_text() == results.page(name), "run `python benchmarks/results.py`"


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path):
    pytest.importorskip("mkdocs", reason="mkdocs, of the extra docs, is not installed")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "keras_mp.stabilize" in (tmp_path / "api" / "top.html").read_text()
    # Search works from a folder: the index is a script, and the worker's shim is there and not fetched from elsewhere.
    home = (tmp_path / "index.html").read_text()
    assert (tmp_path / "search" / "search_index.js").read_text().startswith("var __index = {")
    assert (
        '<script src="iframe-worker.js"' in home
        and "unpkg.com" not in home
        and (tmp_path / "iframe-worker.js").is_file()
    )
    pages = {path.relative_to(tmp_path).with_suffix("") for path in tmp_path.rglob("*.html")}
    assert pages >= {path.relative_to(ROOT / "docs").with_suffix("") for path in (ROOT / "docs").rglob("*.md")}


def test_links_to_pages_have_their_titles():
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    named = {page.name: re.findall(r"\[`?[\w/-]+\.md`?\]\(", page.read_text()) for page in pages}
    assert {name: links for name, links in named.items() if links} == {}


def tables_of(text):
    """The rows of all tables of a text, as lists of cells, without headings and rules."""
    tables = re.findall(r"(?:^\|.*\|\n)+", text, re.MULTILINE)
    return [[row.strip("|").split("|") for row in table.splitlines()[2:]] for table in tables]


def numbers_in(text):
    return re.findall(r"\d[\d,.]*\d|\d{2,}", text)


def test_each_main_result_is_on_the_page_that_its_row_names():
    results_page = (ROOT / "docs" / "tables" / "results.md").read_text()
    (rows,) = tables_of(results_page.split("## Main results")[1].split("\n## ")[0])
    assert len(rows) > 10
    for measurement, result, command, page in rows:
        assert "`" in command or "](" in command, f"{measurement}: no command"
        text = (ROOT / "docs" / "tables" / re.search(r"\]\(([\w./-]+\.md)", page)[1]).read_text()
        missing = [number for number in numbers_in(result) if number not in text]
        assert not missing, f"{measurement}: {missing} are not in {page}"


def test_each_ratio_to_plain_keras_and_pytorch_is_on_the_page_of_cpu_steps():
    figures = (ROOT / "docs" / "tables" / "results.md").read_text()
    (rows,) = tables_of(figures.split("## A training step compared")[1].split("\n## ")[0])
    benchmark = (ROOT / "docs" / "maintainers" / "cpu-steps.md").read_text()
    ratios = [cell.strip() for row in rows for cell in row[1:]]
    assert len(ratios) == 12 and [ratio for ratio in ratios if ratio not in benchmark] == []


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().split()) <= 400


@pytest.mark.parametrize("page, least", [("README.md", 6), ("CONTRIBUTING.md", 3), ("CHANGELOG.md", 3)])
def test_the_links_of_a_page_at_the_root_lead_somewhere(page, least):
    links = re.findall(r"\]\(([^)#]+)", (ROOT / page).read_text())
    assert len(links) >= least and [link for link in links if not (ROOT / link).is_file()] == []


def test_the_files_and_commands_of_contributing_are_there():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    files = re.findall(r"(?:keras_mp|tests|recipes|docs|benchmarks)/[\w/-]+(?:\.\w+)?", text)
    assert len(files) > 20 and [file for file in files if not (ROOT / file).exists() and "/NAME" not in file] == []
    targets = re.findall(r"`make ([\w-]+)`", text)
    assert set(targets) >= {"lint", "test", "test-slow", "test-all", "docs"}
    assert [name for name in targets if f"\n{name}:" not in (ROOT / "Makefile").read_text()] == []


def test_the_map_of_rooms_is_the_one_that_lint_holds():
    layers = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"][0]["layers"]
    drawn = ARCHITECTURE.split("```\n")[1].splitlines()[1:]
    assert [re.match(r" ?\w* +(\w+(?: \| \w+)*) {2,}\S", line)[1] for line in drawn] == layers


@pytest.mark.parametrize("row", re.findall(r"^\| [^|]+ \| (`\w+/.*) \|$", ARCHITECTURE, re.MULTILINE))
def test_the_names_on_the_ways_are_in_the_files_that_the_map_names(row):
    files, _, functions = row.partition(" | ")
    text = "".join((ROOT / "keras_mp" / file).read_text() for file in re.findall(r"`([\w/]+\.py)`", files))
    defined = re.findall(r"(?m)^ *(?:def|class) (\w+)|^(\w+)(?:: [^=]*)? = ", text)
    assert text and set(re.findall(r"`(\w+)`", functions)) <= {name for names in defined for name in names}


def test_the_list_of_changes_of_keras_is_that_of_the_code():
    changes = {(file, name.split(".")[-1]) for file, name in structure.changes_of(ROOT)}
    assert len(changes) > 50 and structure.listed(ROOT) == changes


def test_the_files_of_the_map_are_there():
    files = re.findall(r"`((?:\w+/)+\w+\.py)`", ARCHITECTURE)
    assert (
        len(files) > 20 and [file for file in files if not any((at / file).is_file() for at in (ROOT, PACKAGE))] == []
    )


# Words that begin no noun: a description that begins with one of them reads on from the line above it.
NO_NOUN = set(
    """
    of those that it its they them their theirs this these such likewise same ditto again so not also only others
    as is are was has have what how where why which who whose when if
    for from in into by with without at to on over along after before until instead
    called built added counted compiled contracted written given made taken drawn kept seen
    makes takes gets reads writes tells computes keeps runs builds lowers watches returns finds wraps says decides
    decide leave replace stands broadcasts contracts approximate print must
    """.split()
)


def described_arguments(docstring):
    """The arguments and attributes of a docstring: the row in it, the name, and the description in one line."""
    base, indent, rows = None, None, []
    for number, line in enumerate(docstring.splitlines()):
        depth = len(line) - len(line.lstrip())
        if line.strip() in ("Args:", "Call arguments:", "Attributes:"):
            base, indent = depth, None
        elif base is not None and line.strip():
            indent = depth if indent is None else indent
            if depth <= base:
                base = None
            elif depth == indent:
                name, _, text = line.strip().partition(":")
                rows.append((number, name, text.strip()))
            else:
                rows[-1] = (*rows[-1][:2], f"{rows[-1][2]} {line.strip()}")
    return rows


def is_no_description(name, text):
    """Whether a description cannot be read alone, or says the argument's name again and no more."""
    words = re.findall(r"[\w'`]+", text.lower())
    told = [word for word in words if word not in ("the", "a", "an")]
    return not told or words[0] in NO_NOUN or told in ([name.strip("*")], name.split("_"), ["other"], ["rest"])


def test_the_description_of_an_argument_begins_with_a_noun_and_can_be_read_alone():
    count, pressed = 0, []
    folders = ("keras_mp", "models", "recipes", "benchmarks", "tests")
    for path in [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node):
                rows = described_arguments(ast.get_docstring(node))
                count += len(rows)
                pressed += [
                    f"{path.relative_to(ROOT)}:{node.body[0].lineno + row}: {name}: {text}"
                    for row, name, text in rows
                    if is_no_description(name, text)
                ]
    print("\n".join(pressed))
    assert count > 1000 and pressed == []


def test_the_map_has_a_row_for_every_file():
    rows = re.findall(r"^\| `[\w/]+\.py` \| .* \|$", ARCHITECTURE.split("## Every file")[1], re.MULTILINE)
    assert rows == structure.file_rows(ROOT)
