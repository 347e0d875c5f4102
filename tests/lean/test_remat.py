"""remat: the same results, gradients and state as without, in every mode; less memory; bad input."""

import json
import subprocess
import sys

import keras
import numpy as np
import pytest
from keras import layers, ops
from marks import few

import keras_mp
from keras_mp.lean.remat import Remat

MODES = [{"jit_compile": False}, {"jit_compile": True}, {"run_eagerly": True}]


class Block(layers.Layer):
    """Everything that goes wrong: dropout, a state, a loss, an activation that takes `training` from its caller."""

    def __init__(self, recompute=False, loss=True, **arguments):
        super().__init__(**arguments)
        self.dense, self.narrow = layers.Dense(16, activation="gelu"), layers.Dense(8)
        self.dropout, self.normalization = layers.Dropout(0.5, seed=3), layers.BatchNormalization()
        self.recompute, self.loss = recompute, loss

    def build(self, shape):
        self.dense.build(shape)
        self.normalization.build((None, 16))
        self.narrow.build((None, 16))
        self.built = True

    def inside(self, x):
        return self.narrow(self.normalization(self.dropout(self.dense(x))))

    def call(self, x):
        y = keras_mp.remat(self.inside)(x) if self.recompute else self.inside(x)
        if self.loss:
            self.add_loss(0.1 * ops.mean(ops.square(ops.cast(y, "float32"))))
        return x + y


def build(kind):
    """Two blocks: "plain", each in a Remat "layer", or with a "function" inside."""
    keras.utils.set_random_seed(1)
    inputs = keras.Input((8,))
    x = inputs
    for index in range(2):
        block = Block(kind == "function", loss=index == 0, name=f"block{index}")
        x = (keras_mp.remat(block) if kind == "layer" else block)(x)
    return keras.Model(inputs, layers.Dense(1, dtype="float32")(x))


def train(kind, mode, batches):
    model = build(kind)
    model.compile(keras.optimizers.SGD(0.1), "mse", **mode)
    losses = [float(model.train_on_batch(*batch)) for batch in batches]
    seeds = [g.state for layer in model._flatten_layers() for g in layer._seed_generators]
    return losses, [ops.convert_to_numpy(v) for v in model.variables], [ops.convert_to_numpy(seed) for seed in seeds]


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: next(iter(mode)) + str(next(iter(mode.values()))))
@pytest.mark.parametrize("kind", few(["layer", "function"], "layer"))
def test_training_is_the_same_with_dropout_state_and_losses(kind, mode):
    generator = np.random.default_rng()
    batches = [(generator.normal(size=(32, 8)).astype("float32"), generator.normal(size=(32, 1))) for _ in range(3)]
    losses, variables, seeds = train("plain", mode, batches)
    ours = train(kind, mode, batches)
    np.testing.assert_allclose(ours[0], losses, rtol=1e-5)
    for a, b in zip(ours[1], variables, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * max(1e-3, np.abs(b).max()))
    for a, b in zip(ours[2], seeds, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: next(iter(mode)) + str(next(iter(mode.values()))))
@pytest.mark.parametrize("kind", few(["layer", "function"], "layer"))
def test_gradients_are_the_same_to_1e_6(kind, mode):
    generator = np.random.default_rng()
    batch = generator.normal(size=(32, 8)).astype("float32"), generator.normal(size=(32, 1)).astype("float32")
    kept = []
    for each in ("plain", kind):
        model = build(each)
        model.compile(Gradients(1.0), "mse", **mode)
        model.train_on_batch(*batch)
        kept.append([ops.convert_to_numpy(slot) for slot in model.optimizer.kept])
    for ours, plain in zip(kept[1], kept[0], strict=True):
        np.testing.assert_allclose(ours, plain, rtol=0, atol=1e-6 * np.abs(plain).max())


class Gradients(keras.optimizers.SGD):
    """Keeps the gradients and changes nothing."""

    def build(self, variables):
        super().build(variables)
        self.kept = [self.add_variable_from_reference(v, f"kept{i}") for i, v in enumerate(variables)]

    def update_step(self, gradient, variable, learning_rate):
        self.assign(self.kept[self._get_variable_index(variable)], ops.cast(gradient, variable.dtype))


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: next(iter(mode)) + str(next(iter(mode.values()))))
@pytest.mark.parametrize("kind", few(["layer", "function"], "layer"))
def test_under_autocast(kind, mode):
    generator = np.random.default_rng()
    batches = [(generator.normal(size=(32, 8)).astype("float32"), generator.normal(size=(32, 1)))]
    _, exact, _ = train("plain", mode, batches)
    keras.config.set_dtype_policy("mixed_bfloat16")
    _, plain, _ = train("plain", mode, batches)
    _, ours, _ = train(kind, mode, batches)
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
    model = keras.Model(inputs, layers.GlobalAveragePooling1D()(keras_mp.remat(layers.Dropout(0.0))(x)))
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
            return keras_mp.remat(self.block)(x, training=True) if isinstance(self.block, Remat) else self.recomputed(x)

        def recomputed(self, x):
            return keras_mp.remat(lambda x: self.block(x))(x)

    outer = Outer()
    outer.block.build((None, 8))
    with pytest.raises(ValueError, match=r"remat\(<lambda>\): a layer in the function adds 1 losses"):
        outer(np.zeros((2, 8), "float32"), training=True)


@pytest.mark.parametrize("wrong", [None, 3, "dense"])
def test_what_is_neither_layer_nor_function_is_named(wrong):
    with pytest.raises(TypeError, match=f"remat takes a Keras layer or a function, got {wrong!r}"):
        keras_mp.remat(wrong)


PROGRAM = """
import json, sys
import keras, numpy as np
import keras_mp
from keras_mp.system.host import peak_process_bytes
keras.utils.set_random_seed(0)
inputs = keras.Input((512, 64))
x = inputs
for index in range(8):
    inner = keras.Input((512, 64))
    y = inner
    for _ in range(6):
        y = keras.layers.Dense(64, activation="sigmoid")(y)
    block = keras.Model(inner, y)
    x = (keras_mp.remat(block) if sys.argv[1] == "remat" else block)(x)
model = keras.Model(inputs, x)
# Not jitted: XLA's compiler for CPUs drops the barriers and then merges the recomputation with the forward pass.
model.compile("sgd", "mse", run_eagerly=keras.backend.backend() == "jax", jit_compile=False)
small, large = (np.zeros((n, 512, 64), "float32") for n in (1, 128))
model.train_on_batch(small, small)
before = peak_process_bytes()
model.train_on_batch(large, large)
print(json.dumps(peak_process_bytes() - before))
"""


@pytest.mark.slow
def test_the_peak_of_a_real_run_falls():
    peaks = {}
    for kind in ("plain", "remat"):
        done = subprocess.run([sys.executable, "-c", PROGRAM, kind], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-2000:]
        peaks[kind] = json.loads(done.stdout.splitlines()[-1])
    print({kind: f"{peak / 2**20:.0f} MiB" for kind, peak in peaks.items()})
    # Of 48 activations of 16 MiB, 8 and those of one block are left.
    assert peaks["remat"] < 0.7 * peaks["plain"]
