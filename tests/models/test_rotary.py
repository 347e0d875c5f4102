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


@pytest.mark.parametrize("precision", ["float32", "mixed_bfloat16"])
def test_attention_to_rotated_keys_is_saved_and_loaded(precision, tmp_path):
    keras.config.set_dtype_policy(precision)
    inputs = keras.Input((None, 12))
    layer = SelfAttention(2, 1, causal=True, use_bias=False, rotary=FREQUENCIES)
    model = keras.Model(inputs, layer(inputs))
    x = np.random.default_rng().normal(size=(2, 7, 12)).astype("float32")
    kernel, output = (np.asarray(w, "float64") for w in model.get_weights())
    query, key, value = np.split(x @ kernel, [12, 18], axis=-1)
    query = expected(query.reshape(2, 7, 2, 6))
    key = expected(key.reshape(2, 7, 1, 6))[:, :, 0]
    scores = np.einsum("bihd,bjd->bhij", query, key) / np.sqrt(6)
    weights = np.where(np.tril(np.ones((7, 7), bool)), np.exp(scores), 0.0)
    exact = np.einsum("bhij,bjd->bihd", weights / weights.sum(-1, keepdims=True), value).reshape(2, 7, 12) @ output
    tolerance = 1e-5 if precision == "float32" else 2**-5
    ours = model.predict(x, verbose=0)
    np.testing.assert_allclose(ours.astype("float64"), exact, atol=tolerance * np.abs(exact).max())
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(loaded.predict(x[:, :4], verbose=0), model.predict(x[:, :4], verbose=0))


def test_rotary_of_another_number_of_pairs_is_named():
    layer = SelfAttention(2, rotary=FREQUENCIES)
    with pytest.raises(ValueError, match=r"rotary must hold 4 numbers, one for each pair of the 8 .* got 3"):
        layer(np.zeros((1, 4, 16), "float32"))
