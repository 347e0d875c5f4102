"""Whole trainings equal the NumPy reference: shared layers, averages, batches of another size."""

import keras
import ml_dtypes
import numpy as np
import pytest
from network import RATE, assert_same, build, gradients, kernels_of, numbers
from reference import Product

import keras_mp
from keras_mp.layers import Float8Dense


def descend(x, t, kernels):
    """Plain gradient descent: the kernels after a step."""
    return [k - np.float32(RATE) * g for k, g in zip(kernels, gradients(x, t, kernels), strict=True)]


@pytest.mark.jax
def test_a_layer_called_twice_a_step():
    """Batches of two sizes, of which the second is compiled anew."""
    x, t, kernels = numbers(2)
    model, expected = build(kernels), kernels
    model.compile(keras.optimizers.SGD(RATE), "mse", jit_compile=True)
    for part in (slice(0, 8), slice(8, 12)):
        model.train_on_batch(x[part], t[part])
        expected = descend(x[part], t[part], expected)
    assert np.max(np.abs(expected[0] - kernels[0])) > 1e-3  # it did learn
    assert_same(kernels_of(model), expected)


def test_averaged_weights():
    """Out of a compiled program, where Keras's layers crash, too."""
    x, t, kernels = numbers(2)
    model = build(kernels)
    model.compile(keras.optimizers.SGD(RATE, use_ema=True, ema_momentum=0.5), "mse", run_eagerly=True)
    model.fit(x, t, batch_size=8, shuffle=False, verbose=0)  # which ends with the averages
    first = descend(x[:8], t[:8], kernels)
    second = descend(x[8:], t[8:], first)
    assert_same(kernels_of(model), [(a + b) / 2 for a, b in zip(first, second, strict=True)])


@pytest.mark.parametrize("dtype", ["mixed_bfloat16", "mixed_float16"])
def test_kernel_gradients_of_a_tiny_loss(dtype):
    """The first step with a loss of about 1e-6: the kernel moves by the reference's gradient, not by nothing."""
    scale, rng = 1e-6, np.random.default_rng()
    layer = Float8Dense(16, use_bias=False, dtype=dtype)
    model = keras.Sequential([keras.Input((16,)), layer])
    # Exact in both 16-bit formats, so that the reference has the same operands.
    x = rng.integers(-8, 9, (8, 16)).astype("float32")
    g = rng.integers(1, 9, (8, 16)).astype("float32") / 64
    kernel = keras.ops.convert_to_numpy(layer.kernel)
    loss_scale = keras_mp.LossScale.static(2.0**16)
    optimizer = keras_mp.LossScaleOptimizer(keras.optimizers.SGD(1.0), loss_scale)

    def loss(g, y):
        # Weighted, for its gradient is the weights.
        return keras.ops.sum(keras.ops.cast(y, "float32") * g, axis=-1) * scale * 8

    model.compile(optimizer, loss)
    model.train_on_batch(x, g)
    moved = kernel - keras.ops.convert_to_numpy(layer.kernel)
    # What reaches the layer is scaled, and rounded to 16 bits.
    sixteen = {"mixed_bfloat16": ml_dtypes.bfloat16, "mixed_float16": np.float16}[dtype]
    arrived = (g * np.float32(scale * loss_scale.scale)).astype(sixteen).astype("float32")
    exact, bound = Product("ab,bc->ac", x, kernel, arrived).kernel_gradient
    expected = exact / loss_scale.scale
    assert np.max(np.abs(expected)) > scale / 2
    spacing = np.spacing(np.max(np.abs(kernel)).astype("float32"))  # of the kernel that it is subtracted from
    assert np.all(np.abs(moved - expected) <= bound / loss_scale.scale + spacing)
