"""The ranges that int8 is calibrated on, against numpy."""

import keras
import numpy as np
import pytest
import zoo
from keras import layers

from keras_mp.export import int8
from keras_mp.numerics.ranges import Range


def test_ranges_are_those_of_all_records():
    model = keras.Sequential([keras.Input((6,)), layers.Dense(5, "relu", name="one"), layers.Dense(3, name="two")])
    x = zoo.normal(150, 6)  # three batches, the last one smaller
    w1, b1, w2, b2 = (keras.ops.convert_to_numpy(w) for w in model.weights)
    hidden = np.maximum(x @ w1 + b1, 0)
    expected = {"one": hidden, "two": hidden @ w2 + b2}
    outputs = int8.observe(model, x)
    assert [output.path for output in outputs] == ["one", "two"]
    for output in outputs:
        values = expected[output.path]
        np.testing.assert_allclose(output.lowest, values.min(axis=1), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(output.highest, values.max(axis=1), rtol=1e-5, atol=1e-6)
        assert output.range.lowest == pytest.approx(values.min(), abs=1e-6)
        assert output.range.highest == pytest.approx(values.max(), rel=1e-5)
        assert output.range.mean_square == pytest.approx(np.mean(values**2), rel=1e-4)


def test_the_model_is_seen_in_inference():
    """An audit's step would take the batch's statistics, and drop half."""
    norm = layers.BatchNormalization(name="norm")
    model = keras.Sequential([keras.Input((4,)), norm, layers.Dropout(0.5, name="drop"), layers.Dense(2, name="last")])
    norm.moving_mean.assign(np.full(4, 10.0))
    outputs = dict(int8.outputs_of(model, np.full((3, 4), 12.0, "float32")))
    np.testing.assert_allclose(outputs["norm"], 2 / np.sqrt(1 + norm.epsilon), rtol=1e-5)
    assert list(outputs) == ["norm", "last"]  # dropout passes on what it is given


def test_operations_and_nested_models_are_seen_and_no_cells():
    memory = keras.Sequential([keras.Input((3, 2)), layers.Bidirectional(layers.GRU(2), name="memory")])
    paths = [path for path, _ in int8.outputs_of(memory, zoo.normal(2, 3, 2))]
    assert "memory" in paths and not any("cell" in path for path in paths)
    inputs = keras.Input((4,))
    inner = keras.Sequential([keras.Input((4,)), layers.Dense(4, name="deep")], name="inner")
    model = keras.Model(inputs, keras.ops.tanh(inner(inputs)))
    paths = [path for path, _ in int8.outputs_of(model, zoo.normal(2, 4))]
    assert paths[0] == "inner/deep" and len(paths) == 2


def test_the_records_that_reach_the_ends_are_chosen():
    rng = np.random.default_rng()
    x = rng.uniform(-1, 1, (3000, 8)).astype("float32")
    places = rng.choice(np.arange(1, 2999), 4, replace=False)
    model = keras.Sequential([keras.Input((8,)), layers.ReLU(), layers.Rescaling(-2.0)])
    x[places[0]] *= 50
    outputs = int8.observe(model, x)
    records = int8.chosen(outputs, len(x))
    assert places[0] in records and {0, 2999} <= set(records)
    assert len(records) <= int8.TYPICAL + 4 and records == sorted(set(records))
    for output in outputs:
        assert min(output.lowest[place] for place in records) == output.range.lowest
        assert max(output.highest[place] for place in records) == output.range.highest


@pytest.mark.parametrize("low, high", [(-1.0, 1.0), (-0.3, 2.0), (0.5, 3.0)])
def test_predicted_sqnr_is_what_rounding_leaves(low, high):
    x = np.random.default_rng().uniform(low, high, 200_000).astype("float32")
    seen = Range()
    seen.update(x)
    step = (max(x.max(), 0) - min(x.min(), 0)) / 255
    rounded = np.round(x / step) * step
    assert int8.integer_sqnr(seen) == pytest.approx(int8.sqnr(rounded, x), abs=0.2)


def test_sqnr_of_hard_values():
    zeros, ones = np.zeros(3, "float32"), np.ones(3, "float32")
    assert int8.sqnr(ones, ones) == np.inf and int8.sqnr(zeros, zeros) == np.inf
    assert int8.sqnr(ones, zeros) == -np.inf
    assert int8.sqnr(ones * 1.1, ones) == pytest.approx(20, abs=1e-4)
    assert int8.integer_sqnr(Range()) == np.inf


@pytest.mark.parametrize("records, most", [(1, 1), (1, 100), (7, 3), (1000, 100)])
def test_spread(records, most):
    places = int8.spread(records, most)
    assert len(places) == min(records, most) and places == sorted(set(places))
    assert 0 <= places[0] and places[-1] <= records - 1
