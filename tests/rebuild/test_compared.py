"""A model that is rebuilt from a config that does not say everything is refused, and the message says where."""

import keras
import numpy as np
import pytest
from keras import layers, ops

import keras_mp
from keras_mp.rebuild.compared import relative_difference
from keras_mp.rebuild.model import rebuild, unchanged
from keras_mp.rebuild.walk import RebuildError


class Net(keras.Model):
    def __init__(self, activation="relu", dropout=0.0, **kwargs):
        super().__init__(**kwargs)
        self.hidden, self.drop, self.out = layers.Dense(8, activation), layers.Dropout(dropout), layers.Dense(1)

    def call(self, x, training=None):
        return self.out(self.drop(self.hidden(x), training=training))


class Gain(keras.Model):
    def __init__(self, gain=1.0, **kwargs):
        super().__init__(**kwargs)
        self.gain, self.out = gain, layers.Dense(1)

    def call(self, x):
        return self.out(x) * self.gain


class Deep(keras.Model):
    def __init__(self, depth=2, **kwargs):
        super().__init__(**kwargs)
        self.blocks = [*(layers.Dense(6, "relu") for _ in range(depth)), layers.Dense(1)]

    def call(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class Graph(keras.Model):
    def __init__(self, activation="relu", **kwargs):
        inputs = keras.Input((6,))
        super().__init__(inputs, layers.Dense(8)(layers.Dense(8, activation)(inputs)), **kwargs)


@keras.saving.register_keras_serializable("compared")
class Forgets(layers.Layer):
    """Its get_config() leaves out what it keeps under another name."""

    def __init__(self, slope=0.1, **kwargs):
        super().__init__(**kwargs)
        self.negative = slope

    def call(self, x):
        return ops.leaky_relu(x, self.negative)

    def get_config(self):
        return super().get_config()


@keras.saving.register_keras_serializable("compared")
class Annealed(layers.Layer):
    """What it computes depends on an attribute that is set later."""

    beta = 0.0

    def call(self, x):
        return x * (1 + self.beta)


@keras.saving.register_keras_serializable("compared")
class Penalty(keras.regularizers.Regularizer):
    def __init__(self, weight=0.01):
        self.weight = weight

    def __call__(self, x):
        return self.weight * ops.sum(x * x)

    def get_config(self):
        return {}


@keras.saving.register_keras_serializable("compared")
class Doubles:
    def __init__(self, factor=1.0):
        self.factor = factor

    def __call__(self, x):
        return ops.relu(x) * self.factor

    def get_config(self):
        return {}


def around(layer):
    inputs = keras.Input((6,))
    return keras.Model(inputs, layers.Dense(1)(layer(inputs)))


def annealed():
    layer = Annealed()
    model = around(layer)
    layer.beta = 3.0
    return model


WRONG = {
    "argument of a model": (lambda: Net("tanh"), "first layer with another result is 'dense.*activation is tanh, and"),
    "dropout": (lambda: Net(dropout=0.5), "in training.*dropout.*rate is 0.5, and 0.0 in the new one"),
    "factor": (lambda: Gain(4.0), "Gain itself computes otherwise.*gain is 4.0, and 1.0 in the new one"),
    "depth": (lambda: Deep(3), "has shape .*does not describe what it built"),
    "graph in __init__": (lambda: Graph("tanh"), "activation is tanh, and relu in the new one"),
    "another name": (lambda: around(Forgets(0.9)), r"'forgets.*\(Forgets\), whose negative is 0.9, and 0.1"),
    "set later": (annealed, r"\(Annealed\)"),
    "activity regularizer": (lambda: around(layers.Dense(4, activity_regularizer=Penalty(1.0))), "adds another loss"),
    "kernel regularizer": (lambda: around(layers.Dense(4, kernel_regularizer=Penalty(1.0))), "adds another loss"),
    "activation": (lambda: around(layers.Dense(4, activation=Doubles(3.0))), r"\(Dense\)"),
    "nested": (lambda: keras.Sequential([keras.Input((6,)), Net("tanh")]), "'net.*/dense.*activation is tanh, and"),
}


def batch():
    return np.random.default_rng().normal(size=(4, 6)).astype("float32")


# Only the draws of dropout, and what is added to the loss, come about in another way on JAX.
ON_JAX = {"dropout", "activity regularizer"}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.jax] * (n in ON_JAX)) for n in WRONG])
def test_another_model_is_refused(name):
    keras.config.set_dtype_policy("mixed_bfloat16")
    make, message = WRONG[name]
    model = make()
    model(batch())
    with pytest.raises(RebuildError, match=f"(?s){message}"):
        new, unreached, _ = rebuild(model, unchanged)
        raise RebuildError("; ".join(unreached))
    assert keras_mp.stabilize(model) is model  # which rebuilds nothing


def test_whatever_rebuilds_refuses_it(tmp_path):
    keras.config.set_dtype_policy("mixed_bfloat16")
    model, x = WRONG["another name"][0](), batch()
    model(x)
    model.compile("sgd", "mse")
    before = ops.convert_to_numpy(ops.cast(model(x), "float32"))
    report = keras_mp.audit(model, (x, x[:, :1]))  # which runs the model itself, in float32 for a while
    np.testing.assert_array_equal(ops.convert_to_numpy(ops.cast(model(x), "float32")), before)
    assert report.loss == pytest.approx(np.mean((before - x[:, :1]) ** 2) + float(sum(model.losses)), rel=0.05)
    with pytest.raises(RebuildError, match="cannot be rebuilt from its config"):
        keras_mp.export.in_precision(model, "float32")
    with pytest.raises(RebuildError, match="cannot be rebuilt from its config"):
        keras_mp.export_float32(model, tmp_path / "out", verify=x)
    assert not any(tmp_path.iterdir())


def test_what_says_everything_is_rebuilt():
    keras.config.set_dtype_policy("mixed_float16")
    inputs = {"text": keras.Input((None,), dtype="int32", name="text"), "numbers": keras.Input((3,), name="numbers")}
    x = layers.LSTM(4)(layers.Embedding(5, 4)(inputs["text"]))
    model = keras.Model(inputs, layers.Dropout(0.5)(layers.Dense(2)(layers.Concatenate()([x, inputs["numbers"]]))))
    new, unreached, _ = rebuild(model, unchanged)
    assert not unreached
    data = {"text": np.array([[1, 2]], "int32"), "numbers": np.ones((1, 3), "float32")}
    np.testing.assert_array_equal(*(ops.convert_to_numpy(each(data)) for each in (model, new)))


class Choosy(keras.Model):
    """Takes no batch that could be made up."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(2)

    def build(self, shape):
        self.dense.build(shape)

    def call(self, x):
        if float(ops.max(x)) != 7:
            raise ValueError("sevens, please")
        return self.dense(x)


@pytest.mark.jax
def test_relative_difference():
    one, big = np.ones(3), np.full(3, 100.0)
    assert relative_difference(one, one) == 0.0
    assert relative_difference(big + 1, big) == pytest.approx(0.01)  # relative where values are large
    assert relative_difference(one * 1e-3, one * 0) == pytest.approx(1e-3)  # absolute where they are small
    assert relative_difference(one, np.ones(4)) == float("inf")
    assert relative_difference(np.array([np.nan, 1.0]), np.array([1.0, 1.0])) == float("inf")
    assert relative_difference(np.array([np.nan, 1.0]), np.array([np.nan, 1.0])) == 0.0
    words, other = (np.array([word], object) for word in ("one", "two"))
    assert relative_difference(words, words) == 0.0 and relative_difference(words, other) == float("inf")
    assert relative_difference(np.zeros(0), np.zeros(0)) == 0.0


class Noisy(layers.Layer):
    """Draws without a seed of its own."""

    def call(self, x):
        return x + 1e-9 * keras.random.normal(ops.shape(x), seed=int(np.random.default_rng().integers(2**30)))


def test_a_model_that_draws_anew_each_time_is_rebuilt_however_small_its_outputs():
    model = keras.Sequential([keras.Input((6,)), layers.Dense(2, kernel_initializer="zeros"), Noisy()])
    assert rebuild(model, unchanged).unreached == ()


def test_a_model_that_cannot_be_run_is_told():
    model = Choosy()
    model(np.full((3, 4), 7, "float32"))
    with pytest.warns(UserWarning, match="'choosy' .* could not be compared with the original: .*sevens, please"):
        rebuild(model, unchanged)


def test_a_rule_that_changes_nothing_needs_no_second_copy(monkeypatch):
    compared = []
    monkeypatch.setattr("keras_mp.rebuild.model.check_same", lambda old, new, sample: compared.append(new))
    keras.config.set_dtype_policy("float32")
    model = Graph()
    copy = rebuild(model, lambda node, layer: dict(node), policy="float32").model
    assert compared.pop() is copy
    lower = rebuild(model, lambda node, layer: dict(node), policy="mixed_bfloat16").model
    assert compared.pop() is not lower
    other = rebuild(model, lambda node, layer: {**node, "units": 1} if node.get("units") == 2 else {**node}).model
    assert compared.pop() is other
    wider = rebuild(model, lambda node, layer: {**node, "trainable": False} if "trainable" in node else node).model
    assert compared.pop() is not wider
