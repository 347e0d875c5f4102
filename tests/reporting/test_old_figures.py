"""Every figure that a report of `inspect` printed before its answer came first is printed still, of six steps.

`printed_before/` has what was printed then, on lines of any length, and the data of each report.
"""

import json
import re
import typing
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import is_dataclass
from pathlib import Path

import pytest

from keras_mp.planner.read.matmuls import NOT_COMPILED
from keras_mp.planner.report.compile_report import CompileReport
from keras_mp.reporting.table import plain_text

BEFORE = sorted((Path(__file__).parent / "printed_before").glob("*.json"))
UNITS = r"bytes|KiB|MiB|GiB|TiB|ms|s|GB/s|%|[kMGTP]?FLOP|[kMGTP]? ?cycles"
FIGURE = re.compile(rf"(?<![\w.])\d[\d,.]*(?:e[-+]?\d+)?(?: ?(?:{UNITS})\b|%)?")


def made(kind, values):
    """A value of a type, from what JSON has of it."""
    of = typing.get_args(kind)
    if is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        return kind(**{name: made(hints[name], value) for name, value in values.items() if name in hints})
    if isinstance(values, dict) and issubclass(typing.get_origin(kind) or object, Mapping):
        return {name: made(of[1], value) for name, value in values.items()}
    if isinstance(values, list):
        kinds = [of[0]] * len(values) if of[-1] is Ellipsis else of
        return tuple(map(made, kinds, values))
    if values is not None and typing.get_origin(kind) is not None and type(None) in of:
        return made(of[0], values)
    return float(values) if kind is float else values


@pytest.fixture(params=BEFORE, ids=lambda path: path.stem)
def before(request):
    kept = json.loads(request.param.read_text())
    return kept["printed"], made(CompileReport, kept["report"])


def figures(text):
    return [figure.rstrip(".,") for figure in FIGURE.findall(text)]


def split_old_table(lines):
    """The rows of the first table that was printed, and the lines without it and without groups of layers."""
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in lines if line.startswith("│")]
    names = [cell.strip() for cell in next(line for line in lines if line.startswith("┃")).strip("┃").split("┃")]
    return [dict(zip(names, row, strict=True)) for row in rows if len(row) == len(names)]


def as_before(compiled, note):
    """The cell that held both."""
    return note if note == NOT_COMPILED else f"{compiled} ({note})" if note else compiled


def test_every_figure_is_there(before):
    printed, report = before
    new = set(figures(plain_text(report.details(), 1000)) + figures(plain_text(report, 1000)))
    products = [line for line in printed if line.startswith("│") and line.count("│") == 10]
    others = "\n".join(line for line in printed if line not in products)
    others = re.sub(r" and \d+ more", "", others)  # layers, which are rows of their own
    # That of the published runs is no figure of the step: it changes when a run is added.
    others = re.sub(r" (\d+|One) published runs?.*?(?= Estimate)", "", others)
    assert len(figures(others)) > 10
    assert [figure for figure in figures(others) if figure not in new] == []


def test_every_product_is_there_with_its_share(before):
    printed, report = before
    table, *_ = report._tables()["products"]
    new = [dict(zip(table.names, row, strict=True)) for row in table.rows]
    columns = ("role", "rows x sum x columns", "asked", "compiled", "summed in", "kernel")
    shares, numbers = defaultdict(float), defaultdict(int)
    for row in new:
        row["compiled"] = as_before(row["compiled"], row["note"])
        key = tuple(row[name] for name in columns)
        shares[key] += float(row["share"].rstrip("%"))
        numbers[key] += int(row["number"])
    old = split_old_table(printed)
    assert old and sum(numbers.values()) == len(report.matmuls)
    for row in old:
        key = tuple(row[name] for name in columns)
        assert shares[key] == pytest.approx(float(row["share"].rstrip("%")), abs=0.05 * (numbers[key] + 1))
        more = re.search(r" and (\d+) more$", row["layer"])
        assert numbers[key] == 1 + int(more[1]) if more else numbers[key] >= 1
    unaligned = {row["unaligned sizes"] for row in old if row["unaligned sizes"]}
    sizes = report._tables()["products"][1:]
    assert unaligned == {row[0] for table in sizes for row in table.rows}
