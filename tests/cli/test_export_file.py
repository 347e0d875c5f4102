"""`keras-mp export --format`, from file to file."""

import importlib.util
import json
import os

import command_line
import keras
import numpy as np
import pytest
import zoo
from keras import layers

from keras_mp.numerics.data import named_arrays

needs_what_makes_the_files = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("tensorflow", "tf2onnx", "onnxruntime")),
    reason='the files are made by TensorFlow, tf2onnx and onnxruntime: pip install "keras-mp[export]"',
)
pytestmark = [needs_what_makes_the_files]
only_tensorflow = pytest.mark.skipif(
    keras.backend.backend() != "tensorflow", reason="the command runs Keras on TensorFlow, whatever is tested"
)


def command(*arguments, cwd):
    return command_line.run("export", *arguments, cwd=cwd, backend="tensorflow")


def test_the_command_with_the_data_of_an_audit(tmp_path):
    """On either backend: the .keras file of this one goes to TensorFlow."""
    keras.config.set_dtype_policy("mixed_bfloat16")
    model = keras.Sequential([keras.Input((6,)), layers.Dense(8, "gelu"), layers.Dense(3, name="last")])
    model.save(tmp_path / "model.keras")
    x = zoo.normal(50, 6)
    np.savez(tmp_path / "data.npz", x=x, y=np.zeros(50))
    np.save(tmp_path / "batch.npy", x[:7])
    options = ["--format", "litert-int8", "--calibrate", "data.npz", "--verify", "batch.npy", "--json"]
    done = command("model.keras", "out.tflite", *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["format"] == "LiteRT int8" and report["calibrated_on"] == 50
    assert report["max_difference"] < 0.1
    assert report["bytes"] == (tmp_path / "out.tflite").stat().st_size


@only_tensorflow
@pytest.mark.slow
def test_onnx_and_litert_files_of_several_inputs(tmp_path):
    model, batch = zoo.build("dict_of_inputs", "mixed_float16")
    model.save(tmp_path / "model.keras")
    np.savez(tmp_path / "batch.npz", **named_arrays((batch,)))
    for format in ("onnx", "litert"):
        done = command("model.keras", format, "--format", format, "--verify", "batch.npz", "--json", cwd=tmp_path)
        assert (tmp_path / format).is_file() and json.loads(done.stdout)["max_difference"] <= 1e-5
    np.savez(tmp_path / "one.npz", **{"x/a": batch["a"]})
    done = command("model.keras", "int8", "--format", "litert-int8", "--calibrate", "one.npz", cwd=tmp_path)
    assert done.returncode != 0 and "must hold x/a, x/b or x/0, x/1, and holds x/a" in done.stderr


@only_tensorflow
@pytest.mark.parametrize(
    "options, message",
    [
        (["--format", "tflite"], "'tflite' must be one of 'savedmodel', 'onnx', 'litert', 'litert-int8'"),
        (["--format", "litert-int8"], "--format litert-int8 needs --calibrate"),
        (["--calibrate", "data.npz"], "--calibrate is for --format litert-int8 and litert-int16x8, not 'savedmodel'"),
        (["--format", "litert", "--integer-io"], "--integer-io is for --format litert-int8 and litert-int16x8, not 'l"),
        (["--format", "onnx", "--calibrate", "data.npz"], "--calibrate is for --format litert-int8 and litert-int16x8"),
        (["--format", "litert-int8", "--calibrate", "none.npz"], "there is no file --calibrate 'none.npz'"),
        (["--format", "onnx", "--verify", "none.npz"], "there is no file --verify 'none.npz'"),
        ([], "there is no file 'model.keras'"),
        (["--format", "onnx"], "there is no file 'model.keras'"),
    ],
)
def test_bad_input(options, message, tmp_path):
    done = command("model.keras", "out", *options, cwd=tmp_path)
    assert done.returncode != 0 and message in done.stderr
    assert os.listdir(tmp_path) == []


@only_tensorflow
def test_a_model_and_the_data_that_are_read_are_not_overwritten(tmp_path):
    keras.Sequential([keras.Input((3,)), layers.Dense(2)]).save(tmp_path / "m.keras")
    before = (tmp_path / "m.keras").read_bytes()
    np.save(tmp_path / "x.npy", zoo.normal(4, 3))
    done = command("m.keras", "m.keras", "--format", "onnx", "--overwrite", cwd=tmp_path)
    assert done.returncode != 0 and "a file of something else" in done.stderr
    done = command("m.keras", "x.npy", "--format", "onnx", "--verify", "x.npy", "--overwrite", cwd=tmp_path)
    assert done.returncode != 0 and "is the file that --verify reads: give a new file" in done.stderr
    assert (tmp_path / "m.keras").read_bytes() == before
