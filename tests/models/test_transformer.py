"""The block and the positions against the equations, in NumPy."""

import keras
import numpy as np
import pytest

from models.transformer import Size, add_positions, block

SIZE = Size(1, 32, 4)
LENGTH = 6


def normalize(x, scale, offset):
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5) * scale + offset


def gelu(x):
    # Hendrycks, Gimpel 2016 (arXiv:1606.08415), section 2: the approximation.
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def expected(x, weights, seen):
    """One block; `seen[b, i, j]` tells whether token i sees token j."""
    scale_1, offset_1, projection, projection_b, output, output_b, *rest = weights
    scale_2, offset_2, dense_1, dense_1_b, dense_2, dense_2_b = rest
    y = normalize(x, scale_1, offset_1)
    together = (y @ projection + projection_b).reshape(2, LENGTH, 3, SIZE.heads, -1)
    queries, keys, values = together.transpose(2, 0, 3, 1, 4)
    scores = np.where(seen[:, None], queries @ keys.swapaxes(-1, -2) / np.sqrt(SIZE.width / SIZE.heads), -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    x = x + (weights @ values).transpose(0, 2, 1, 3).reshape(2, LENGTH, SIZE.width) @ output + output_b
    return x + gelu(normalize(x, scale_2, offset_2) @ dense_1 + dense_1_b) @ dense_2 + dense_2_b


@pytest.mark.parametrize("causal, remat", [(False, False), (True, True)])
def test_block_is_the_equation(causal, remat):
    generator = np.random.default_rng(0)
    x = generator.normal(size=(2, LENGTH, SIZE.width)).astype("float32")
    real = np.array([[True] * 6, [True] * 4 + [False] * 2])
    inputs, mask = keras.Input((LENGTH, SIZE.width)), keras.Input((LENGTH,), dtype="bool")
    outputs = block(inputs, SIZE, "block", dropout=0.5, causal=causal, mask=mask[:, None, :], remat=remat)
    model = keras.Model([inputs, mask], outputs)
    for variable in model.weights:
        variable.assign(generator.normal(size=variable.shape) * 0.3)
    seen = np.broadcast_to(real[:, None, :], (2, LENGTH, LENGTH))
    if causal:
        seen = seen & np.tri(LENGTH, dtype=bool)
    weights = [np.asarray(variable, "float64") for variable in model.trainable_weights]
    np.testing.assert_allclose(model.predict_on_batch([x, real]), expected(x, weights, seen), atol=1e-4)


def test_positions_are_added_in_order():
    inputs = keras.Input((LENGTH, SIZE.width))
    model = keras.Model(inputs, add_positions(inputs))
    (vectors,) = model.get_layer("positions").get_weights()
    x = np.ones((3, LENGTH, SIZE.width), "float32")
    np.testing.assert_allclose(model.predict_on_batch(x), x + vectors, atol=1e-6)
