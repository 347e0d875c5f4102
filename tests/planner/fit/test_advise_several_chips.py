"""`advise` for several GPUs of a host and a slice of TPUs, with the real compilers."""

import keras
import pytest

import keras_mp

pytestmark = [
    pytest.mark.slow,
    pytest.mark.jax,
    pytest.mark.skipif(keras.backend.backend() != "jax", reason="a step on several devices lowers on JAX only"),
]


def build():
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(128, "gelu"), keras.layers.Dense(8)])
    model.compile(keras.optimizers.Adam(), "mse")
    return model


def test_each_kind_of_target_and_inspect_agrees():
    batch = keras.KerasTensor((64, 64)), keras.KerasTensor((64, 8))
    report = keras_mp.advise(build, batch, ["rtx4090x4", "v5e-8"], verbose=False)
    assert report.compiles == 2 and [row.devices for row in report.rows] == [4, 8]
    for row in report.rows:
        assert row.fits and row.measures.strategy == "data", row.reason
        assert row.code[1] == f'with keras_mp.parallel.distribute("data", devices={row.devices}):'
        assert row.memory.parameters == 4 * (64 * 128 + 128 + 128 * 8 + 8)
        with keras_mp.set_global_policy(row.measures.precision):
            there = keras_mp.inspect(build, batch, row.target, strategy="data")
        code = there.memory.code if row.target == "v5e-8" else 0  # for which advise does not wait
        assert (there.memory.peak - code, there.memory.temporary) == (row.memory.peak, row.memory.temporary)
