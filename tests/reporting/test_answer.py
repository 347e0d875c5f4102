"""The answer of a report: what gives way where there is no room, the bar of a memory, names of repeated blocks."""

import dataclasses

import pytest
from rich.console import Console

import keras_mp
from keras_mp.planner.report.compile_table import MemoryBar
from keras_mp.planner.report.suggestions import Advice
from keras_mp.reporting.answer import COLUMNS, LINES, Sentence, fitting
from keras_mp.reporting.table import ColumnTable, plain_text
from keras_mp.reporting.text import pattern_of
from tests.reporting.report_examples import advised, compiled

LONG = "/".join(f"a_block_with_a_long_name_{number}" for number in range(6))


def test_what_matters_least_gives_way_and_what_matters_most_stays():
    said = [Sentence("", "first"), *(Sentence("", f"third {n}", rank=2) for n in range(4)), Sentence("", "2", rank=1)]
    assert [one.text for one in fitting(said, 4)] == ["first", "third 0", "third 1", "2"]
    assert [one.text for one in fitting(said, 0)] == ["first"]


def test_code_is_not_broken_and_counts_as_the_lines_that_a_terminal_makes_of_it():
    sentence = Sentence("Change 1", "words", (f"f({'x' * 100})",))
    assert sentence.lines == 3 and f"    f({'x' * 100})" in plain_text(sentence, COLUMNS).splitlines()
    assert sentence.html() == f"<p><strong>Change 1:</strong> words</p><pre><code>f({'x' * 100})</code></pre>"


@pytest.mark.parametrize("whole", [0, 200, 100, 50])
def test_the_bar_of_a_memory_is_in_proportion(whole):
    bar, *legend = plain_text(MemoryBar({"a": 50, "b": 25, "c": 25}, whole, ["a 50", "b 25", "c 25"]), 80).splitlines()
    counts = [bar.count(mark) for mark in "█▓▒·"]
    assert sum(counts) + bar.count("│") == 78
    length = 78 * 100 / max(whole, 100)
    assert counts[:3] == pytest.approx([length / 2, length / 4, length / 4], abs=1.5)
    assert ("│" in bar) == (whole == 50) and ("· free" in " ".join(legend)) == (whole >= 100)


def large(layers=40):
    """A report with long names, as many of everything as there can be."""
    report = compiled()
    names = [f"{LONG}/{number}" for number in range(layers)]
    dtypes = ("bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2", "int8")
    products = [
        dataclasses.replace(
            report.matmuls[0], layer=name, asked=(dtypes[place % 6],) * 2, compiled=(dtypes[place % 4],) * 2
        )
        for place, name in enumerate(names)
    ]
    return dataclasses.replace(
        report,
        model=LONG,
        batch=tuple(f"float32[{number}, 1024, 1024, 3]" for number in range(9)),
        matmuls=tuple(products),
        sensitive=tuple(dataclasses.replace(report.sensitive[0], layer=name) for name in names),
        collectives=tuple(dataclasses.replace(report.collectives[0], layer=name) for name in names),
        advice=tuple(Advice(f"Something is the matter in {name[:100]}.", "code(" + "x" * 90 + ")") for name in names),
        compared={f"precision {number}": report for number in range(5)},
        versions={f"a-package-{number}": "1.2.3" for number in range(9)},
    )


def test_the_answer_of_the_largest_report_has_room_for_the_verdict():
    lines = str(large()).splitlines()
    prose = [line for line in lines if not line.startswith("    code(")]
    assert max(map(len, prose)) <= COLUMNS
    assert len(lines) + sum(len(line) > COLUMNS for line in lines) <= LINES
    for label in ("Fits", "Time", "Precision", "Change 1", "More"):
        assert any(line.startswith(f"{label}: ") for line in lines), label


@pytest.mark.parametrize("compared", [(), ("float32", "mixed_bfloat16")], ids=["alone", "beside others"])
def test_advice_on_many_chips_has_room_for_the_verdict(compared):
    report = advised()
    row, large_memory = report.rows[0], dataclasses.replace(report.rows[0].memory, peak=2**38, capacity=2**38)
    step = dataclasses.replace(row.report, compared=dict.fromkeys(compared, row.report), extrapolated="4 of 8 blocks")
    rows = [
        dataclasses.replace(row, title=f"8 x {chip.title}", memory=large_memory, report=step)
        for chip in keras_mp.chips.CHIPS.values()
    ]
    lines = str(dataclasses.replace(report, rows=tuple(rows))).splitlines()
    assert len(lines) <= LINES and max(map(len, lines)) <= COLUMNS
    assert sum(line.startswith("8 x ") and "  yes  " in line for line in lines) == 12 // (1 + len(compared))
    assert any(line.startswith("and ") and line.endswith(" chips more") for line in lines)


def test_a_name_is_shortened_in_the_middle_and_repeated_blocks_are_one_row():
    (table, *_) = large()._tables()["products"]
    for width in (80, 120):
        rows = plain_text(table, width).splitlines()
        assert max(map(len, rows)) <= width
        named = [row for row in rows if row.startswith("a_block")]
        assert len(named) == 12 and all("..." in row.split()[0] for row in named)  # by dtypes asked and compiled
        assert [row for row in rows[3:] if row.strip()] == named + rows[len(named) + 3 :]
    assert sum(int(row[1]) for row in table.rows) == 40
    assert pattern_of(["block1/dense_1", "block12/dense_1"]) == "block*/dense_1"


def test_a_table_of_words_breaks_words_and_no_name():
    table = ColumnTable("", ("layer", "why"), ("layer", "why"), rows=[(LONG, "why it is so " * 9)])
    lines = plain_text(table, 60).splitlines()
    assert sum("a_block" in line for line in lines) == 1 and max(map(len, lines)) <= 60


@pytest.mark.parametrize("width", [40, 80, 200])
def test_paragraphs_are_broken_between_words(width, capsys):
    words = "one two three " * 20
    Console(width=width).print(Sentence("Label", words), soft_wrap=True)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= min(width, 120) and " ".join(lines).split()[1:] == words.split()
    assert lines[0].startswith("Label: one") and all(line.startswith("  ") for line in lines[1:])
    assert plain_text(Sentence("", "short"), 120) == "short"
