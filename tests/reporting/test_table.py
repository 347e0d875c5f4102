"""Tables on narrow terminals: what is shown, and what is said to be hidden."""

import pytest

from keras_mp.reporting.table import ColumnTable, plain_text


def printed(width, rows=3):
    table = ColumnTable("Title", ("layer", "role", "kernel", "share"), narrow=("layer", "share"), right=("share",))
    for row in range(rows):
        table.add_row(f"block{row}_dense", "kernel gradient", "cuDNN convolution", f"{row}.0%")
    table.caption = "and 7 more"
    return plain_text(table, width)


@pytest.mark.parametrize("width", [40, 80, 119])
def test_a_narrow_terminal_shows_what_matters_and_names_the_rest(width):
    text = printed(width)
    assert max(map(len, text.splitlines())) <= width
    assert "block2_dense" in text and "2.0%" in text and "cuDNN" not in text
    assert "role, kernel" in " ".join(text.split()) and "and 7 more" in text


@pytest.mark.parametrize("width", [120, 140])
def test_a_wide_terminal_shows_all(width):
    text = printed(width)
    assert "cuDNN convolution" in text and "also:" not in text and "and 7 more" in text


def test_a_long_word_is_not_broken_and_the_name_beside_it_gives_way():
    table = ColumnTable("Title", ("layer", "kernel"), narrow=("layer", "kernel"))
    table.add_row("block_" * 10, "k" * 50)
    text = plain_text(table, 80)
    assert max(map(len, text.splitlines())) <= 80
    assert "k" * 50 in text and "..." in text


def test_text_in_a_notebook_is_text(monkeypatch):
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    assert "block1_dense" in printed(80)
