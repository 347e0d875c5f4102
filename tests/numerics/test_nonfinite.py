import keras
import numpy as np
import pytest
from faults import (
    backward_only,
    compiled,
    healthy,
    large_activations,
    large_logits,
    nan_record,
    nan_weight,
    normal,
    scale_only,
    sequential,
)
from keras import layers, ops

import keras_mp
from keras_mp import find_nonfinite


@pytest.mark.parametrize("dtype", ["float32", "mixed_float16", "mixed_bfloat16"])
def test_nothing_is_found_in_a_healthy_model(dtype):
    assert find_nonfinite(*healthy(dtype)) is None


def test_activations_past_float16():
    found = find_nonfinite(*large_activations("mixed_float16"))
    assert (found.path, found.tensor, found.kind, found.remedy) == ("large", "output", "Inf", "float32 for this layer")
    assert found.count == 16 and not found.backward and not found.calibration
    assert found.given["bias"] == (0.0, 70_000.0)
    assert find_nonfinite(*large_activations("float32")) is None


def test_softmax_over_huge_logits():
    found = find_nonfinite(*large_logits("mixed_float16"))
    assert (found.path, found.tensor, found.remedy) == ("softmax", "input", "float32 for this layer")
    assert find_nonfinite(*large_logits("float32")) is None


@pytest.mark.parametrize("dtype", ["float32", "mixed_float16"])
def test_a_weight_with_one_nan(dtype):
    found = find_nonfinite(*nan_weight(dtype))
    assert (found.path, found.tensor, found.kind, found.count) == ("second", "weight kernel", "NaN", 1)
    assert found.remedy == "a bad weight" and "(2, 5)" in found.advice


@pytest.mark.parametrize("dtype", ["float32", "mixed_float16"])
def test_a_nan_in_record_37(dtype):
    found = find_nonfinite(*nan_record(dtype))
    assert (found.tensor, found.kind, found.records, found.remedy) == ("x", "NaN", [37], "a bad input record")


def test_an_infinite_label():
    model, (x, y) = healthy()
    y[3] = np.inf
    found = find_nonfinite(model, (x, y))
    assert (found.tensor, found.kind, found.records) == ("y", "Inf", [3])


@pytest.mark.parametrize("dtype", ["float32", "mixed_float16"])
def test_a_division_by_zero_in_the_backward_pass_only(dtype):
    found = find_nonfinite(*backward_only(dtype))
    assert (found.path, found.tensor, found.kind, found.backward) == ("norm", "input gradient", "NaN", True)
    assert found.remedy == "the layer's own arithmetic" and "float32 either" in found.advice


def test_an_overflow_that_only_the_loss_scale_causes():
    model, batch = scale_only()
    found = find_nonfinite(model, batch)
    assert found.calibration and found.remedy == "lower the loss scale" and found.backward
    assert found.scale == 2.0**15 and found.fitting_scale < 2.0**15
    assert find_nonfinite(model, batch, found.fitting_scale) is None
    assert find_nonfinite(model, batch, 2 * found.fitting_scale).calibration
    assert find_nonfinite(model, batch, 1.0) is None


def test_an_infinity_that_a_relu_cuts_off_is_not_blamed():
    model = sequential(
        layers.Dense(8, dtype="mixed_float16", name="cut", kernel_initializer="zeros"),
        layers.ReLU(dtype="mixed_float16", name="relu"),
        layers.Dense(8, dtype="mixed_float16", name="large", kernel_initializer="zeros"),
        layers.LayerNormalization(dtype="float32"),
    )
    model.get_layer("cut").bias.assign(np.full(8, -1e5))
    model.get_layer("large").bias.assign(np.full(8, 1e5))
    assert find_nonfinite(model, (normal(4, 8), normal(4, 1))).path == "large"


def test_layers_inside_layers_have_their_whole_path():
    inputs = keras.Input((6, 8))
    x = layers.MultiHeadAttention(2, 4, name="attention", dtype="mixed_float16")(inputs, inputs)
    model = compiled(keras.Model(inputs, layers.Dense(1, dtype="float32")(x)))
    value = model.get_layer("attention")._value_dense
    value.bias.assign(np.full(value.bias.shape, 1e5))
    if keras.backend.backend() == "jax":
        model.get_layer("attention")._flash_attention = False
        model.get_layer("attention")._dropout = 0.1  # float16's fused attention has no kernel on a CPU
    found = find_nonfinite(model, (normal(4, 6, 8), normal(4, 6, 1)))
    assert found.path == "attention/value" and found.remedy == "float32 for this layer"


def test_a_loss_that_is_not_finite_by_itself():
    model, batch = healthy()
    model.compile("sgd", loss=lambda y, prediction: ops.log(ops.zeros_like(prediction)))
    found = find_nonfinite(model, batch)
    assert (found.path, found.tensor, found.remedy) == ("", "loss", "the layer's own arithmetic")


def test_recurrent_layers_are_seen_from_outside():
    model = keras.Sequential([keras.Input((5, 3)), layers.LSTM(4, name="lstm"), layers.Dense(1, name="head")])
    model = compiled(model)
    batch = (normal(4, 5, 3), normal(4, 1))
    assert find_nonfinite(model, batch) is None
    model.get_layer("head").kernel.assign(np.full((4, 1), np.nan))
    assert find_nonfinite(model, batch).path == "head"


def test_a_model_class_with_code_and_a_step_of_its_own():
    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = layers.Dense(8, name="dense")

        def call(self, x):
            return ops.sum(ops.log(self.dense(x)), -1, keepdims=True)  # of negative numbers

        def train_step(self, *arguments):
            raise AssertionError("is not run")

    model = Own()
    model(normal(8, 8))
    model.compile("sgd", loss="mse")
    found = find_nonfinite(model, (normal(8, 8), normal(8, 1)))
    assert found is not None and found.kind == "NaN"


def test_bad_input_is_named():
    model, (x, y) = healthy()
    with pytest.raises(TypeError, match="model must be a keras.Model"):
        find_nonfinite("model", (x, y))
    with pytest.raises(ValueError, match="is not built"):
        find_nonfinite(compiled(keras.Sequential([layers.Dense(1)])), (x, y))
    with pytest.raises(ValueError, match="batch is empty"):
        find_nonfinite(model, (x[:0], y[:0]))
    with pytest.raises(ValueError, match="different lengths"):
        find_nonfinite(model, (x, y[:3]))
    with pytest.raises(ValueError, match="does not fit model .*x of shape \\(16, 5\\)"):
        find_nonfinite(model, (x[:, :5], y))
    with pytest.raises(ValueError, match="loss_scale=0 must be"):
        find_nonfinite(model, (x, y), 0)
    with pytest.raises(ValueError, match="has no loss"):
        find_nonfinite(keras.Sequential([keras.Input((8,)), layers.Dense(1)]), (x, y))


def test_no_weight_changes():
    model, batch = healthy()
    model = compiled(keras.Sequential([*model.layers[:-1], layers.BatchNormalization(), layers.Dense(1)]))
    model(batch[0])
    before = [np.copy(weight) for weight in model.get_weights()]
    find_nonfinite(model, batch)
    for old, new in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)
    assert keras_mp.find_nonfinite is find_nonfinite
