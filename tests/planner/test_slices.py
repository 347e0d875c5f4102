"""A step on several devices, compiled: a slice of TPUs, the GPUs of one host."""

import math
from collections import Counter

import keras
import pytest

import keras_mp
from keras_mp.parallel.plan import Plan
from keras_mp.planner.chips.targets import find_target
from models.gpt import gpt
from models.transformer import Size

only_jax = pytest.mark.skipif(keras.backend.backend() != "jax", reason="a step on several devices lowers on JAX only")


def build():
    model = gpt(Size(1, 256, 2), 1024, 128)
    model.compile(keras.optimizers.AdamW(1e-4, global_clipnorm=1.0), keras_mp.lean.ChunkedCrossEntropy())
    return model


def tokens(rows):
    return (keras.KerasTensor((rows, 128), "int32"),) * 2


@pytest.mark.slow
@pytest.mark.jax
@only_jax
def test_a_fully_sharded_step_on_eight_gpus_of_one_host():
    keras.config.set_dtype_policy("mixed_bfloat16")
    report = keras_mp.inspect(build, tokens(16), "h100x8", strategy="fully_sharded")
    model = build()
    parameters, memory = model.count_params(), report.memory
    # Every weight has an axis that 8 divides: an eighth of it and of its moments, the step's number, the learning rate.
    assert memory.parameters + memory.optimizer == 3 * 4 * parameters // 8 + 4 + 4
    assert memory.arguments == memory.parameters + memory.optimizer + memory.other
    assert memory.fits and report.devices == 8 and memory.capacity == keras_mp.chips.CHIPS["h100"].device_bytes
    sent = Counter()
    for collective in report.collectives:
        sent[collective.kind, collective.dtype] += collective.bytes
    matrices = sum(math.prod(weight.shape) for weight in model.weights if len(weight.shape) > 1)
    assert 2 * matrices * 0.99 <= sent["all-gather", "bfloat16"], sent
    assert sent.get(("all-gather", "float32"), 0) <= 4 * 4 * (parameters - matrices), sent
    # Gradients: summed in float32, each device keeps its part.
    assert 4 * parameters * 0.99 <= sent["reduce-scatter", "float32"], sent
    assert sent.get(("all-reduce", "float32"), 0) < 1024, sent


@pytest.mark.slow
@pytest.mark.jax
@only_jax
def test_gpus_take_float16_and_a_batch_that_they_divide():
    keras.config.set_dtype_policy("mixed_float16")
    report = keras_mp.inspect(build, tokens(4), "2x RTX 4090", strategy="data")
    assert report.devices == 2 and " products run in float16, " in report.asked_and_compiled[0]
    with pytest.raises(ValueError, match="a batch of 6 rows cannot be divided by 4 devices"):
        keras_mp.inspect(build, tokens(6), "rtx4090x4", strategy="data")


def test_several_chips_want_a_strategy_and_a_strategy_several_chips():
    with pytest.raises(ValueError, match="target names 8 chips: pass strategy='data'"):
        keras_mp.inspect(build, tokens(8), "h100x8")
    with pytest.raises(ValueError, match="divides a step over several chips: name them, target='h100x4'"):
        keras_mp.inspect(build, tokens(8), "h100", strategy="data")


@pytest.mark.slow
@pytest.mark.jax
@only_jax
def test_data_parallel_gradients_are_reduced_in_the_dtype_asked_for():
    keras.config.set_dtype_policy("mixed_bfloat16")
    parameters = build().count_params()
    for dtype, size in (("float32", 4), ("bfloat16", 2)):
        plan = Plan("data", (), (4,), reduce_dtype=dtype)
        report = keras_mp.inspect(build, tokens(16), "v5e-4", strategy=plan)
        sent = sum(collective.bytes for collective in report.collectives if collective.dtype == dtype)
        assert size * parameters * 0.99 <= sent <= size * parameters * 1.1


def test_bad_numbers_of_chips():
    with pytest.raises(ValueError, match="target='v5e-5' names 5 chips, which is not one of 4, 8, 16"):
        find_target("v5e-5")
    with pytest.raises(
        ValueError, match="3 chips, which is not one of 2, 4, 8, the numbers of GPUs of one host of H100"
    ):
        find_target("h100x3")
    with pytest.raises(ValueError, match="target='hostx4' is not known"):
        find_target("hostx4")
    assert find_target("h100x8").topology == "1x1x8" and find_target("4x RTX 4090").devices == 4
    assert find_target("v7x-8").devices == 8 and find_target("v7x").devices == 1
    assert find_target("v5e-256").topology == "v5e:16x16"


@pytest.mark.jax
@only_jax
def test_bad_input_on_jax():
    with pytest.raises(ValueError, match="a batch of 6 rows cannot be divided by 4 devices"):
        keras_mp.inspect(build, tokens(6), "v5e-4", strategy="data")
    keras.config.set_dtype_policy("mixed_float16")
    with pytest.raises(ValueError, match="a TPU has no float16 hardware"):
        keras_mp.inspect(build, tokens(8), "v5e-4", strategy="data")


@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="JAX has it")
def test_tensorflow_says_what_it_cannot_do():
    with pytest.raises(ValueError, match="strategy='data' needs JAX"):
        keras_mp.inspect(build(), tokens(8), "v5e-4", strategy="data")
