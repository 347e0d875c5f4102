"""Writes the files in tests/compat/0.1.0: models and a checkpoint, what they were asked and what they answered.

    git checkout bf23502
    for backend in tensorflow jax; do KERAS_BACKEND=$backend python write_files.py 0.1.0/$backend; done

The code of commit bf23502, the last with all modules flat in one folder, wrote them, with keras 3.15.1; run it from a
copy of this file outside the checkout, with the checkout on PYTHONPATH. `test_older_files.py` loads them. They are what
users of that version have on their disks: never write them again with later code.

Weights and inputs are small multiples of powers of two. Then products, sums and updates are exact, whatever their
order, and every CPU gives the same bits; so did TensorFlow and JAX. Products of FP8 numbers and their sums are exact,
too; where a scale is no power of two, it rounds number by number. Normalization, softmax and GELU round differently on
different CPUs, in the last bits of float32; they stand before a cast to bfloat16, which drops 16.
"""

import json
import sys
import zipfile
from pathlib import Path

import keras
import numpy as np

import keras_mp

LAYERS = keras.layers


def dyadic(shape, seed, step=0.25, largest=1.75):
    """Multiples of `step` whose largest magnitude is `largest`, in float32."""
    count = int(largest / step)
    values = np.random.default_rng(seed).integers(-count, count + 1, shape) * step
    values.flat[0] = largest
    return values.astype("float32")


def give_weights(model, seed=0, **options):
    """Gives every kernel, bias, table and scale small dyadic values; a seed's state and a history stay."""
    for index, variable in enumerate(model.weights):
        if variable.name not in ("seed_generator_state", "slots"):
            variable.assign(positive(variable, seed + index) or dyadic(variable.shape, seed + index, **options))


def positive(variable, seed):
    """Variances and scales, which must not be near 0."""
    fixed = {"moving_variance": 4.0, "gamma": 1.0}.get(variable.name)
    return None if fixed is None else [fixed] * variable.shape[0]


def stabilized():
    """Every treatment: normalization, softmax as layer, activation and operation, attention, the output, a penalty."""
    keras.config.set_dtype_policy("mixed_bfloat16")
    inputs = keras.Input((4, 8), name="tokens")
    x = LAYERS.Dense(8, "relu", activity_regularizer=keras.regularizers.L2(0.5), name="first")(inputs)
    x = LAYERS.BatchNormalization(epsilon=0.0, name="of_batches")(x)
    x = LAYERS.MultiHeadAttention(2, 4, dropout=0.25, name="attends")(x, x)
    x = LAYERS.LayerNormalization(name="of_features")(x)
    x = LAYERS.Dense(4, "softmax", name="gate")(x)
    x = keras.ops.log_softmax(x)
    x = LAYERS.Softmax(name="again")(x)
    model = keras.Model(inputs, LAYERS.Dense(4, name="last")(x), name="stabilized")
    give_weights(model)
    return keras_mp.stabilize(model), dyadic((2, 4, 8), 100)


def to_convert(name):
    keras.config.set_dtype_policy("mixed_bfloat16")
    inputs = keras.Input((2, 16), name="tokens")
    x = LAYERS.Dense(16, name="dense")(inputs)
    x = LAYERS.EinsumDense("abc,cd->abd", (None, 16), bias_axes="d", name="einsum")(x)
    x = LAYERS.MultiHeadAttention(2, 8, name="attends")(x, x)
    return keras.Model(inputs, LAYERS.Dense(4, name="last")(x), name=name)


def plain(path, layer):
    return not hasattr(layer, "recipe")


def everywhere(path, layer):
    return True


def fp8_current():
    """Converted layers, also below others and stabilized, and FP8 layers that were built as such, in a recipe each."""
    start = to_convert("fp8_current")
    x = keras_mp.layers.Float8Dense(16, recipe="rowwise", name="rowwise")(start.output)
    x = keras_mp.layers.Float8EinsumDense("abc,cd->abd", (None, 4), recipe="current", name="built")(x)
    model = keras.Model(start.input, x, name="fp8_current")
    give_weights(model)
    recipe = keras_mp.fp8.CurrentScaling(power_of_two=True)
    return keras_mp.stabilize(keras_mp.convert(model, recipe, select=plain)), dyadic((2, 2, 16), 100)


def fp8_delayed():
    """Two steps fill the amax histories; the learning rate is 0, so that the scales stay powers of two."""
    keras.config.set_dtype_policy("mixed_bfloat16")
    inputs = keras.Input((16,), name="features")
    x = LAYERS.Dense(16, "relu", name="dense")(inputs)
    model = keras.Model(inputs, LAYERS.Dense(8, name="last")(x), name="fp8_delayed")
    give_weights(model, step=0.4375, largest=1.75)
    model = keras_mp.convert(model, keras_mp.fp8.DelayedScaling(amax_history_length=4), select=everywhere)
    model.compile(keras_mp.loss_scaling.wrap_optimizer(keras.optimizers.SGD(0.0), model), "mse", jit_compile=False)
    x = dyadic((4, 16), 100, step=0.4375)
    for factor in (1.0, 2.0):
        model.train_on_batch(factor * x, dyadic((4, 8), 101))
    return model, x


def loss_scaled():
    """Float16 behind a dynamic loss scale: a step that overflows, two that do not, and half an accumulation."""
    keras.config.set_dtype_policy("mixed_float16")
    inputs = keras.Input((4,), name="features")
    x = LAYERS.Dense(4, "relu", name="dense")(inputs)
    model = keras.Model(inputs, LAYERS.Dense(2, name="last")(x), name="loss_scaled")
    give_weights(model, step=0.5, largest=1.5)
    sgd = keras.optimizers.SGD(2.0**-8, momentum=0.5, gradient_accumulation_steps=2)
    scale = keras_mp.LossScale(initial_scale=2.0**16, growth_interval=3)
    model.compile(keras_mp.LossScaleOptimizer(sgd, scale), "mse", jit_compile=False, auto_scale_loss=False)
    for seed in (1, 2, 3, 4):
        # A target of 2^12 makes a gradient that float16 cannot hold at a scale of 2^16, and the next can.
        y = dyadic((4, 2), 10 + seed, step=0.5, largest=1.5) + (4096.0 if seed == 1 else 0.0)
        model.train_on_batch(dyadic((4, 4), seed, step=0.5, largest=1.5), y)
    return model, dyadic((4, 4), 100, step=0.5, largest=1.5)


def static_scaled():
    """A loss scale that stays, around an optimizer with its own slots that has made no step."""
    keras.config.set_dtype_policy("mixed_float16")
    model = keras.Sequential([keras.Input((4,)), LAYERS.Dense(2, name="last")], name="static_scaled")
    give_weights(model)
    optimizer = keras_mp.LossScaleOptimizer(keras.optimizers.AdamW(0.5), keras_mp.LossScale.static(2.0**10))
    model.compile(optimizer, "mse", auto_scale_loss=False)
    optimizer.build(model.trainable_variables)
    return model, dyadic((4, 4), 100)


def block(width, name):
    inputs = keras.Input((None, width))
    x = LAYERS.Dense(2 * width, name="wide")(inputs)
    return keras.Model(inputs, LAYERS.Dense(width, name="narrow")(keras_mp.layers.Gelu(name="gelu")(x)), name=name)


def language_model():
    """Self-attention, a recomputed block with GELU, and a loss in chunks; compiled, not trained."""
    keras.config.set_dtype_policy("mixed_bfloat16")
    tokens = keras.Input((8,), dtype="int32", name="tokens")
    x = LAYERS.Embedding(16, 8, name="table")(tokens)
    x = LAYERS.LayerNormalization(name="before")(x)
    x = keras_mp.layers.SelfAttention(4, 2, causal=True, name="attends")(x)
    x = keras_mp.lean.remat(block(8, "block"))(x)
    model = keras_mp.layers.LanguageModel(tokens, LAYERS.Dense(16, name="head")(x), name="language_model")
    give_weights(model)
    optimizer = keras_mp.LossScaleOptimizer(keras.optimizers.SGD(0.5), keras_mp.LossScale.none())
    model.compile(optimizer, keras_mp.lean.ChunkedCrossEntropy(rows=4), jit_compile=False)
    optimizer.build(model.trainable_variables)
    return model, np.random.default_rng(100).integers(0, 16, (2, 8)).astype("int32")


MODELS = {
    make.__name__: make for make in (stabilized, fp8_current, fp8_delayed, loss_scaled, static_scaled, language_model)
}


def to_train():
    """A float16 model and its data for the checkpoint; the scale starts where it overflows."""
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy("mixed_float16")
    model = keras.Sequential([keras.Input((4,)), LAYERS.Dense(1, name="last")], name="trained")
    give_weights(model, step=0.5, largest=1.5)
    scale = keras_mp.LossScale(initial_scale=2.0**16, growth_interval=3)
    # Each update adds two binary places to the weights: five of them are exact in float16.
    sgd = keras.optimizers.SGD(0.5, momentum=0.5, gradient_accumulation_steps=2)
    model.compile(keras_mp.LossScaleOptimizer(sgd, scale), "mse", jit_compile=False, auto_scale_loss=False)
    x, y = dyadic((16, 4), 1, step=1.0, largest=1.0), dyadic((16, 1), 2, step=0.5, largest=1.5)
    return model, keras_mp.training.ShuffledBatches(x, y, batch_size=2, seed=3)


def train(folder, *callbacks):
    """Trains for an epoch of 8 steps, and saves after each 5 what `folder` does not have."""
    model, batches = to_train()
    checkpoint = keras_mp.TrainingCheckpoint(folder, batches, every=5, settings={"rate": 0.5})
    model.fit(batches, epochs=1, shuffle=False, verbose=0, callbacks=[checkpoint, *callbacks])
    return model, checkpoint


class Noted(keras.callbacks.Callback):
    """Keeps the values of a training as they are after so many steps, or before the first."""

    def __init__(self, steps):
        super().__init__()
        self.steps = steps

    def on_train_begin(self, logs=None):
        if self.steps == 0:
            self.values = values(self.model)

    def on_train_batch_end(self, batch, logs=None):
        if batch + 1 == self.steps:
            self.values = values(self.model)


def values(model):
    """All variables of a model and of its optimizer, in their order.

    Of an amax history the one that is saved; no states of seeds, which Keras leaves out of its files.
    """
    optimizer = model.optimizer.variables if getattr(model, "optimizer", None) else []
    variables = [*model.variables, *optimizer]
    return [value(variable) for variable in variables if variable.name != "seed_generator_state"]


def value(variable):
    array = keras.ops.convert_to_numpy(variable)
    # A count is int32 on JAX and int64 on TensorFlow.
    array = array.astype("int64") if array.dtype.kind == "i" else array
    return array.max(axis=0) if variable.name == "slots" else array


def compress(path):
    """Packs an archive's members anew, smaller."""
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name, content in members.items():
            archive.writestr(name, content)


def answer(model, x):
    """What a model makes of inputs, as float32, which holds 16 bits."""
    return keras.ops.convert_to_numpy(keras.ops.cast(model(x), "float32"))


def write(folder):
    folder.mkdir(parents=True)
    for name, make in MODELS.items():
        keras.utils.set_random_seed(0)
        model, x = make()
        model.save(folder / f"{name}.keras")
        compress(folder / f"{name}.keras")
        np.savez_compressed(folder / f"{name}.npz", *values(model), x=x, y=answer(model, x))
    noted = Noted(5)
    model, checkpoint = train(folder / "checkpoint", noted)
    for name, state in (("resumed", noted.values), ("trained", values(model))):
        np.savez_compressed(folder / f"{name}.npz", *state)
    within, end = sorted(checkpoint.folder.glob("*.npz"))
    compress(within)
    end.unlink()
    versions = {"keras": keras.__version__, "backend": keras.backend.backend()}
    (folder / "written.json").write_text(json.dumps(versions) + "\n")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
