"""remat: the same results, gradients and state as without, in every mode; less memory; bad input."""

import keras
import numpy as np
import pytest
from keras import layers, ops
from same_step import optimizer, step

import keras_mp

# What is recomputed, and how the step runs.
CASES = [
    ("layer", {"jit_compile": False}),
    ("function", {"run_eagerly": True}),
    pytest.param("layer", {"jit_compile": True}, marks=pytest.mark.jax),
]


class Block(layers.Layer):
    """Everything that goes wrong: dropout, a state, a loss, an activation that takes `training` from its caller."""

    def __init__(self, recompute=False, **arguments):
        super().__init__(**arguments)
        self.dense, self.narrow = layers.Dense(16, activation="gelu"), layers.Dense(8)
        self.dropout, self.normalization = layers.Dropout(0.5, seed=3), layers.BatchNormalization()
        self.recompute = recompute

    def build(self, shape):
        self.dense.build(shape)
        self.normalization.build((None, 16))
        self.narrow.build((None, 16))
        self.built = True

    def inside(self, x):
        return self.narrow(self.normalization(self.dropout(self.dense(x))))

    def call(self, x):
        y = keras_mp.lean.remat(self.inside)(x) if self.recompute else self.inside(x)
        self.add_loss(0.1 * ops.mean(ops.square(ops.cast(y, "float32"))))
        return x + y


def build(kind):
    """A block: "plain", in a recomputed "layer", or with a "function" inside."""
    keras.utils.set_random_seed(1)
    inputs = keras.Input((8,))
    block = Block(kind == "function", name="block")
    x = (keras_mp.lean.remat(block) if kind == "layer" else block)(inputs)
    return keras.Model(inputs, layers.Dense(1, dtype="float32")(x))


def train(kind, mode, batches):
    """The steps, and the variables at the end."""
    model = build(kind)
    model.compile(optimizer(0.1), "mse", **mode)
    steps = [step(model, *batch) for batch in batches]
    return steps, [ops.convert_to_numpy(variable) for variable in model.variables]


def draw(count):
    generator = np.random.default_rng()
    return [(generator.normal(size=(32, 8)).astype("float32"), generator.normal(size=(32, 1))) for _ in range(count)]


@pytest.mark.parametrize("kind, mode", CASES, ids=str)
def test_training_is_the_same_with_dropout_state_and_losses(kind, mode):
    batches = draw(3)
    (plain, variables), (ours, own) = (train(each, mode, batches) for each in ("plain", kind))
    for one, other in zip(ours, plain, strict=True):
        assert one.logs == pytest.approx(other.logs, rel=1e-5)
        np.testing.assert_equal(one.seeds, other.seeds)
    if not mode.get("jit_compile"):
        for a, b in zip(ours[0].gradients, plain[0].gradients, strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-6 * np.abs(b).max())
    for a, b in zip(own, variables, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * max(1e-3, np.abs(b).max()))


@pytest.mark.parametrize("kind, mode", CASES[:2], ids=str)
def test_under_autocast(kind, mode):
    batches = draw(1)
    exact = train("plain", {"run_eagerly": True}, batches)[1]
    keras.config.set_dtype_policy("mixed_bfloat16")
    plain, ours = train("plain", mode, batches)[1], train(kind, mode, batches)[1]
    # TensorFlow's graphs fuse, and so round, the two differently: each is as far from float32 as the other.
    error, allowed = (sum(np.square(a - b).sum() for a, b in zip(each, exact, strict=True)) for each in (ours, plain))
    assert 0 < error < 2 * allowed


def test_it_saves_loads_and_computes_the_same_in_inference(tmp_path):
    model, plain = build("layer"), build("plain")
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras", custom_objects={"Block": Block})
    x = np.random.default_rng().normal(size=(4, 8)).astype("float32")
    np.testing.assert_array_equal(model.predict(x, verbose=0), loaded.predict(x, verbose=0))
    plain.set_weights(model.get_weights())
    np.testing.assert_allclose(model.predict(x, verbose=0), plain.predict(x, verbose=0), rtol=1e-6, atol=1e-6)


def test_masks_go_in_and_come_out():
    inputs = keras.Input((5,), dtype="int32")
    x = layers.Embedding(10, 4, mask_zero=True)(inputs)
    model = keras.Model(inputs, layers.GlobalAveragePooling1D()(keras_mp.lean.remat(layers.Dropout(0.0))(x)))
    tokens = np.array([[1, 2, 0, 0, 0], [3, 4, 5, 6, 7]])
    table = ops.convert_to_numpy(model.layers[1].embeddings)
    for training in (False, True):
        means = ops.convert_to_numpy(model(tokens, training=training))
        np.testing.assert_allclose(means, [table[[1, 2]].mean(0), table[[3, 4, 5, 6, 7]].mean(0)], rtol=1e-5, atol=1e-6)


def test_a_function_that_adds_losses_is_an_error():
    class Outer(layers.Layer):
        def __init__(self):
            super().__init__()
            self.block = Block()

        def call(self, x):
            return keras_mp.lean.remat(lambda x: self.block(x))(x)

    outer = Outer()
    outer.block.build((None, 8))
    with pytest.raises(ValueError, match=r"remat\(<lambda>\): a layer in the function adds 1 losses"):
        outer(np.zeros((2, 8), "float32"), training=True)


def test_what_is_neither_layer_nor_function_is_named():
    with pytest.raises(TypeError, match="remat takes a Keras layer or a function, got 'dense'"):
        keras_mp.lean.remat("dense")
