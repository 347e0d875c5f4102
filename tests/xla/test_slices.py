"""A step on a slice of several TPUs, compiled."""

import keras
import pytest

import keras_mp
from keras_mp.parallel.plan import Plan
from keras_mp.xla.targets import find_target, slice_of
from models.gpt import gpt
from models.transformer import Size

pytestmark = pytest.mark.ci

only_jax = pytest.mark.skipif(keras.backend.backend() != "jax", reason="a step on several devices lowers on JAX only")


def build():
    model = gpt(Size(1, 256, 2), 1024, 128)
    model.compile(keras.optimizers.AdamW(1e-4, global_clipnorm=1.0), keras_mp.ChunkedCrossEntropy())
    return model


def tokens(rows):
    return (keras.KerasTensor((rows, 128), "int32"),) * 2


@only_jax
def test_a_fully_sharded_step_on_four_chips():
    keras.config.set_dtype_policy("mixed_bfloat16")
    report = keras_mp.inspect(build, tokens(16), "v5e", strategy="fully_sharded", chips=4)
    parameters = build().count_params()
    # Weights and two moments in float32; besides them a few numbers and each chip's tokens.
    quarter = 3 * 4 * parameters / 4
    assert quarter <= report.memory.parameters + report.memory.optimizer <= quarter + 64
    assert report.memory.fits and report.devices == 4 and report.layout == "fully_sharded"
    kinds = {(collective.kind, collective.dtype) for collective in report.collectives}
    assert ("all-gather", "bfloat16") in kinds, kinds
    assert ("all-gather", "float32") not in kinds, kinds
    reduced = sum(
        collective.bytes
        for collective in report.collectives
        if collective.kind != "all-gather" and collective.dtype == "float32"
    )
    assert reduced >= 4 * parameters * 0.99
    assert "Collectives a step" in str(report)


@only_jax
def test_data_parallel_gradients_are_reduced_in_the_dtype_asked_for():
    keras.config.set_dtype_policy("mixed_bfloat16")
    parameters = build().count_params()
    for dtype, size in (("float32", 4), ("bfloat16", 2)):
        plan = Plan("data", (), (4,), reduce_dtype=dtype)
        report = keras_mp.inspect(build, tokens(16), "v5e", strategy=plan, chips=4)
        sent = sum(collective.bytes for collective in report.collectives if collective.dtype == dtype)
        assert size * parameters * 0.99 <= sent <= size * parameters * 1.1


def test_bad_input():
    with pytest.raises(ValueError, match="chips=5 is not one of 4, 8, 16"):
        slice_of(find_target("v5e"), 5)
    with pytest.raises(ValueError, match="target='h100' is no TPU"):
        slice_of(find_target("h100"), 4)
    assert slice_of(find_target("v7x"), 4).devices == 8
    assert slice_of(find_target("v5e"), 256).topology == "v5e:16x16"


@only_jax
def test_bad_input_on_jax():
    with pytest.raises(ValueError, match="a batch of 6 rows cannot be divided by 4 devices"):
        keras_mp.inspect(build, tokens(6), "v5e", strategy="data", chips=4)
    keras.config.set_dtype_policy("mixed_float16")
    with pytest.raises(ValueError, match="a TPU has no float16 hardware"):
        keras_mp.inspect(build, tokens(8), "v5e", strategy="data", chips=4)


@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="JAX has it")
def test_tensorflow_says_what_it_cannot_do():
    with pytest.raises(ValueError, match="strategy='data' needs JAX"):
        keras_mp.inspect(build(), tokens(8), "v5e", strategy="data", chips=4)
