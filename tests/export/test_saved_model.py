import itertools
import json
import os
import pickle
import subprocess
import sys
import warnings
from pathlib import Path

import command_line
import keras
import numpy as np
import pytest
import zoo
from exported import TENSORFLOW, in_float32, in_int32, needs_tensorflow, only_tensorflow, served
from keras import layers
from thirds import thirds

import keras_mp
from keras_mp.export.low_precision import low_precision
from keras_mp.export.saved_model import _answered
from keras_mp.export.saved_model import _beside as beside
from keras_mp.export.verification import ExportError, relative_difference
from keras_mp.rebuild.walk import RebuildError

pytestmark = needs_tensorflow
CALLS = itertools.count()


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("dict_of_inputs", marks=pytest.mark.jax),  # in a process that imports TensorFlow
        # Kinds of models are rows of tests/promises, which does not write them into files.
        *thirds(
            name for name in zoo.names() if name in ("nested_and_shared", "subclassed", "recurrent", "adapted_text")
        ),
    ],
)
def test_every_kind_of_model(name, tmp_path):
    model, batch = zoo.build(name, "mixed_float16")
    batch = in_int32(batch)
    before = [keras.ops.convert_to_numpy(w) for w in model.weights]
    report = keras_mp.export_float32(model, tmp_path / "out", verify=batch)
    assert report.low_precision_ops == 0 and low_precision(tmp_path / "out") == []
    assert report.nodes > 0 and report.max_difference <= 1e-5
    outputs = keras.tree.flatten(served(report.path, batch))
    assert relative_difference(outputs, in_float32(model, batch)) <= 1e-5
    assert model.dtype_policy.name == "mixed_float16" and keras.config.dtype_policy().name == "float32"
    for old, weight in zip(before, model.weights, strict=True):
        np.testing.assert_array_equal(old, keras.ops.convert_to_numpy(weight))
    assert os.listdir(tmp_path) == ["out"]


def test_the_numbers_are_those_of_float64(tmp_path):
    model = keras.Sequential([keras.Input((6,)), layers.Dense(5, "relu", dtype="mixed_bfloat16"), layers.Dense(3)])
    batch = zoo.normal(7, 6)
    w1, b1, w2, b2 = (keras.ops.convert_to_numpy(w).astype("float64") for w in model.weights)
    expected = np.maximum(batch.astype("float64") @ w1 + b1, 0) @ w2 + b2
    report = keras_mp.export_float32(model, tmp_path / "out", verify=batch.astype("float64"))
    np.testing.assert_allclose(served(report.path, batch), expected, rtol=1e-5, atol=1e-6)
    assert report.precision_gap > 1e-4  # bfloat16 did differ, so the comparison is not of a thing with itself


def arguments(path):
    import tensorflow as tf

    return set(tf.saved_model.load(str(path)).signatures["serving_default"].structured_input_signature[1])


@only_tensorflow
def test_the_arguments_are_called_as_the_inputs_are(tmp_path):
    """Keras calls the tensor of an input without a name `keras_tensor`, whatever the layer or the dict says."""
    model = keras.Sequential([keras.Input((4,)), layers.Dense(2)])
    name = model.get_config()["layers"][0]["config"]["name"]
    assert arguments(keras_mp.export_float32(model, tmp_path / "one", np.ones((2, 4))).path) == {name}
    assert name.startswith("input_layer")
    inputs = [keras.Input((4,)), keras.Input((3,), name="second")]
    model = keras.Model(inputs, layers.Concatenate()(inputs))
    assert arguments(keras_mp.export_float32(model, tmp_path / "two").path) == {model.layers[0].name, "second"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Keras's, that the keys are no names
        model = keras.Model({"pixels": inputs[0], "age": inputs[1]}, layers.Concatenate()(inputs))
        batch = {"pixels": np.ones((5, 4), "float32"), "age": np.zeros((5, 3), "float32")}
        report = keras_mp.export_float32(model, tmp_path / "dict", batch)
    assert report.max_difference == 0 and arguments(report.path) == {"pixels", "age"}


@only_tensorflow
def test_random_layers_are_served_in_inference_mode(tmp_path):
    random = layers.RandomFlip(), layers.RandomRotation(0.3), layers.Dropout(0.5)
    model = keras.Sequential([keras.Input((8, 8, 1)), *random])
    batch = zoo.normal(16, 8, 8, 1)
    report = keras_mp.export_float32(model, tmp_path / "out", verify=batch)
    np.testing.assert_array_equal(served(report.path, batch), batch)


@only_tensorflow
def test_what_keras_exports_is_not_float32(tmp_path):
    """The design's fact 17: the scan does find what model.export leaves, so that 0 means something."""
    model, _ = zoo.build("functional", "mixed_float16")
    model.export(tmp_path / "plain", verbose=False)
    places = low_precision(tmp_path / "plain")
    assert {place.what.split()[0] for place in places} == {"float16"}
    assert any("dense" in place.node and place.op == "MatMul" for place in places)


@keras.saving.register_keras_serializable("test_export")
class CastsInCall(layers.Layer):
    def call(self, inputs):
        return keras.ops.cast(keras.ops.cast(inputs, "bfloat16") * 2, "float32")


def test_a_layer_that_casts_in_call_is_refused_by_name(tmp_path):
    inputs = keras.Input((4,))
    model = keras.Model(inputs, CastsInCall(name="stubborn", dtype="mixed_bfloat16")(layers.Dense(4)(inputs)), name="m")
    with pytest.raises(
        ExportError, match=r"(?s)node '[^']*stubborn[^']*' \(.*bfloat16.*layer 'stubborn'.*compute_dtype"
    ):
        keras_mp.export_float32(model, tmp_path / "out")
    assert os.listdir(tmp_path) == []


@only_tensorflow
def test_compiled_programs_are_refused(tmp_path):
    class Opaque(layers.Layer):
        def call(self, inputs):
            from tensorflow.compiler.tf2xla.python import xla

            module = """module @m { func.func public @main(%a: tensor<2x4xf32>) -> tensor<2x4xf32> {
              %0 = stablehlo.add %a, %a : tensor<2x4xf32>  return %0 : tensor<2x4xf32> } }"""
            return xla.call_module(
                [inputs], version=9, module=module.encode(), Sout=[(2, 4)], Tout=["float32"], platforms=["CPU"]
            )[0]

        def compute_output_spec(self, inputs):
            return keras.KerasTensor(inputs.shape, inputs.dtype)

    inputs = keras.Input((4,), batch_size=2)
    model = keras.Model(inputs, Opaque(name="opaque")(inputs))
    with pytest.raises(ExportError, match="(?s)XlaCallModule.*operations cannot be read.*layer 'opaque'"):
        keras_mp.export_float32(model, tmp_path / "out")
    assert os.listdir(tmp_path) == []


@only_tensorflow
def test_a_model_that_depends_on_more_than_its_inputs_is_refused(tmp_path):
    model = keras.Sequential([keras.Input((4,)), layers.Lambda(lambda x: x + next(CALLS))])
    with pytest.raises(ExportError, match="differs from the model run in float32"):
        keras_mp.export_float32(model, tmp_path / "out", verify=zoo.normal(3, 4))
    assert os.listdir(tmp_path) == []


def test_existing_path(tmp_path):
    model, _ = zoo.build("sequential", "mixed_float16")
    with pytest.raises(FileExistsError, match="exists: give a new folder"):
        keras_mp.export_float32(model, tmp_path)


def ones_times(weight):
    model = keras.Sequential([keras.Input((2,)), layers.Dense(1, use_bias=False)])
    model.layers[0].set_weights([np.full((2, 1), weight, "float32")])
    return model


@only_tensorflow
def test_a_saved_model_is_overwritten_where_asked_for(tmp_path):
    batch = np.ones((1, 2), "float32")
    for weight in (1.0, 2.0):
        report = keras_mp.export_float32(ones_times(weight), tmp_path / "out", batch, overwrite=True)
        assert float(served(report.path, batch)[0, 0]) == 2 * weight
    with pytest.raises(ExportError):
        keras_mp.export_float32(ones_times(np.nan), tmp_path / "out", batch, overwrite=True)
    assert float(served(tmp_path / "out", batch)[0, 0]) == 4
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    (tmp_path / "empty").mkdir()
    keras_mp.export_float32(ones_times(1.0), tmp_path / "empty", overwrite=True)


def test_nothing_but_a_saved_model_is_overwritten(tmp_path):
    (tmp_path / "photographs").mkdir()
    (tmp_path / "photographs" / "one.jpg").write_text("")
    for name, kind in (("photographs", "a folder"), ("photographs/one.jpg", "a file")):
        with pytest.raises(FileExistsError, match=f"is {kind} of something else, which is not overwritten"):
            keras_mp.export_float32(ones_times(1.0), tmp_path / name, overwrite=True)
    assert (tmp_path / "photographs" / "one.jpg").exists()


@only_tensorflow
@pytest.mark.parametrize("dtype", [None, "float16"])
def test_a_subclassed_model_without_a_batch_and_with_one_of_another_float_dtype(dtype, tmp_path):
    model, batch = zoo.build("subclassed", "mixed_bfloat16")
    report = keras_mp.export_float32(model, tmp_path / "out", verify=batch.astype(dtype) if dtype else None)
    assert relative_difference([served(report.path, batch)], in_float32(model, batch)) <= 1e-5


@only_tensorflow
def test_no_room_is_told_before_anything_is_written(tmp_path, monkeypatch):
    model, _ = zoo.build("functional", "mixed_bfloat16")
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 10})())
    with pytest.raises(OSError, match=r"no room for .*out.*the float32 weights take 1.9 KiB, 10 bytes are free"):
        keras_mp.export_float32(model, tmp_path / "out")
    assert os.listdir(tmp_path) == []


DISK_FULL = """
import resource, signal, sys
import keras, keras_mp
model = keras.Sequential([keras.Input((256,)), keras.layers.Dense(1024, dtype="mixed_bfloat16")])
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))  # the weights are 1 MB: the write fails half-way
try:
    keras_mp.export_float32(model, sys.argv[1])
except OSError as error:
    print("OSError", error)
"""


@only_tensorflow
@pytest.mark.slow
def test_a_write_that_fails_half_way_leaves_nothing(tmp_path):
    done = subprocess.run([sys.executable, "-c", DISK_FULL, str(tmp_path / "out")], capture_output=True, text=True)
    assert "OSError could not write the SavedModel" in done.stdout, done.stdout + done.stderr
    assert os.listdir(tmp_path) == []


def test_command_line(tmp_path):
    model, batch = zoo.build("dict_of_inputs", "mixed_bfloat16")
    model.save(tmp_path / "model.keras")
    np.savez(tmp_path / "batch.npz", **{"x/a": batch["a"], "x/b": batch["b"]})
    files = ["model.keras", "out", "--verify", "batch.npz"]
    done = command_line.run("export", *files, "--json", cwd=tmp_path, backend="tensorflow")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["low_precision_ops"] == 0 and report["max_difference"] <= 1e-5
    assert (
        relative_difference(keras.tree.flatten(served(tmp_path / "out", in_int32(batch))), in_float32(model, batch))
        <= 1e-5
    )
    again = command_line.run("export", *files[:2], "--overwrite", cwd=tmp_path, backend="tensorflow")
    assert again.returncode == 0 and "compute in 16 bits or fewer" in again.stdout, again.stderr


@keras.saving.register_keras_serializable("test_export")
class Sums(keras.Model):
    """Subclassed, so that the structure of its inputs is the batch's alone."""

    def __init__(self, **options):
        super().__init__(**options)
        self.dense = layers.Dense(2)

    def call(self, inputs):
        return keras.ops.add(keras.ops.sin(256 * self.dense(inputs["a"])), inputs["b"])


@pytest.mark.jax
@pytest.mark.slow
def test_a_subclassed_model_of_a_dict_of_inputs(tmp_path):
    """The process on TensorFlow was given a list, and made the Dense layer, whose config no file has, in float32."""
    keras.config.set_dtype_policy("mixed_bfloat16")
    model, batch = Sums(), {"a": zoo.normal(3, 4), "b": zoo.normal(3, 2)}
    model(batch)
    report = keras_mp.export_float32(model, tmp_path / "out", batch, tolerance=1e-3)
    kernel, bias = map(keras.ops.convert_to_numpy, model.weights)
    np.testing.assert_allclose(
        served(report.path, batch), np.sin(256 * (batch["a"] @ kernel + bias)) + batch["b"], rtol=1e-3, atol=1e-3
    )


@pytest.mark.jax
@pytest.mark.skipif(TENSORFLOW, reason="on TensorFlow no process is started")
def test_the_process_on_tensorflow_answers_with_the_class_of_an_error_or_not_at_all(tmp_path, monkeypatch):
    with pytest.raises(OSError, match="exporting in a process on TensorFlow failed: .*request.pickle"):
        _answered(tmp_path)
    (tmp_path / "result.pickle").write_bytes(pickle.dumps({"error": "RebuildError", "message": "no config"}))
    monkeypatch.setattr(sys, "executable", "true")
    with pytest.raises(RebuildError, match="failed: no config"):
        _answered(tmp_path)
    (tmp_path / "result.pickle").unlink()
    monkeypatch.setattr(sys, "executable", "false")
    with pytest.raises(ExportError, match="failed: it ended with status 1: it printed nothing"):
        _answered(tmp_path)


@pytest.mark.jax
@pytest.mark.slow
@pytest.mark.skipif(TENSORFLOW, reason="on TensorFlow the model and the SavedModel run on the same device")
def test_float32_outputs_to_compare_with_are_float32_on_every_device(tmp_path, monkeypatch):
    """On a TPU a float32 product is one of bfloat16 by default, which is further from the SavedModel than allowed."""
    import jax

    asked, call = [], keras.layers.Dense.call

    def noting(layer, *arguments, **options):
        asked.append((layer.compute_dtype, jax.config.jax_default_matmul_precision))
        return call(layer, *arguments, **options)

    keras.config.set_dtype_policy("mixed_bfloat16")
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    monkeypatch.setattr(keras.layers.Dense, "call", noting)
    keras_mp.export_float32(model, tmp_path / "out", verify=np.ones((2, 4), "float32"))
    assert asked[-2:] == [("float32", "highest"), ("bfloat16", None)]  # the model in float32, then as it was


@only_tensorflow
def test_what_came_to_the_path_during_an_export_is_kept(tmp_path):
    path = tmp_path / "out"
    for overwrite in (False, True):
        with pytest.raises(OSError), beside(path, overwrite) as partial:
            partial.mkdir()
            path.mkdir(exist_ok=True)
            (path / "thesis.txt").write_text("mine")
        assert os.listdir(tmp_path) == ["out"] and (path / "thesis.txt").read_text() == "mine"


@only_tensorflow
@pytest.mark.parametrize("nth", [1, 2])
def test_ctrl_c_while_folders_are_exchanged_keeps_the_old_one(nth, tmp_path, monkeypatch):
    path = tmp_path / "out"
    path.mkdir()
    (path / "saved_model.pb").write_text("old")
    rename, calls = Path.rename, []

    def interrupted(self, target):
        calls.append(self)
        if len(calls) == nth:
            raise KeyboardInterrupt
        return rename(self, target)

    with pytest.raises(KeyboardInterrupt), beside(path, True) as partial:
        partial.mkdir()
        monkeypatch.setattr(Path, "rename", interrupted)
    assert os.listdir(tmp_path) == ["out"] and (path / "saved_model.pb").read_text() == "old"


@only_tensorflow
def test_a_link_is_kept_and_what_it_points_to_replaced(tmp_path):
    (tmp_path / "v1").mkdir()
    (tmp_path / "latest").symlink_to(tmp_path / "v1")
    with beside(tmp_path / "latest", True) as partial:
        partial.mkdir()
        (partial / "saved_model.pb").write_text("new")
    assert (tmp_path / "latest").is_symlink() and (tmp_path / "v1" / "saved_model.pb").read_text() == "new"
    assert sorted(os.listdir(tmp_path)) == ["latest", "v1"]
