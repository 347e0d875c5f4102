"""Weights gathered in one byte over 8 devices, in a process of their own; test_gathers.py starts it."""

import re

import jax
import jax.numpy as jnp
import keras
import ml_dtypes
import numpy as np
import pytest
from arrays import numpy
from jax.sharding import PartitionSpec
from on_several_devices import CONFIG

import keras_mp
from keras_mp import fp8
from keras_mp.backend.common.device import TracedChip
from keras_mp.fp8.scaled_product import matmul
from keras_mp.lowering import lower_step
from keras_mp.parallel._jax_part import AXIS, VariablePart
from recipes.language_model import batches, build

DEVICES = 8


def part(shape, axis, *, dtype="bfloat16", in_8_bits=False):
    spec = PartitionSpec(*(AXIS if place == axis else None for place in range(len(shape))))
    return VariablePart(axis, dtype, "float32", [], False, spec, tuple(shape), in_8_bits)


def on_devices(function, part, inputs, *outputs):
    """Calls a function of this device's part of an array, and of an array that all have."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()), (AXIS,))
    specs = {"part": part.spec, "each": PartitionSpec(AXIS), "same": PartitionSpec()}
    return jax.jit(
        jax.shard_map(
            function,
            mesh=mesh,
            in_specs=(part.spec, *(PartitionSpec() for _ in inputs)),
            out_specs=tuple(specs[output] for output in outputs),
            check_vma=False,
        )
    )


def rounded_rows(x):
    """E4M3 with a scale for each row, in NumPy."""
    amax = np.abs(x.astype("float64")).max(-1, keepdims=True)
    scale = np.where(amax > 0, 2.0 ** np.floor(np.log2(np.minimum(448 / np.where(amax > 0, amax, 1), 2.0**126))), 1)
    return (x * scale).astype("float32").astype(ml_dtypes.float8_e4m3fn).astype("float64") / scale


@pytest.mark.parametrize("shape, axis", [((16, 40), 0), ((3, 64), 1), ((3, 8, 32), 1), ((5, 7, 48), 2)])
def test_rows_arrive_as_rounded_and_the_gradient_is_the_sum_of_all(shape, axis):
    random = np.random.default_rng()
    x = (random.normal(size=shape) * np.exp2(random.integers(-30, 30, (*shape[:-1], 1)))).astype("float32")
    x[0, 0] = 0
    upstream = random.integers(-8, 8, (DEVICES, *shape)).astype("float32")
    how = part(shape, axis, dtype="float32", in_8_bits=True)

    def step(own, upstream):
        whole, pull = jax.vjp(how.gathered, own)
        return whole[None], *pull(upstream[jax.lax.axis_index(AXIS)])

    arrived, gradient = on_devices(step, how, [upstream], "each", "part")(x, upstream)
    for one in np.asarray(arrived):
        np.testing.assert_array_equal(one, rounded_rows(x).astype("float32"))
    np.testing.assert_array_equal(gradient, upstream.sum(0))


@pytest.mark.parametrize("value, axis", [(-np.inf, 0), (np.inf, 1), (np.nan, 1)])
def test_a_weight_that_is_not_finite_arrives_as_nan(value, axis):
    x = np.random.default_rng().normal(size=(16, 64)).astype("float32")
    x[9, 33] = value
    how = part(x.shape, axis, in_8_bits=True)
    (arrived,) = on_devices(lambda own: (how.gathered(own),), how, [], "same")(x)
    found = np.isnan(np.asarray(arrived))
    assert found[9, 33] and not np.delete(found, 9, 0).any()


@pytest.mark.parametrize(
    "recipe, axis",
    [
        (fp8.Scalings.named("delayed"), 1),
        (fp8.Scalings.named("int8"), 0),
        pytest.param(fp8.Scalings.named("rowwise"), 0, marks=[pytest.mark.slow, pytest.mark.rare]),
        pytest.param(fp8.Scalings.named("int8", kernel_gradient=True), 1, marks=pytest.mark.slow),
    ],
)
def test_a_product_of_a_kernel_in_parts_is_that_of_the_whole(recipe, axis):
    """Bit for bit, where all devices have the same inputs; the gradient is this device's part of the sum of all."""
    random, shapes = np.random.default_rng(), ((16, 32), (32, 48), (16, 48))
    inputs, kernel, upstream = (random.normal(size=shape).astype("float32") for shape in shapes)
    columns = recipe.columns
    known = random.uniform(1, 4, (3, columns)).astype("float32") if columns else None
    how = part(kernel.shape, axis)

    def product(kernel, part=None):
        y, pull = jax.vjp(lambda x, w: matmul(x, w, recipe, history=known, part=part), inputs, kernel)
        return y, *pull(jnp.asarray(upstream))

    y, dx, dw = on_devices(lambda own: product(own, how), how, [], "same", "same", "part")(kernel)
    wanted = [np.asarray(array) for array in jax.jit(product)(kernel)]
    np.testing.assert_array_equal(y, wanted[0])
    np.testing.assert_array_equal(dx, wanted[1])
    np.testing.assert_allclose(dw, 8 * wanted[2], rtol=8 * 2.0**-24)  # 7 sums of float32 are rounded


def gathered(convert=None, **options):
    """The bytes that a step of the small language model gathers, by the dtype as StableHLO writes it."""
    keras.config.set_dtype_policy("mixed_bfloat16")
    x, y = batches(CONFIG)[0]
    with keras_mp.parallel.distribute("fully_sharded", DEVICES, **options) as plan:
        model = build(CONFIG)
        if convert:
            model = keras_mp.convert(model, convert, select=lambda path, layer: "dense" in path)
        optimizer = keras_mp.LossScaleOptimizer(keras.optimizers.AdamW(1e-3, global_clipnorm=1.0))
        model.compile(optimizer, keras_mp.lean.ChunkedCrossEntropy())
        lowered = lower_step(model, (x, y), training=True, chip=TracedChip("cpu"), plan=plan)
    found = {}
    for sizes, dtype in re.findall(r"stablehlo\.all_gather.*-> tensor<([\dx]+)x(\w+)>", lowered.module.decode()):
        size = np.prod([int(size) for size in sizes.split("x")]) * {"ui8": 1, "i8": 1, "bf16": 2, "f32": 4}[dtype]
        found[dtype] = found.get(dtype, 0) + size
    return found


@pytest.mark.slow
def test_all_but_vectors_and_scales_is_gathered_in_one_byte():
    whole, small = gathered(), gathered(gather_dtype="float8")
    assert "ui8" not in whole
    # Vectors of 16 bits, and a scale of 4 bytes for rows of 64 or more.
    assert small["ui8"] > 0.9 * sum(small.values())
    assert 0.5 < sum(small.values()) / sum(whole.values()) < 0.6


@pytest.mark.slow
def test_an_8_bit_layer_gathers_its_codes_without_being_asked():
    assert gathered(fp8.Scalings.named("int8"))["i8"] == 2 * 64 * 256  # the kernels of two layers of a block


@pytest.mark.slow
def test_a_recipe_that_cannot_scale_parts_scales_the_whole():
    recipe = fp8.Scalings.named("mxfp8")
    assert not recipe.takes_parts and fp8.Scalings.named("current").takes_parts
    assert set(gathered(recipe)) <= {"bf16", "f32"}


def test_an_overflow_on_one_device_skips_the_step_of_all():
    random, settings = np.random.default_rng(), {"gather_dtype": "float8", "reduce_dtype": "bfloat16"}
    x = random.integers(-8, 8, (2 * DEVICES, 16)).astype("float32")
    x[random.integers(DEVICES), 3] = np.inf
    with keras_mp.parallel.distribute("fully_sharded", DEVICES, **settings):
        model = keras.Sequential([keras.Input((16,)), keras.layers.Dense(32, use_bias=False)])
        model.compile(
            keras_mp.LossScaleOptimizer(keras.optimizers.SGD(1.0), keras_mp.LossScale(initial_scale=4.0)),
            loss=lambda _, y: y,
        )
        before = numpy(model.weights[0])
        model.fit(x[:DEVICES], np.zeros((DEVICES, 32)), batch_size=DEVICES, shuffle=False, verbose=0)
        np.testing.assert_array_equal(numpy(model.weights[0]), before)
        model.fit(x[DEVICES:], np.zeros((DEVICES, 32)), batch_size=DEVICES, shuffle=False, verbose=0)
        optimizer = model.optimizer
    assert numpy(optimizer.skipped_steps) == 1 and numpy(optimizer.iterations) == 1
    assert np.any(numpy(model.weights[0]) != before)
    assert {float(shard.data) for shard in optimizer.dynamic_scale.value.addressable_shards} == {2.0}
