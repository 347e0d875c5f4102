"""`advise` with the real compilers, on models that take seconds."""

import dataclasses

import keras
import pytest

import keras_mp

pytestmark = pytest.mark.slow


CHIPS = ["h100", "v5e"]


def build():
    inputs = keras.Input((64, 32))
    x = inputs + keras.layers.MultiHeadAttention(2, 16)(inputs, inputs)
    x = x + keras.layers.Dense(32)(keras.layers.Dense(128, "gelu")(x))
    model = keras.Model(inputs, keras.layers.Dense(4)(x), name="small")
    model.compile(keras.optimizers.Adam(), "mse")
    return model


def batch(rows):
    return keras.KerasTensor((rows, 64, 32)), keras.KerasTensor((rows, 64, 4))


def inspected(row):
    """`inspect` of what the lines of a row make, but for `fit`."""
    *made, fit = row.code
    scope = {"keras_mp": keras_mp, "build": build}
    exec("\n".join(made), scope)
    rows = int(fit.partition("batch_size=")[2].rstrip(")"))
    return scope["model"], keras_mp.inspect(scope["model"], batch(rows), row.target)


def test_each_kind_of_chip_and_inspect_agrees():
    report = keras_mp.advise(build, batch(16), CHIPS)
    precisions = {row.target: row.measures.precision for row in report.rows}
    assert precisions == dict.fromkeys(CHIPS, "mixed_bfloat16")
    for row in report.rows:
        keras.config.set_dtype_policy("float32")
        _, there = inspected(row)
        code = there.memory.code if row.target == "v5e" else 0  # for which advise does not wait
        assert row.fits and there.memory.fits and row.figures.peak == there.memory.peak - code
        assert row.roofline.seconds == pytest.approx(there.roofline.seconds)
        assert row.time == pytest.approx(there.time.seconds) and row.time > row.roofline.seconds
        assert row.figures.optimizer == there.memory.optimizer
    assert report.compiles == 2
    notes = " ".join(report.notes)
    assert "Time on H100 SXM5: 5 published runs on this chip took 0.78 to 1.76" in notes
    assert "Time on TPU v5e: One published run on this chip took 0.70 of" in notes
    keras.config.set_dtype_policy("float32")
    again = keras_mp.advise(build, batch(16), CHIPS)
    assert again.compiles == again.kept == 2
    for row, before in zip(again.rows, report.rows, strict=True):  # layers have the automatic names of another model
        assert dataclasses.replace(row.figures, largest=()) == dataclasses.replace(
            before.figures, largest=(), kept=True
        )


@pytest.mark.jax
@pytest.mark.skipif(keras.backend.backend() != "jax", reason="measured on JAX")
def test_gpus_of_one_compute_capability_need_the_same_memory_but_for_a_hundredth():
    """Measured: the H200 needs 64 KiB of 54 MiB, 0.12%, more than the H100; all other pairs are equal."""
    model = build()
    needs = {name: keras_mp.inspect(model, batch(8), name).memory.peak for name in ("h100", "h200")}
    assert needs["h100"] == pytest.approx(needs["h200"], rel=0.002), needs
    report = keras_mp.advise(model, batch(8), ["h100", "h200"])
    assert report["h100"].how == "a compile for H200 SXM, of the same architecture"
    assert report["h200"].time > 0 and report["h100"].time is None
