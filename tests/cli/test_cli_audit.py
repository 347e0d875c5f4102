"""`keras-mp audit`, as a user types it."""

import importlib
import json
import sys
from collections import OrderedDict

import command_line
import keras
import numpy as np
import pytest

from keras_mp.numerics.data import batches_of_file, named_arrays


def run(*arguments):
    return command_line.run("audit", *arguments)


@pytest.fixture
def model_file(tmp_path):
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(4, name="dense")], name="small")
    model.layers[0].bias.assign([0.0, 0.0, 1e5, 0.0])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.save(tmp_path / "small.keras")
    return tmp_path / "small.keras"


def test_a_file_with_data(model_file, tmp_path):
    x, y = np.ones((20, 6), "float32"), np.zeros(20, "int32")
    np.savez(tmp_path / "data.npz", x=x, y=y)
    done = run(model_file, "--data", tmp_path / "data.npz", "--html", tmp_path / "out.html", "--batch-size", 8)
    assert done.returncode == 0, done.stderr
    assert "small ran 3 steps in float32" in done.stdout and "unsafe in float16: dense" in done.stdout
    assert "<strong>" in (tmp_path / "out.html").read_text() and "random numbers" not in done.stdout


def audited(model, tmp_path, *options, **arrays):
    model.save(tmp_path / "model.keras")
    np.savez(tmp_path / "data.npz", **arrays)
    done = run(tmp_path / "model.keras", "--data", tmp_path / "data.npz", "--json", *options)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_text_of_open_length_is_looked_at(tmp_path):
    tokens = keras.Input((None,), dtype="int32")
    x = keras.layers.GlobalAveragePooling1D()(keras.layers.Embedding(9, 4)(tokens))
    model = keras.Model(tokens, keras.layers.Dense(1)(x))
    model.compile("sgd", "mse")
    rng = np.random.default_rng()
    ids, y = rng.integers(0, 9, (8, 5)), rng.normal(size=(8, 1)).astype("float32")
    report = audited(model, tmp_path, x=ids, y=y)
    table, kernel, bias = model.get_weights()
    expected = ((table[ids].astype("float64").mean(1) @ kernel + bias - y) ** 2).mean()
    assert np.isclose(report["loss"], expected, rtol=1e-5)
    assert not any("random" in note for note in report["notes"])


@pytest.mark.parametrize("shape", [list, dict])
def test_several_inputs_and_outputs_are_given_by_name(tmp_path, shape):
    height, width = keras.Input((2,), name="height"), keras.Input((3,), name="width")
    area = keras.layers.Dense(1, name="area")(keras.layers.Concatenate()([height, width]))
    edge = keras.layers.Dense(2, name="edge")(width)
    if shape is dict:
        model = keras.Model({"height": height, "width": width}, {"edge": edge, "area": area})
        model.compile("sgd", {"area": "mse", "edge": "mae"})
    else:
        model = keras.Model([width, height], [edge, area])
        model.compile("sgd", ["mae", "mse"])
    rng = np.random.default_rng()
    arrays = {
        name: rng.normal(size=(8, size)).astype("float32")
        for name, size in (("x/height", 2), ("x/width", 3), ("y/area", 1), ("y/edge", 2))
    }
    weights = rng.uniform(1, 2, 8).astype("float32")
    report = audited(model, tmp_path, **arrays, **{"sample_weight" if shape is dict else "sample_weight/edge": weights})
    inputs = np.concatenate([arrays["x/height"], arrays["x/width"]], 1).astype("float64")
    kernel, bias = model.get_layer("area").get_weights()
    of_area = ((inputs @ kernel + bias - arrays["y/area"]) ** 2).mean(1)
    kernel, bias = model.get_layer("edge").get_weights()
    of_edge = np.abs(arrays["x/width"].astype("float64") @ kernel + bias - arrays["y/edge"]).mean(1)
    losses = of_edge * weights + of_area * (1 if shape is list else weights)
    assert np.isclose(report["loss"], losses.mean(), rtol=1e-5)


def test_an_input_or_output_that_the_data_lack_is_named(tmp_path, monkeypatch):
    first, second = keras.Input((2,), name="first"), keras.Input((2,), name="second")
    added = keras.layers.Add()([first, second])
    outputs = [keras.layers.Dense(1, name=name)(added) for name in ("left", "right")]
    model = keras.Model([first, second], outputs, name="two")
    array = np.ones((4, 2), "float32")
    labels = {"y/left": array, "y/right": array}
    monkeypatch.chdir(tmp_path)
    for arrays, said in (
        ({"x/first": array, **labels}, "must hold x/first, x/second or x/0, x/1, and holds x/first, y/left, y/right"),
        ({"x/0": array, "x/1": array, "y/left": array}, "must hold y/left, y/right or y/0, y/1, and holds x/0, x/1,"),
        ({"x": array, **labels}, "must hold x/first, x/second or x/0, x/1, and holds x, y/left"),
        ({"first": array, **labels}, "array 'first' in 'data.npz' must be named x, y or sample_weight, or for one of"),
        ({"x/0": array, **labels, "sample_weight/up": array[:, 0]}, "must hold labels for sample_weight/up, and holds"),
    ):
        np.savez("data.npz", **arrays)
        with pytest.raises(ValueError) as error:
            batches_of_file("data.npz", model, 4)
        assert said in str(error.value)


class Two(keras.Model):
    """A subclassed model, whose outputs are not known from it."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def call(self, x):
        return {"left": self.dense(x), "right": 2 * self.dense(x)}


def test_labels_of_a_subclassed_model_are_given_by_name(tmp_path):
    arrays = {"x": np.ones((3, 2)), "y/right": np.ones((3, 1)), "y/left": np.zeros((3, 1))}
    np.savez(tmp_path / "data.npz", **arrays)
    (x, y, _), (rest, _, _) = batches_of_file(tmp_path / "data.npz", Two(), 2)
    assert x.shape == (2, 2) and rest.shape == (1, 2)
    assert (y["left"] == 0).all() and (y["right"] == 1).all() and len(y) == 2


def test_a_model_of_a_users_own_layers_is_loaded_with_their_module(tmp_path, monkeypatch):
    (tmp_path / "mix_layers.py").write_text(
        "import keras\n\n\nclass Mix(keras.layers.Layer):\n    def call(self, x):\n        return 2 * x\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    mix = importlib.import_module("mix_layers").Mix()
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2), mix])
    model.compile("sgd", "mse")
    model.save("mix.keras")
    for name, *out in (("audit",), ("inspect",), ("export", "out")):
        monkeypatch.delitem(sys.modules, "mix_layers", raising=False)
        refused = command_line.run(name, "mix.keras", *out)
        assert refused.returncode == 1 and refused.stderr == (
            "error: 'mix.keras' does not load: it holds the class 'Mix', not registered with Keras: name the module "
            "that defines it with --import MODULE\n"
        )
        done = command_line.run(name, "mix.keras", *(out or ["--details"]), "--import", "mix_layers")
        assert done.returncode == 0 and ("mix" in done.stdout or out), done.stderr


def test_a_file_without_data_and_json(model_file):
    done = run(model_file, "--steps", 2, "--json")
    report = json.loads(done.stdout)
    assert report["steps"] == 2 and any("random numbers" in note for note in report["notes"])


def test_a_recipe_which_takes_no_data():
    done = run("language_model", "--data", "odd.npz")
    assert done.returncode == 1 and "a training recipe has data of its own" in done.stderr


def test_inputs_under_the_names_of_their_tensors_and_in_the_order_of_their_dict(tmp_path):
    tensors = OrderedDict((key, keras.Input((2,), name=name)) for key, name in (("b", "x"), ("a", "y")))
    model = keras.Model(tensors, keras.layers.Dense(1)(keras.layers.Concatenate()(list(tensors.values()))))
    arrays = [np.full((3, 2), value) for value in range(2)]
    for names in (("b", "a"), ("x", "y"), (0, 1)):
        x = dict(zip(names, arrays, strict=True)) if names != (0, 1) else arrays
        np.savez(tmp_path / "data.npz", **named_arrays((x, None)))
        ((read, y, weights),) = batches_of_file(tmp_path / "data.npz", model, 3)
        np.testing.assert_equal(read, dict(zip(("b", "a"), arrays, strict=True)))
        assert list(read) == ["b", "a"] and y is None and weights is None
