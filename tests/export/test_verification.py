"""What `verify` proves, and what it refuses to call a proof."""

import importlib.util
import math
import os

import keras
import numpy as np
import pytest
import zoo
from exported import TENSORFLOW, needs_tensorflow, only_tensorflow
from keras import layers

import keras_mp
from keras_mp.export.verification import (
    ExportError,
    agreement,
    check_batch,
    computed,
    inputs_of,
    relative_difference,
)

pytestmark = needs_tensorflow


def dense(**options):
    return keras.Sequential([keras.Input((4,), name="features"), layers.Dense(3, **options)], name="m")


def printed(report):
    """What `print` writes, on one line."""
    return " ".join(str(report).split())


def ruined():
    model = dense()
    model.set_weights([np.full(w.shape, np.nan) for w in model.get_weights()])
    return model


def export_onnx(*arguments, **options):
    if any(importlib.util.find_spec(name) is None for name in ("tf2onnx", "onnxruntime")):
        pytest.skip('pip install "keras-mp[export]"')
    return keras_mp.export.export_onnx(*arguments, **options)


EXPORTS = [
    keras_mp.export_float32,
    pytest.param(export_onnx, marks=only_tensorflow),
    pytest.param(keras_mp.export.export_litert, marks=only_tensorflow),
]


def missing_one():
    batch = zoo.normal(2, 4)
    batch[1, 2] = np.nan
    return batch


REFUSED = [
    (dense, np.zeros((0, 4), "float32"), "verify must hold .* 1 or more.*holds 0 for input 'features'"),
    (dense, missing_one(), "3 of the 6 values .* NaN or infinite.*the batch itself holds NaN"),
    (dense, np.zeros((2, 5)), r"^verify has the shape \(2, 5\) for input 'features', which takes \(None, 4\)$"),
    (ruined, zoo.normal(2, 4), "6 of the 6 .* in the weights .*kernel.*bias.*checkpoint in which they are finite"),
    (lambda: layers.Dense(2), None, "model must be a keras.Model, and is of type Dense: wrap it"),
    (lambda: keras.Sequential([layers.Dense(2)], name="fresh"), None, "model 'fresh' is not built.*call it once"),
]


@pytest.mark.parametrize("export", EXPORTS)
@pytest.mark.parametrize(("make", "batch", "message"), REFUSED, ids=range(len(REFUSED)))
def test_what_proves_nothing_or_cannot_be_exported_is_named(export, make, batch, message, tmp_path):
    with pytest.raises((ExportError, TypeError), match=message):
        export(make(), tmp_path / "new" / "out", verify=batch)
    assert os.listdir(tmp_path) == []


@only_tensorflow
def test_weights_that_are_all_nan_are_said_without_verify(tmp_path):
    report = keras_mp.export_float32(ruined(), tmp_path / "out")
    assert report.notes and all(note.startswith("the model gives no finite value") for note in report.notes)
    assert report.notes[0] in printed(report)


@only_tensorflow
def test_a_model_that_fills_in_missing_values_is_verified_on_nan(tmp_path):
    filled = layers.Lambda(lambda x: keras.ops.where(keras.ops.isnan(x), keras.ops.zeros_like(x), x))
    model = keras.Sequential([keras.Input((4,)), filled, layers.Dense(3)])
    batch = zoo.normal(3, 4)
    batch[:, 1] = np.nan
    report = keras_mp.export_float32(model, tmp_path / "out", verify=batch)
    assert report.max_difference <= 1e-5 and report.notes == ()


@pytest.mark.parametrize("export", EXPORTS[1:])
def test_a_file_is_overwritten_where_asked_for_and_a_folder_never(export, tmp_path):
    (tmp_path / "there").write_bytes(b"mine")
    with pytest.raises(FileExistsError, match="there' exists: give a new file"):
        export(dense(), tmp_path / "there")
    report = export(dense(), tmp_path / "there", zoo.normal(2, 4), overwrite=True)
    assert report.max_difference <= 1e-5 and report.path.stat().st_size == report.bytes > 100
    with pytest.raises(FileExistsError, match="is a folder of something else, which is not overwritten"):
        export(dense(), tmp_path, overwrite=True)


def test_the_batch_must_have_the_structure_of_the_inputs():
    a, b = (keras.KerasTensor((None, size), name=name) for name, size in (("a", 4), ("b", 6)))
    structure, one, two = {"a": a, "b": b}, np.ones((2, 4)), np.ones((2, 6))
    check_batch({"a": one, "b": two}, structure)
    with pytest.raises(ExportError, match=r"structure of the model's inputs, with the shapes \{'a': \(None, 4\), 'b'"):
        check_batch(one, structure)
    with pytest.raises(ExportError, match="calibrate has the shape"):
        check_batch({"a": two, "b": two}, structure, "calibrate")
    with pytest.raises(ExportError, match="holds 2 for input 'a', 1 for input 'b'"):
        check_batch({"a": one, "b": two[:1]}, structure)
    with pytest.raises(ExportError, match="verify must hold as many records"):
        check_batch(np.float32(3.0))
    check_batch(np.ones((5, 4)), keras.KerasTensor((2, 4), name="of_two"))  # the SavedModel leaves the batch open


def test_an_original_that_cannot_run_here_is_no_reason_to_stop(tmp_path):
    """A CPU has no float16 kernel for MaxPool3D on TensorFlow; JAX has."""
    model = keras.Sequential([keras.Input((4, 4, 4, 2)), layers.MaxPooling3D(dtype="mixed_float16")])
    report = keras_mp.export_float32(model, tmp_path / "out", verify=zoo.normal(2, 4, 4, 4, 2))
    assert report.max_difference <= 1e-5
    if TENSORFLOW:
        assert report.precision_gap is None and "in float32." in printed(report)
        assert "cannot be run here in its own precision" in printed(report) and "MaxPool3D" in printed(report)
    else:
        assert report.precision_gap < 1e-2 and report.notes == ()


@only_tensorflow
def test_tensorflow_does_not_warn_of_the_models_of_an_export(monkeypatch):
    from tensorflow.python.platform import tf_logging

    warned = []
    monkeypatch.setattr(tf_logging, "warning", lambda message, *arguments: warned.append(message))
    for _ in range(6):  # from five on it warned of retracing
        computed(dense(), np.ones((2, 4), "float32"))
    assert warned == []


def test_the_difference_is_that_of_float64():
    rng = np.random.default_rng()
    a, b = rng.normal(size=(4, 5)).astype("float32"), rng.normal(size=(4, 5)).astype("float32")
    a64, b64 = a.astype("float64"), b.astype("float64")
    assert relative_difference(a, b) == np.abs(a64 - b64).max() / max(1.0, np.abs(b64).max())


@pytest.mark.parametrize(
    ("actual", "expected"),
    [([np.inf], [-np.inf]), ([np.nan], [np.inf]), ([1.0], [np.inf]), ([np.inf], [1.0]), (["a"], ["b"])],
)
def test_what_is_not_the_same_and_not_finite_is_infinitely_different(actual, expected):
    assert relative_difference(np.array(actual), np.array(expected)) == math.inf
    assert relative_difference(np.array(expected), np.array(expected)) == 0.0


def test_a_difference_is_refused_and_told():
    with pytest.raises(ExportError, match=r"the file differs from the model run in float32 by 5.00e-01 .*: because"):
        agreement("the file", np.ones(2), np.full(2, 2.0), np.ones(2), dense(), 1e-5, hint=": because")
    assert agreement("the file", np.ones(2), np.ones(2), np.ones(2), dense(), 1e-5) == (0.0, [])


@pytest.mark.jax
@pytest.mark.skipif(TENSORFLOW, reason="on TensorFlow the model is exported by the same process")
def test_a_layer_defined_in_the_script_itself_is_named(tmp_path, monkeypatch):
    """The message was: build is defined in __main__."""

    class Mix(layers.Layer):
        def build(self, input_shape):
            self.amount = self.add_weight(shape=(input_shape[-1],))

        def call(self, inputs):
            return inputs * self.amount

    monkeypatch.setattr(Mix, "__module__", "__main__")
    monkeypatch.setattr(Mix.build, "__module__", "__main__")
    model = keras.Sequential([keras.Input((4,)), Mix()])
    with pytest.raises(ExportError, match="^Mix of model .* is defined in __main__"):
        keras_mp.export_float32(model, tmp_path / "out")
    assert os.listdir(tmp_path) == []


@only_tensorflow
def test_an_input_with_a_batch_of_its_own_need_not_have_as_many_records(tmp_path):
    x, of_each = keras.Input((4,)), keras.Input(batch_shape=(1, 4))
    model = keras.Model([x, of_each], keras.layers.Dense(2)(x + of_each))
    batch = np.random.default_rng().normal(size=(8, 4)).astype("float32")
    report = keras_mp.export_float32(model, tmp_path / "saved_model", [batch, batch[:1]])
    assert report.max_difference is not None and report.max_difference < 1e-5
    with pytest.raises(ExportError, match="as many records"):
        check_batch([batch, batch[:2]], inputs_of(model))


@only_tensorflow
def test_outputs_that_are_infinite_in_both_are_said(tmp_path):
    masked = layers.Lambda(lambda x: keras.ops.where(keras.ops.arange(3) == 1, -np.inf, x))
    model = keras.Sequential([keras.Input((4,)), layers.Dense(3), masked])
    report = keras_mp.export_float32(model, tmp_path / "out", verify=zoo.normal(2, 4))
    assert report.max_difference <= 1e-5
    assert report.notes == ("2 of the 6 values are infinite in both, and could not be compared",)
