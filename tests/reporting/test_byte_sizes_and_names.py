import pytest

from keras_mp.reporting.text import byte_size, error_line, listed, shorten_middle


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 bytes"),
        (1023, "1,023 bytes"),
        (1024, "1.0 KiB"),
        (1024 * 1024 - 1, "1.0 MiB"),
        (1536 * 1024, "1.5 MiB"),
        (3 * 2**30, "3.0 GiB"),
        (5 * 2**50, "5,120.0 TiB"),
    ],
)
def test_a_size_is_in_the_unit_that_people_read(count, text):
    assert byte_size(count) == text


def test_an_error_in_one_line():
    assert error_line(TypeError("no floats\n\nStack: ...")) == "TypeError: no floats"
    assert error_line(KeyError()) == "KeyError: "
    assert error_line(ValueError("x" * 1000)) == f"ValueError: {'x' * 500}"


def test_the_line_of_keras_that_names_the_layer_and_the_reason_after_it():
    error = ValueError("Exception encountered when calling Dense.call().\n\n\x1b[1mtoo wide\x1b[0m\n\nArguments: ...")
    assert error_line(error) == "ValueError: Exception encountered when calling Dense.call(). too wide"


def test_nodes_of_tensorflow_lose_their_braces():
    error = RuntimeError("{{function_node __wrapped__MatMul}} {{node model/dense}} has no kernel\n at 0x1")
    assert error_line(error) == "RuntimeError: model/dense has no kernel"


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
