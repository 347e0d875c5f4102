import warnings

import keras
import numpy as np
import pytest
from faults import normal, scale_only
from keras import layers

import keras_mp
from keras_mp.numerics.data import batches_of_file


def model_of(optimizer="sgd", dtype="float32"):
    model = keras.Sequential(
        [keras.Input((4,)), layers.Dense(8, dtype=dtype, name="first"), layers.Dense(1, dtype="float32", name="head")]
    )
    model.compile(optimizer, loss="mse")
    return model


def fit(model, x, y, finder, **settings):
    return model.fit(x, y, batch_size=16, shuffle=False, verbose=0, callbacks=[finder], **settings)


def planted():
    x, y = normal(64, 4), normal(64, 1)
    x[37, 2] = np.nan
    return x, y


@pytest.mark.parametrize("steps", [1, 2])
def test_it_finds_the_record_that_made_the_loss_nan_and_keeps_the_batch(tmp_path, steps):
    x, y = planted()
    finder = keras_mp.NonFiniteFinder(tmp_path / "dump")
    model = model_of()
    model.compile("sgd", loss="mse", steps_per_execution=steps)
    step = model.train_function
    with pytest.warns(UserWarning, match="(?s)NaN in the forward pass, first in x.*Remedy: a bad input record"):
        fit(model, x, y, finder, epochs=3)
    assert finder.found.records == [37 % 16]
    with np.load(finder.path) as batch:
        np.testing.assert_array_equal(batch["x"], x[32:48])
        np.testing.assert_array_equal(batch["y"], y[32:48])
    assert model.optimizer.iterations <= 4  # it stopped
    assert model.train_function is not None and model.train_function.__name__ != "watched" and step is None


def test_too_many_skips_set_it_off_and_few_do_not(tmp_path):
    x, y = planted()
    optimizer = keras_mp.LossScaleOptimizer(keras.optimizers.SGD(0.01))
    finder = keras_mp.NonFiniteFinder(tmp_path, max_consecutive_skips=2)
    model = keras_mp.loss_scaling.atomic_skip(model_of(optimizer))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        fit(model, x, y, finder)
    assert finder.found is None and not list(tmp_path.iterdir())
    x[:] = np.nan
    with pytest.warns(UserWarning, match="first in x"):
        fit(model, x, y, finder)
    assert finder.found.remedy == "a bad input record" and len(finder.found.records) == 16


def test_calibration_is_told_from_trouble(tmp_path):
    model, (x, y) = scale_only()
    finder = keras_mp.NonFiniteFinder(tmp_path, max_consecutive_skips=1, stop=False)
    with pytest.warns(UserWarning, match="This is normal while the scale is found"):
        fit(model, x, y, finder)
    assert finder.found.fitting_scale and finder.found.scale == 2.0**15


def test_a_healthy_training_is_as_without_it(tmp_path):
    x, y = normal(64, 4), normal(64, 1)
    histories = []
    for callbacks in ([], [keras_mp.NonFiniteFinder(tmp_path)]):
        keras.utils.set_random_seed(7)
        model = model_of("adam")
        history = model.fit(x, y, batch_size=24, epochs=2, verbose=0, callbacks=callbacks)
        histories.append(history.history["loss"])
    assert histories[0] == histories[1] and not list(tmp_path.iterdir())


def test_the_monitor_points_to_it():
    model = model_of(keras_mp.LossScaleOptimizer(keras.optimizers.SGD(0.01)))
    x, y = np.full((64, 4), np.nan, "float32"), normal(64, 1)
    with pytest.warns(UserWarning, match="keras_mp.numerics.find_nonfinite"):
        fit(model, x, y, keras_mp.PrecisionMonitor(max_consecutive_skips=2))


class Nested(keras.Model):
    """A model whose inputs and outputs are known only when it is called."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(1)

    def call(self, x):
        return {"left": [self.dense(part) for part in x["parts"]], "right": self.dense(x["whole"])}


def kept_cases():
    """Models, each with x, y and sample_weight of 4 records."""
    a, b = keras.Input((2,), name="sample_weight"), keras.Input((3,), name="x")
    left, right = (layers.Dense(1, name=name)(layers.Concatenate()([a, b])) for name in ("left", "right"))
    x, y, weights = [normal(4, 2), normal(4, 3)], [normal(4, 1), normal(4, 1)], [np.ones(4), np.arange(4.0)]
    by_name = {"sample_weight": x[0], "x": x[1]}
    y_by_name, weights_by_name = (dict(zip(("left", "right"), part, strict=True)) for part in (y, weights))
    one = keras.Sequential([keras.Input((2,)), layers.Dense(1)])
    return {
        "array": (one, x[0], y[0], weights[1]),
        "dict of inputs": (keras.Model([a, b], left), by_name, y[0], None),
        "inputs": (keras.Model({"sample_weight": a, "x": b}, left), x, y[0], weights[1]),
        "outputs": (keras.Model({"sample_weight": a, "x": b}, [left, right]), by_name, y, weights),
        "outputs by name": (keras.Model([a, b], [left, right]), x, y_by_name, None),
        "dict of outputs": (keras.Model([a, b], {"left": left, "right": right}), x, y_by_name, weights_by_name),
        "nested": (
            Nested(),
            {"parts": [x[0], normal(4, 2)], "whole": normal(4, 2)},
            {"left": y, "right": normal(4, 1)},
            {"left": weights, "right": weights[1]},
        ),
    }


@pytest.mark.parametrize(
    "case", ["array", "dict of inputs", "inputs", "outputs", "outputs by name", "dict of outputs", "nested"]
)
def test_the_batch_that_it_keeps_is_read_again_and_taken_by_keras(tmp_path, case):
    model, x, y, weights = kept_cases()[case]
    model.compile("sgd", "mse", run_eagerly=True)
    expected = model.evaluate(x, y, sample_weight=weights, verbose=0)
    values, bad = model.get_weights(), keras.tree.map_structure(np.copy, y)
    keras.tree.flatten(bad)[0][2] = np.inf
    finder = keras_mp.NonFiniteFinder(tmp_path)
    with pytest.warns(UserWarning, match="first in y"):
        model.fit(x, bad, sample_weight=weights, shuffle=False, verbose=0, callbacks=[finder])
    (read,) = batches_of_file(finder.path, model, 4)
    np.testing.assert_equal(keras.tree.flatten(read), keras.tree.flatten((x, bad, weights)))
    model.set_weights(values)
    read_y = keras.tree.pack_sequence_as(read[1], keras.tree.flatten(y))
    assert model.evaluate(read[0], read_y, sample_weight=read[2], verbose=0) == expected


@pytest.mark.slow
def test_a_batch_of_strings_is_kept_so_that_numpy_reads_it(tmp_path):
    import tensorflow as tf

    words = np.array([["häuser am see"], ["c"]])
    vectors = layers.TextVectorization(output_sequence_length=4, vocabulary=["am", "see"])
    inputs = keras.Input((1,), dtype="string")
    model = keras.Model(inputs, layers.Dense(1)(layers.Flatten()(layers.Embedding(9, 3)(vectors(inputs)))))
    model.compile("sgd", "mse")
    finder = keras_mp.NonFiniteFinder(tmp_path)
    data = tf.data.Dataset.from_tensors((words, np.full((2, 1), np.inf, "float32")))
    with pytest.warns(UserWarning, match="first in y"):
        model.fit(data, verbose=0, callbacks=[finder])
    with np.load(finder.path) as batch:
        assert batch["x"].tolist() == words.tolist()
