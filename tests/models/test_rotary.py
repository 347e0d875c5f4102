"""Rotary positions against complex numbers in NumPy; the layer that has them, saved and loaded."""

import keras
import numpy as np
import pytest
from gradients_of import MODES, value_and_gradients
from keras import ops

from models.self_attention import SelfAttention, rotate

FREQUENCIES = [1.0, 0.3, 0.01]


def expected(x, direction=1):
    """Pairs of features as complex numbers, which turn."""
    first, second = np.split(x.astype("float64"), 2, axis=-1)
    angles = direction * np.arange(x.shape[1])[:, None, None] * np.array(FREQUENCIES)
    turned = (first + 1j * second) * np.exp(1j * angles)
    return np.concatenate([turned.real, turned.imag], axis=-1)


@pytest.mark.jax
@pytest.mark.parametrize("mode, dtype, tolerance", [(MODES[-2], "float32", 1e-6), ("jit", "bfloat16", 2**-8)])
def test_values_and_gradients(mode, dtype, tolerance):
    rng = np.random.default_rng()
    x, upstream = (
        ops.convert_to_numpy(ops.cast(ops.cast(rng.normal(size=(2, 9, 3, 6)), dtype), "float32")) for _ in range(2)
    )

    def function(x):
        rotated = rotate(ops.cast(x, dtype), FREQUENCIES)
        assert keras.backend.standardize_dtype(rotated.dtype) == dtype
        return ops.sum(ops.cast(rotated, "float32") * upstream)

    ours = ops.convert_to_numpy(ops.cast(rotate(ops.cast(x, dtype), FREQUENCIES), "float32"))
    np.testing.assert_allclose(ours, expected(x), atol=5 * tolerance)
    _, gradient = value_and_gradients(function, [x], mode, unknown=(0, 1))
    # The transpose of a rotation turns back.
    np.testing.assert_allclose(gradient, expected(upstream, -1), atol=5 * tolerance)


def test_rotary_of_another_number_of_pairs_is_named():
    layer = SelfAttention(2, rotary=FREQUENCIES)
    with pytest.raises(ValueError, match=r"rotary must hold 4 numbers, one for each pair of the 8 .* got 3"):
        layer(np.zeros((1, 4, 16), "float32"))
