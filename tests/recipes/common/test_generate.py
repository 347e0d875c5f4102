import types

import numpy as np
import pytest

from recipes.common.generate import generate, readable


def fake_model(logits_of, length=4):
    """Stands in for a model: `logits_of` maps the last bytes seen to logits over 8 bytes; `seen` keeps its inputs."""
    seen = []

    def predict_on_batch(tokens):
        seen.append(tokens.copy())
        return np.stack([[logits_of(token) for token in row] for row in tokens])

    return types.SimpleNamespace(input_shape=(None, length), predict_on_batch=predict_on_batch, seen=seen)


def test_the_window_grows_and_then_slides_in_one_shape():
    model = fake_model(lambda token: np.eye(8)[(token + 1) % 8])
    assert generate(model, b"\x01\x02", 5, temperature=0, seed=0) == bytes([3, 4, 5, 6, 7])
    expected = [[1, 2, 0, 0], [1, 2, 3, 0], [1, 2, 3, 4], [2, 3, 4, 5], [3, 4, 5, 6]]
    assert [tokens.tolist() for tokens in model.seen] == [[window] for window in expected]


@pytest.mark.parametrize("temperature, share", [(1.0, 3 / 4), (0.5, 9 / 10), (2.0, 3**0.5 / (1 + 3**0.5))])
def test_bytes_are_drawn_from_the_softmax_at_that_temperature(temperature, share):
    model = fake_model(lambda token: np.log([1.0, 3.0]))
    text = generate(model, b"\x00", 4000, temperature, seed=0)
    assert text.count(1) / 4000 == pytest.approx(share, abs=0.03)


def test_the_same_seed_gives_the_same_text_whatever_the_numbers_scale():
    model = fake_model(lambda token: 1e4 * np.sin(np.arange(8) * (token + 1)))
    assert generate(model, b"\x03", 50, 1e4, seed=1) == generate(model, b"\x03", 50, 1e4, seed=1)
    assert generate(model, b"\x03", 50, 1e4, seed=1) != generate(model, b"\x03", 50, 1e4, seed=2)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((b"", 1, 1.0), "prompt must hold at least one token, got b''"),
        ((b"a", -1, 1.0), "count must be at least 0, got -1"),
        ((b"a", 1, float("nan")), "temperature must be at least 0, got nan"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        generate(fake_model(lambda token: np.zeros(8)), *arguments, seed=0)


def test_readable_text_cannot_control_a_terminal():
    assert readable(b"a\x1b[31m\tb\n\xff") == "a\N{REPLACEMENT CHARACTER}[31m\tb\n\N{REPLACEMENT CHARACTER}"
    assert readable("é".encode()) == "é"
