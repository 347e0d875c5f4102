"""Whole trainings equal the NumPy reference: shared layers, accumulation, averages, a restart in the middle."""

import keras
import numpy as np
import pytest
from marks import ci_on
from network import RATE, assert_same, build, gradients, kernels_of, numbers
from reference import Product, with_gradients

import keras_mp

pytestmark = ci_on("jax")

BACKEND = keras.backend.backend()
MODES = [{"run_eagerly": True}, {"jit_compile": True}] + ([{"jit_compile": False}] if BACKEND == "tensorflow" else [])


def fit(model, x, t, batch_size=8):
    model.fit(x, t, batch_size=batch_size, shuffle=False, verbose=0)


def batches(x, t, count):
    return zip(np.split(x, count), np.split(t, count), strict=True)


def descend(x, t, kernels, count):
    """Plain gradient descent; returns the kernels after each step."""
    steps = []
    for batch, target in batches(x, t, count):
        kernels = [k - np.float32(RATE) * g for k, g in zip(kernels, gradients(batch, target, kernels), strict=True)]
        steps.append(kernels)
    return steps


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_a_layer_called_twice_a_step(mode):
    x, t, kernels = numbers(4)
    model = build(kernels)
    model.compile(keras.optimizers.SGD(RATE), "mse", **mode)
    fit(model, x, t)
    expected = descend(x, t, kernels, 4)[-1]
    assert np.max(np.abs(expected[0] - kernels[0])) > 1e-3  # it did learn
    assert_same(kernels_of(model), expected)


def test_a_layer_called_three_times_has_the_sum_of_three_gradients():
    rng = np.random.default_rng()
    layer = keras_mp.fp8.Float8Dense(16, use_bias=False)
    xs = rng.normal(size=(3, 8, 16)).astype("float32")
    gs = rng.normal(size=(3, 8, 16)).astype("float32")
    layer.build((None, 16))
    kernel = keras.ops.convert_to_numpy(layer.kernel)

    def three(x, w):
        with keras.StatelessScope(state_mapping=[(layer.kernel, w)]):
            return keras.ops.stack([layer(x[index]) for index in range(3)])

    _, _, to_kernel = with_gradients(three)(*[keras.ops.convert_to_tensor(each) for each in (xs, kernel, gs)])
    parts = [Product("ab,bc->ac", x, kernel, g).kernel_gradient for x, g in zip(xs, gs, strict=True)]
    exact, bound = (sum(part[index] for part in parts) for index in range(2))
    assert np.all(np.abs(np.asarray(to_kernel) - exact) <= bound * 1.01)


@pytest.mark.parametrize("mode", MODES[1:], ids=str)
def test_accumulation_of_four(mode):
    x, t, kernels = numbers(4)
    model = build(kernels)
    model.compile(keras.optimizers.SGD(RATE, gradient_accumulation_steps=4), "mse", **mode)
    fit(model, x, t)
    sums = [sum(each) for each in zip(*[gradients(b, y, kernels) for b, y in batches(x, t, 4)], strict=True)]
    assert_same(kernels_of(model), [k - np.float32(RATE / 4) * g for k, g in zip(kernels, sums, strict=True)])


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_averaged_weights(mode):
    x, t, kernels = numbers(2)
    model = build(kernels)
    model.compile(keras.optimizers.SGD(RATE, use_ema=True, ema_momentum=0.5), "mse", **mode)
    fit(model, x, t)  # which ends with the averages
    first, second = descend(x, t, kernels, 2)
    assert_same(kernels_of(model), [(a + b) / 2 for a, b in zip(first, second, strict=True)])


@pytest.mark.parametrize("mode", MODES[1:], ids=str)
def test_save_and_reload_in_the_middle(mode, tmp_path):
    x, t, kernels = numbers(4)
    model = build(kernels)
    model.compile(keras.optimizers.SGD(RATE), "mse", **mode)
    fit(model, x[:16], t[:16])
    model.save(tmp_path / "model.keras")
    model = keras.saving.load_model(tmp_path / "model.keras")
    assert model.get_layer("shared").recipe == keras_mp.fp8.CurrentScaling(power_of_two=True)
    fit(model, x[16:], t[16:])
    assert_same(kernels_of(model), descend(x, t, kernels, 4)[-1])


def test_a_batch_size_that_changes():
    x, t, kernels = numbers(1)
    model = build(kernels)
    model.compile(keras.optimizers.SGD(RATE), "mse")
    expected = kernels
    for start, end in ((0, 4), (4, 6), (6, 8)):
        part = slice(start, end)
        model.train_on_batch(x[part], t[part])
        expected = descend(x[part], t[part], expected, 1)[-1]
    assert_same(kernels_of(model), expected)


@pytest.mark.parametrize("dtype", ["mixed_bfloat16", "mixed_float16"])
@pytest.mark.parametrize("scale", [1.0, 1e-6])
def test_kernel_gradients_of_a_tiny_loss(dtype, scale):
    """The first step with a loss of about 1e-6: the kernel moves by the reference's gradient, not by nothing."""
    rng = np.random.default_rng()
    layer = keras_mp.fp8.Float8Dense(16, use_bias=False, dtype=dtype)
    model = keras.Sequential([keras.Input((16,)), layer])
    # Exact in both 16-bit formats, so that the reference has the same operands.
    x = rng.integers(-8, 9, (8, 16)).astype("float32")
    g = rng.integers(1, 9, (8, 16)).astype("float32") / 64
    kernel = keras.ops.convert_to_numpy(layer.kernel)
    loss_scale = keras_mp.StaticLossScale(2.0**16 if scale < 1 else 2.0**4)
    optimizer = keras_mp.LossScaleOptimizer(keras.optimizers.SGD(1.0), loss_scale)

    def loss(g, y):
        # Weighted, for its gradient is the weights.
        return keras.ops.sum(keras.ops.cast(y, "float32") * g, axis=-1) * scale * 8

    model.compile(optimizer, loss)
    model.train_on_batch(x, g)
    moved = kernel - keras.ops.convert_to_numpy(layer.kernel)
    # What reaches the layer is scaled, and rounded to 16 bits.
    import ml_dtypes

    sixteen = {"mixed_bfloat16": ml_dtypes.bfloat16, "mixed_float16": np.float16}[dtype]
    arrived = (g * np.float32(scale * loss_scale.scale)).astype(sixteen).astype("float32")
    exact, bound = Product("ab,bc->ac", x, kernel, arrived).kernel_gradient
    expected = exact / loss_scale.scale
    assert np.max(np.abs(expected)) > scale / 2
    spacing = np.spacing(np.max(np.abs(kernel)).astype("float32"))  # of the kernel that it is subtracted from
    assert np.all(np.abs(moved - expected) <= bound / loss_scale.scale + spacing)


def test_a_float16_overflow_skips_the_step():
    layer = keras_mp.fp8.Float8Dense(16, dtype="mixed_float16")
    model = keras.Sequential([keras.Input((16,)), layer])
    model.compile(keras_mp.LossScaleOptimizer(keras.optimizers.SGD(1.0)), "mse")
    x = np.random.default_rng().normal(size=(8, 16)).astype("float32")
    before = model.get_weights()
    bad = x.copy()
    bad[3, 3] = np.inf
    model.train_on_batch(bad, x)
    assert int(keras.ops.convert_to_numpy(model.optimizer.skipped_steps)) == 1
    for old, new in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)
    for _ in range(20):  # from 2^15 down to where nothing overflows
        model.train_on_batch(x, x)
    assert not np.array_equal(before[0], model.get_weights()[0])
