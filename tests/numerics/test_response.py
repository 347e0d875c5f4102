"""What rounding of arguments and weights does to a layer's result, beside numpy, and the verdicts that follow."""

import keras
import ml_dtypes
import numpy as np
import pytest
from faults import compiled, normal
from keras import layers, ops

from keras_mp import audit
from keras_mp.precision.policy import set_global_policy

LOW = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
# The mean error of a value that is rounded, as a share of it: a unit in the last place over the root of 12.
ROUNDING = {"float16": 2.0**-11 / 3**0.5, "bfloat16": 2.0**-8 / 3**0.5}


class Waves(layers.Layer):
    """Sine and cosine of times from 0 to 1, the fastest 1000 radians."""

    def call(self, t):
        angles = 1000.0 * t * ops.convert_to_tensor([1.0, 0.5, 0.25, 0.125], t.dtype)
        return ops.concatenate([ops.sin(angles), ops.cos(angles)], axis=-1)


class Positions(layers.Layer):
    """Adds waves of positions, which it counts itself."""

    def call(self, x):
        positions = ops.cast(ops.arange(x.shape[1]), self.compute_dtype)
        return x + ops.sin(positions)[None, :, None]


class Names(layers.Layer):
    """Looks rows up by whole numbers that come as floats."""

    def __init__(self, **arguments):
        super().__init__(**arguments)
        self.table = layers.Embedding(2000, 4)

    def build(self, shape):
        self.table.build(shape)

    def call(self, x):
        return self.table(ops.cast(x, "int32"))[:, 0]


class Block(layers.Layer):
    """A normalized branch with dropout, beside what comes in."""

    def __init__(self, **arguments):
        super().__init__(**arguments)
        self.normalization, self.dense = layers.LayerNormalization(), layers.Dense(16, "gelu")
        self.dropout = layers.Dropout(0.3)

    def build(self, shape):
        self.normalization.build(shape)
        self.dense.build(shape)

    def call(self, x, training=None):
        return x + self.dropout(self.dense(self.normalization(x)), training=training)


def share(low, wide):
    return float(np.linalg.norm(low.astype("float64") - wide) / np.linalg.norm(wide))


def responses(model, x, y):
    return {layer.path: layer.response for layer in audit(compiled(model), [(x, y)]).layers}


def unfit(model, x):
    y = normal(len(keras.tree.flatten(x)[0]), 1)
    return [suspect.path for suspect in audit(compiled(model), [(x, y)]).suspects("mixed_bfloat16")]


@pytest.mark.jax
def test_responses_are_those_of_numpy():
    """Operands are rounded, code that is not Keras's computes in the precision, and the rest is float32."""
    t, y = np.random.default_rng().uniform(size=(256, 1)).astype("float32"), normal(256, 1)
    inputs = keras.Input((1,))
    waves = Waves(name="waves")(inputs)
    model = keras.Model(inputs, layers.Dense(1, name="dense", bias_initializer="normal")(waves))
    kernel, bias = (np.asarray(weight) for weight in model.get_layer("dense").get_weights())
    found = responses(model, t, y)

    def waves_in(dtype):
        factors = np.array([1.0, 0.5, 0.25, 0.125], dtype)
        angles = (np.array(1000.0, dtype) * t.astype(dtype)) * factors
        return np.concatenate([np.sin(angles), np.cos(angles)], axis=-1)

    wide = waves_in("float32")
    product = wide.astype("float64") @ kernel + bias
    for name, dtype in LOW.items():
        assert found["waves"][name] == pytest.approx(share(waves_in(dtype), waves_in("float64")), rel=0.02)
        x, w, b = (values.astype(dtype).astype("float64") for values in (wide, kernel, bias))
        assert found["dense"][name] == pytest.approx(share(x @ w + b, product), rel=0.02)
        assert found["dense"][name] < 4 * ROUNDING[name]


def test_a_model_whose_loss_bfloat16_multiplies_does_not_fit():
    def build(waves):
        inputs = keras.Input((1,))
        return compiled(keras.Model(inputs, layers.Dense(1)(Waves(name="waves", dtype=waves)(inputs))))

    model = build(None)
    t = np.random.default_rng().uniform(size=(256, 1)).astype("float32")
    y = np.asarray(model(t)) + 0.01 * normal(256, 1)
    report = audit(model, (t, y))
    assert [suspect.path for suspect in report.suspects("mixed_bfloat16")] == ["waves"]
    assert "bfloat16: 1 of 2 layers does not fit." in str(report)
    with set_global_policy("mixed_bfloat16"):
        low, mended = build(None), build("float32")
    losses = []
    for built in (model, low, mended):
        built.set_weights(model.get_weights())
        losses.append(built.evaluate(t, y, verbose=0))
    assert losses[1] > 48 * losses[0] and losses[2] < 2 * losses[0]
    # It keeps its float32 among layers in 16 bits, and what it is given was not rounded before.
    assert audit(mended, (t, y)).suspects("mixed_bfloat16") == []


@pytest.mark.parametrize(
    ("layer", "x"),
    [
        (Positions(), lambda: normal(2, 700, 3)),
        (Names(), lambda: np.random.default_rng().integers(1000, 2000, (64, 1)).astype("float32")),
        (layers.Normalization(mean=2000.0, variance=25.0), lambda: 2000 + 5 * normal(64, 4)),
        (layers.BatchNormalization(), lambda: 2000 + 5 * normal(64, 4)),
        (layers.Activation(ops.sin), lambda: 100 * normal(64, 4)),
        (layers.Dense(1, kernel_initializer="ones", bias_initializer=keras.initializers.Constant(-8000.0)),
         lambda: 2000 + 5 * normal(64, 4)),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_what_16_bits_cannot_tell_apart_does_not_fit(layer, x):
    x = x()
    inputs = keras.Input(x.shape[1:])
    model = keras.Model(inputs, layers.Dense(1, name="head")(layers.Flatten()(layer(inputs))))
    assert layer.name in unfit(model, x)


def test_the_difference_of_large_numbers_in_a_graph():
    """An operation of a graph computes in what it is given: the data in float32, what a layer puts out in 16 bits."""
    x, shifted = keras.Input((4,)), keras.Input((4,))
    from_data = ops.subtract(x, shifted)
    from_layers = ops.subtract(layers.Rescaling(1.0)(x), layers.Rescaling(1.0)(shifted))
    model = keras.Model([x, shifted], layers.Dense(1)(layers.concatenate([from_data, from_layers])))
    data = 2000 + normal(64, 4)
    found = unfit(model, (data, data + 1 + normal(64, 4)))
    assert found == [from_layers._keras_history.operation.name]


def test_layers_that_compute_well_move_as_far_as_rounding_moves():
    inputs = keras.Input((8, 16))
    x = Block()(inputs)
    x = layers.MultiHeadAttention(2, 8)(x, x)
    x = layers.GRU(16)(layers.BatchNormalization()(x))
    model = keras.Model(inputs, layers.Dense(1)(layers.Dropout(0.5)(x)))
    for path, found in responses(model, normal(32, 8, 16), normal(32, 1)).items():
        assert found.keys() == set() if "dropout" in path else found.keys() == {"float16", "bfloat16"}, path
        assert all(error < 4 * ROUNDING[name] for name, error in found.items()), (path, found)


class Subclassed(keras.Model):
    """Hands the time on to a layer that stays in float32."""

    def __init__(self, **arguments):
        super().__init__(**arguments)
        self.waves, self.head = Waves(dtype="float32", name="waves"), layers.Dense(1, name="head")

    def call(self, t):
        return self.head(self.waves(t))


class Inside(Subclassed):
    """Takes the waves in its own code."""

    def call(self, t):
        return self.head(Waves.call(self, t))


@pytest.mark.parametrize(("kind", "named"), [(Subclassed, "waves"), (Inside, "inside")])
def test_the_code_of_a_subclassed_model_is_tried(kind, named):
    t = np.random.default_rng().uniform(size=(64, 1)).astype("float32")
    model = kind(dtype="mixed_bfloat16", name=kind.__name__.lower())
    model(t)
    assert unfit(model, t) == [named]


def test_code_that_fails_in_16_bits_does_not_count_as_fit():
    class Float32Only(layers.Layer):
        def call(self, x):
            if keras.backend.standardize_dtype(x.dtype) != "float32":
                raise TypeError("only float32 here")
            return x * 2.0

    model = compiled(keras.Sequential([keras.Input((4,)), Float32Only(name="fails"), layers.Dense(1)]))
    report = audit(model, (normal(8, 4), normal(8, 1)))
    assert "bfloat16: 1 of 2 layers fit, 1 could not be tried." in str(report)
    assert "it was not tried: in float16 its code fails: TypeError: only float32 here" in " ".join(str(report).split())
