"""SelfAttention beside Keras's MultiHeadAttention and GroupQueryAttention with the same weights; saving; bad input."""

import keras
import numpy as np
import pytest
from keras import layers, ops

from models.self_attention import SelfAttention

WIDTH, HEADS, LENGTH = 16, 4, 7


def pair(key_heads=HEADS, causal=False):
    """A SelfAttention and Keras's layer, with the same weights."""
    x = np.random.default_rng().normal(size=(3, LENGTH, WIDTH)).astype("float32")
    ours = SelfAttention(HEADS, key_heads, causal=causal)
    if key_heads == HEADS:
        plain = layers.MultiHeadAttention(HEADS, WIDTH // HEADS)
    else:
        plain = layers.GroupQueryAttention(WIDTH // HEADS, HEADS, key_heads)
    ours(x), plain(x, x)
    for weight in plain.weights:
        weight.assign(np.random.default_rng().normal(size=weight.shape))
    query, query_b, key, key_b, value, value_b, output, output_b = map(np.asarray, plain.get_weights())
    ours.set_weights(
        [
            np.concatenate([each.reshape(WIDTH, -1) for each in (query, key, value)], axis=1),
            np.concatenate([each.reshape(-1) for each in (query_b, key_b, value_b)]),
            output.reshape(-1, WIDTH),
            output_b,
        ]
    )
    return ours, plain, x


@pytest.mark.parametrize("key_heads, causal, training", [(4, False, True), (2, True, True), (1, True, False)])
def test_it_is_keras_attention(key_heads, causal, training):
    ours, plain, x = pair(key_heads, causal)
    expected = ops.convert_to_numpy(plain(x, x, use_causal_mask=causal))
    np.testing.assert_allclose(
        ops.convert_to_numpy(ours(x, training=training)), expected, atol=1e-5 * np.abs(expected).max()
    )


def test_the_mask_that_keras_carries():
    ours, plain, x = pair()
    seen = np.arange(LENGTH)[None] < np.array([[2], [7], [5]])
    masked = layers.Masking(0.0)
    x = np.where(seen[..., None], x, 0.0).astype("float32")
    expected = ops.convert_to_numpy(plain(x, x, attention_mask=seen[:, None, :]))
    np.testing.assert_allclose(ops.convert_to_numpy(ours(masked(x))), expected, atol=1e-5 * np.abs(expected).max())


def test_a_16_bit_softmax_is_in_float32():
    keras.config.set_dtype_policy("mixed_float16")
    layer = SelfAttention(1, use_bias=False)
    x = np.full((1, 3, 4), 60.0, "float32")
    layer(x)
    layer.set_weights([np.tile(np.eye(4), (1, 3)), np.eye(4)])
    # q . k is 14400 and its half 7200: without float32 sums and differences this is NaN or inf.
    np.testing.assert_allclose(np.asarray(layer(x, training=True), "float32"), 60.0, rtol=2**-10)


@pytest.mark.parametrize(
    "arguments, shape, message",
    [
        ({"heads": 4, "key_heads": 3}, None, "heads must be a multiple of key_heads, got 4 and 3"),
        ({"heads": 4}, (2, 5, 6), "width a multiple of the 4 heads, got"),
        ({"heads": 4}, (2, 8), "inputs must have the shape"),
    ],
)
def test_bad_arguments_are_named(arguments, shape, message):
    with pytest.raises(ValueError, match=message):
        layer = SelfAttention(**arguments)
        layer(np.zeros(shape, "float32"))


def test_a_mask_of_the_wrong_shape_is_named():
    layer = SelfAttention(2)
    with pytest.raises(ValueError, match=r"mask must have the shape \(2, 5\).*got \(2, 4\)"):
        layer(np.zeros((2, 5, 4), "float32"), mask=np.ones((2, 4), bool))
