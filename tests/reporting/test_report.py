"""Every report has the same methods, and writes files that a stranger's program reads."""

import ast
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.console import Console

import keras_mp
from keras_mp.reporting import report as report_module
from keras_mp.reporting.answer import COLUMNS, LINES
from keras_mp.reporting.table import ColumnTable, plain_text
from tests.reporting.report_examples import EXAMPLES, MARKUP

_VOID = {"meta", "br", "wbr"}


@pytest.fixture(scope="module")
def reports():
    return {kind: build() for kind, build in EXAMPLES.items()}


def classes_of_the_package():
    for path in Path(keras_mp.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                yield path, node


def test_every_report_of_the_package_is_tested_here():
    bases = {"Report"}
    named = {
        node.name for _, node in classes_of_the_package() if bases & {getattr(base, "id", "") for base in node.bases}
    }
    assert named - bases == {kind.__name__ for kind in EXAMPLES}


def test_no_class_writes_files_of_reports_by_itself():
    home = Path(report_module.__file__)
    for path, node in classes_of_the_package():
        methods = {method.name for method in node.body if isinstance(method, ast.FunctionDef)}
        assert path == home or not methods & {"to_json", "to_html"}, f"{node.name} in {path}"


class Page(HTMLParser):
    """Checks that tags are closed in order, and collects the text."""

    def __init__(self):
        super().__init__()
        self.open, self.text, self.unscrolled = [], "", []

    def handle_starttag(self, tag, attrs):
        assert tag != "b", "text was not escaped"
        if tag in ("table", "svg") and self.open[-1] != "div.scroll":
            self.unscrolled.append(tag)
        if tag not in _VOID:
            self.open.append("div.scroll" if ("class", "scroll") in attrs else tag)

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop().split(".")[0] == tag

    def handle_data(self, data):
        self.text += data


@pytest.mark.parametrize("kind", EXAMPLES, ids=lambda kind: kind.__name__)
class TestEveryReport:
    def test_json_is_the_dict_and_holds_no_number_that_json_has_not(self, kind, reports, tmp_path):
        report = reports[kind]

        def refuse(constant):
            raise AssertionError(constant)

        text = report.to_json(tmp_path / "new" / "report.json")
        assert json.loads(text, parse_constant=refuse) == report.to_dict()
        assert (tmp_path / "new" / "report.json").read_text() == text + "\n"
        assert report.to_json() == text and MARKUP in json.dumps(report.to_dict()).replace('\\"', '"')

    def test_html_is_a_whole_page_with_its_text_escaped(self, kind, reports, tmp_path):
        path = tmp_path / "new" / "report.html"
        assert reports[kind].to_html(str(path)) == path
        page = Page()
        page.feed(path.read_text(encoding="utf-8"))
        assert page.open == [] and MARKUP in page.text

    def test_html_fits_a_phone_and_the_dark(self, kind, reports, tmp_path):
        text = reports[kind].to_html(tmp_path / "report.html").read_text(encoding="utf-8")
        assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in text
        assert "@media (prefers-color-scheme: dark)" in text and "color-scheme: light dark" in text
        page = Page()
        page.feed(text)
        assert page.unscrolled == []  # what is wider than the page scrolls by itself
        assert not re.findall(r"[^-]width: *(\d+)px", text)

    def test_printing_is_what_rich_prints(self, kind, reports):
        console = Console(width=80, no_color=True)
        with console.capture() as captured:
            console.print(reports[kind], soft_wrap=True)
        lines = [line.rstrip() for line in captured.get().splitlines()]
        assert str(reports[kind]) == "\n".join(lines).rstrip() and MARKUP in str(reports[kind])

    def test_the_answer_is_short_and_the_details_are_named_in_it(self, kind, reports):
        report = reports[kind]
        lines = str(report).splitlines()
        assert len(lines) <= LINES and max(map(len, lines)) <= COLUMNS
        names = re.findall(r"'(\w+)'", " ".join(str(report).partition("More: ")[2].split()))
        assert "\n".join(str(report.details(name)) for name in names).split() == str(report.details()).split()
        assert bool(names) == bool(str(report.details()))
        with pytest.raises(ValueError, match="'nothing' is not a table of this report. Its tables: "):
            report.details("nothing")

    @pytest.mark.parametrize("width", [80, 120])
    def test_no_name_is_broken_and_no_figure_cut(self, kind, width, reports):
        tables = [part for parts in reports[kind]._tables().values() for part in parts if isinstance(part, ColumnTable)]
        for table in tables:
            text = plain_text(table, width)
            assert max(map(len, text.splitlines())) <= width
            shown = [name not in ("layer", "layers") and (width == 120 or name in table.narrow) for name in table.names]
            for row in table.rows:
                words = " ".join(cell for cell, is_shown in zip(row, shown, strict=True) if is_shown).split()
                assert [word for word in words if word not in text] == []

    @pytest.mark.parametrize("method", ["to_json", "to_html"])
    def test_a_file_that_cannot_be_written_leaves_the_old_one(self, kind, method, reports, tmp_path, monkeypatch):
        path = tmp_path / "file"
        path.write_text("before")

        def full(self, text, **kwargs):
            with self.open("w") as file:
                file.write(text[:10])
            raise OSError("no space left on device")

        monkeypatch.setattr("pathlib.Path.write_text", full)
        with pytest.raises(OSError, match="no space"):
            getattr(reports[kind], method)(path)
        assert path.read_text() == "before" and list(tmp_path.iterdir()) == [path]
