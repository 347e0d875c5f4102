"""The Python in README.md and docs/ runs as it stands there, each block on the backend it is for."""

import re
import runpy
from pathlib import Path

import keras
import pytest

import keras_mp
from keras_mp.planner.chips.targets import find_target, missing_compiler

ROOT = Path(__file__).parents[1]


def program(path):
    """The ```python blocks of a page in one program, each on its own lines; ```python jax is for that backend only."""
    lines, fence = [], None
    for line in path.read_text().splitlines():
        if line.startswith("```"):
            fence = None if fence is not None else line.removeprefix("```").split()
            assert fence is None or fence[1:] in ([], ["tensorflow"], ["jax"]), f"{path}: {line}"
            lines.append("")
        else:
            runs = fence and fence[0] == "python" and fence[1:] in ([], [keras.backend.backend()])
            lines.append(line if runs else "")
    return "\n".join(lines)


PROGRAMS = {
    path.relative_to(ROOT).as_posix(): program(path) for path in [ROOT / "README.md", *ROOT.glob("docs/**/*.md")]
}


def test_the_pages_with_python_are_found():
    assert {page for page, code in PROGRAMS.items() if code.strip()} >= {"README.md", "docs/loss-scaling.md"}


def run_page(page, folder):
    """Runs the Python of a page in this process; `tests/long` does so with every page."""
    for target in re.findall(r'inspect\([^)]*target="(\w+)"', PROGRAMS[page]):
        if missing := missing_compiler(find_target(target)):
            pytest.skip(missing)
    file = folder / "page.py"  # a file, because TensorFlow reads the source of what it compiles
    file.write_text(PROGRAMS[page])
    runpy.run_path(str(file))


@pytest.mark.slow
def test_the_python_of_the_first_page_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_page("docs/index.md", tmp_path)


def test_the_readme_prints_what_it_says(tmp_path, monkeypatch, capsys):
    if keras.backend.backend() != "tensorflow" or keras_mp.precision.policy.choose_policy().policy != "mixed_bfloat16":
        pytest.skip("the output in README.md is that of TensorFlow on a CPU with bfloat16 instructions")
    monkeypatch.chdir(tmp_path)
    keras.backend.clear_session()  # automatic names begin anew
    exec(compile(PROGRAMS["README.md"], "README.md", "exec"), {})
    said = re.search(r"it prints:\n\n```\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[1]
    printed, said = (
        [re.sub(r"\d+(\.[\de+-]+)?", "#", line) for line in text.splitlines()]
        for text in (capsys.readouterr().out, said)
    )
    assert printed == said
