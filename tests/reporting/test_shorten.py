import pytest

from keras_mp.reporting.shorten import listed, shorten_middle


@pytest.mark.parametrize("width", [0, 1, 3, 4, 5, 10, 15, 16, 17, 100])
def test_text_is_no_longer_than_asked_for(width):
    text = "encoder/block_17"
    shortened = shorten_middle(text, width)
    assert len(shortened) == min(width, len(text))
    if len(text) > width > 4:
        begin, _, end = shortened.partition("...")
        assert text.startswith(begin) and text.endswith(end) and abs(len(begin) - len(end)) <= 1


def test_names_are_listed_in_words_and_counted_where_they_are_too_long():
    assert listed([], 20, "layers") == ""
    assert listed(["one"], 20, "layers") == "one"
    assert listed(["one", "two", "three"], 20, "layers") == "one, two and three"
    counted = listed([f"normalization_{n}" for n in range(12)], 40, "layers")
    assert counted.startswith("12 layers, no") and counted.endswith("_11") and len(counted) <= 40
