"""Bars that share one limit, and paragraphs as wide as the terminal."""

import re

import pytest
from rich.console import Console

from keras_mp.reporting.answer import Sentence
from keras_mp.reporting.html import limited_bars
from keras_mp.reporting.table import plain_text


def widths(page, bar):
    drawn = re.findall(r'<div class="limited">(.*?)</div>', page)[bar]
    return [float(share) for share in re.findall(r"width: ([\d.]+)%", drawn)]


def test_a_bar_that_is_longer_than_its_limit_makes_all_bars_shorter():
    page = limited_bars({"half": {"a": 0.25, "b": 0.25}, "over": {"a": 1.5, "b": 0.5}}, str, "free", "the limit")
    assert widths(page, 0) == [12.5, 12.5, 25.0]  # the last is what is free
    assert widths(page, 1) == [75.0, 25.0]
    assert page.count('style="left: 50.000%"') == 2
    assert "#" not in re.findall(r'<span title="free[^>]*>', page)[0]  # its colour follows the reader's dark mode


@pytest.mark.parametrize("width", [40, 80, 200])
def test_paragraphs_are_broken_between_words(width, capsys):
    words = "one two three " * 20
    Console(width=width).print(Sentence("Label", words), soft_wrap=True)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= min(width, 120) and " ".join(lines).split()[1:] == words.split()
    assert lines[0].startswith("Label: one") and all(line.startswith("  ") for line in lines[1:])
    assert plain_text(Sentence("", "short"), 120) == "short"
