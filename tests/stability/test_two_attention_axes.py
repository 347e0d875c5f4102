"""Attention over two axes at once, as over the rows and columns of images: scores of six axes."""

import keras
import numpy as np
import pytest

import keras_mp

pytestmark = pytest.mark.jax


def reference(layer, x):
    """The layer in float64, from its weights."""
    kernels = [np.float64(w) for w in layer.get_weights()]
    project = [
        np.einsum("abcdf,fhk->abhcdk", x, kernels[2 * i]) + kernels[2 * i + 1][:, None, None, :] for i in range(3)
    ]
    scores = np.einsum("abhcdk,abhefk->abhcdef", project[0], project[1]) / np.sqrt(project[0].shape[-1])
    scores = np.exp(scores - scores.max(axis=(-2, -1), keepdims=True))
    scores /= scores.sum(axis=(-2, -1), keepdims=True)
    seen = np.einsum("abhcdef,abhefk->abhcdk", scores, project[2])
    return np.einsum("abhcdk,hkf->abcdf", seen, kernels[6]) + kernels[7]


@pytest.mark.parametrize("policy, tolerance", [("mixed_bfloat16", 2e-2), ("mixed_float16", 3e-3)])
def test_attention_over_two_axes_is_that_of_float64(policy, tolerance):
    keras.config.set_dtype_policy(policy)
    x = np.random.default_rng().normal(size=(2, 3, 2, 4, 8))
    inputs = keras.Input((3, 2, 4, 8))
    layer = keras.layers.MultiHeadAttention(2, 4, attention_axes=(2, 3))
    model = keras_mp.stabilize(keras.Model(inputs, layer(inputs, inputs)))
    (treated,) = (each for each in model.layers if isinstance(each, keras.layers.MultiHeadAttention))
    expected = reference(treated, x)
    for output in (model(x), model.predict(x, verbose=0)):
        np.testing.assert_allclose(
            keras.ops.convert_to_numpy(keras.ops.cast(output, "float32")),
            expected,
            atol=tolerance * np.abs(expected).max(),
        )
