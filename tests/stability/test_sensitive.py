import keras
import pytest
import zoo
from keras import layers

import keras_mp


@pytest.fixture(autouse=True)
def mixed_float16(float32_policy):
    keras.config.set_dtype_policy("mixed_float16")


def found(layer, shape=(8,), last=False):
    """Reasons for the layer, in the middle of a mixed_float16 model or at its end."""
    inputs = keras.Input(shape)
    x = layer(inputs)
    model = keras.Model(inputs, x if last else layers.Dense(2, dtype="float32", name="end")(x))
    return {each.path.split("/")[-1]: each.reason for each in keras_mp.stability.sensitive.sensitive_layers(model)}


@pytest.mark.parametrize(
    "name",
    ["BatchNormalization", "LayerNormalization", "RMSNormalization", "UnitNormalization"],
)
def test_normalizations(name):
    reasons = found(getattr(layers, name)(name="norm"))
    assert reasons == {"norm": "it sums squares over many values in float16"}


@pytest.mark.parametrize("function", ["softmax", "log_softmax", "sparsemax"])
def test_softmax_in_every_form(function):
    assert found(layers.Dense(3, function, name="dense")) == {"dense": "its softmax exponentiates and sums in float16"}
    assert found(layers.Activation(function, name="a")) == {"a": "its softmax exponentiates and sums in float16"}
    assert "exponentiates" in found(layers.Softmax(name="s"))["s"]


def test_layers_that_need_nothing():
    assert found(layers.Dense(3, "gelu")) == {}
    assert found(layers.ReLU()) == {}
    assert found(layers.LayerNormalization(dtype="float32")) == {}


def test_the_output_is_traced_back_to_its_product():
    reasons = found(keras.Sequential([layers.Dense(3, name="logits"), layers.Softmax(name="probabilities")]), last=True)
    assert "computes the model's output and rounds it to float16" in reasons["logits"]
    assert "computes the model's output and rounds it to float16" in reasons["probabilities"]


def test_several_reasons_for_one_layer():
    reason = found(layers.Dense(3, "softmax", activity_regularizer="l2", name="d"), last=True)["d"]
    assert reason.count(";") == 2


def test_a_layer_of_two_models_is_named_once():
    norm, inputs = layers.LayerNormalization(name="norm"), keras.Input((8,))
    inner = keras.Model(inputs, norm(inputs))
    model = keras.Model(inputs, layers.Dense(2, dtype="float32")(inner(norm(inputs))))
    assert len(keras_mp.stability.sensitive.sensitive_layers(model)) == 1


def test_a_float32_model_has_nothing_sensitive():
    model, _ = zoo.build("attention", "float32")
    assert keras_mp.stability.sensitive.sensitive_layers(model) == []


def test_paths_and_reasons():
    model, _ = zoo.build("subclass_inside_functional", "mixed_float16")
    found = {each.path.split("/", 1)[1]: each.reason for each in keras_mp.stability.sensitive.sensitive_layers(model)}
    norm = next(path for path in found if "batch_normalization" in path)
    assert norm.startswith("subclassed") and "sums squares over many values in float16" in found[norm]
    assert any("computes the model's output and rounds it to float16" in reason for reason in found.values())
