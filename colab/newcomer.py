# ---
# jupyter:
#   jupytext:
#     text_representation:
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # From a fresh clone to a model of your own
#
# The walk of docs/index.md, with its output: data and a model that are not the repository's, trained in
# mixed precision, audited, compiled for an H100, and exported to a SavedModel that is float32 throughout. A laptop is
# enough.

# %% [markdown]
# ## The kit
#
# In Colab, choose `keras_mp.zip` in the dialogue that this cell opens; `make bundle` in a clone writes that file.
# Elsewhere put it beside this notebook, or run the notebook within a clone.
# What is missing is installed here: some hundred megabytes, with the compilers.

# %%
import os

os.environ.setdefault("KERAS_BACKEND", "tensorflow")  # or "jax": the rest is the same, but for the last cell
os.environ.setdefault("JAX_PLATFORMS", "cpu")  # the compilers need no chip

from first_cell import install

install("tensorflow,inspect", needed=["tensorflow", "jax", "libtpu", "jax_cuda13_plugin"])

# %%
import subprocess
import sys
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # else TensorFlow writes pages before its first line


def shell(command):
    """Runs a keras-mp command as the shell would, and shows what it prints."""
    print(f"$ keras-mp {command}")
    environment = {**os.environ, "COLUMNS": "80"}
    environment = {name: value for name, value in environment.items() if name not in ("FORCE_COLOR", "CLICOLOR_FORCE")}
    arguments = [sys.executable, "-m", "keras_mp.cli", *command.split()]
    done = subprocess.run(arguments, env=environment, capture_output=True, text=True)
    print(done.stdout, *done.stderr.splitlines()[-3:] if done.returncode else "", sep="")


shell("doctor")

# %% [markdown]
# ## Data
#
# Waves of four shapes, of random frequency and phase, in noise: which shape is it? Replace this by arrays of your own.

# %%
import numpy as np

SHAPES = ("sine", "square", "sawtooth", "pulses")
LENGTH, COUNT = 128, 4096

rng = np.random.default_rng(0)
labels = rng.integers(0, len(SHAPES), COUNT)
phase = rng.uniform(0, 1, (COUNT, 1)) + rng.uniform(2, 6, (COUNT, 1)) * np.linspace(0, 1, LENGTH)
phase %= 1.0
waves = np.stack([np.sin(2 * np.pi * phase), np.sign(phase - 0.5), 2 * phase - 1, 4.0 * (phase < 0.15) - 0.6])
x = waves[labels, np.arange(COUNT)] + rng.normal(0, 0.7, (COUNT, LENGTH))
x, y = x[..., None].astype("float32"), labels.astype("int32")
train, test = (x[:3072], y[:3072]), (x[3072:], y[3072:])
print(f"{len(train[0])} waves to train on, {len(test[0])} to test on")

# %% [markdown]
# ## Precision
#
# `auto` looks at the hardware, and says why.

# %%
import keras

import keras_mp

choice = keras_mp.set_global_policy("auto")
print(f"{choice.policy}, jit_compile={choice.jit_compile}\n{choice.reason}")

# %% [markdown]
# ## Model
#
# Any Keras model. `report` says what of it would compute in 16 bits and must not, what 8 bits would gain, and what can
# take less memory; `stabilize` gives the first back to float32.

# %%
keras.utils.set_random_seed(0)
inputs = keras.Input((LENGTH, 1))
features = keras.layers.Conv1D(32, 9, strides=4, activation="relu", name="waves")(inputs)
features = keras.layers.LayerNormalization(name="normalization")(features)
attended = keras.layers.MultiHeadAttention(4, 8, name="attention")(features, features)
features = keras.layers.Add(name="sum")([features, attended])
features = keras.layers.GlobalAveragePooling1D(name="mean")(features)
features = keras.layers.Dropout(0.1, name="dropout")(features)
outputs = keras.layers.Dense(len(SHAPES), activation="softmax", name="shape")(features)
model = keras.Model(inputs, outputs, name="waves_model")

print(keras_mp.report(model))
model = keras_mp.stabilize(model)

# %% [markdown]
# ## Train
#
# `wrap_optimizer` adds loss scaling where a layer computes in float16. `PrecisionMonitor` shows it, and says what is
# wrong. `TrainingCheckpoint` saves all that the training depends on: stop this cell and run it again, and it goes on.

# %%
batches = keras_mp.training.ShuffledBatches(*train, batch_size=64, seed=0)
optimizer = keras_mp.loss_scaling.wrap_optimizer(keras.optimizers.AdamW(3e-3), model)
model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"], jit_compile=choice.jit_compile)
scaled = isinstance(optimizer, keras_mp.LossScaleOptimizer)
if scaled:
    keras_mp.loss_scaling.atomic_skip(model)
model.fit(
    batches,
    epochs=6,
    shuffle=False,
    verbose=0,
    callbacks=[
        *([keras_mp.PrecisionMonitor()] if scaled else []),
        keras.callbacks.LambdaCallback(
            on_epoch_end=lambda epoch, logs: print(
                f"epoch {epoch + 1}: " + ", ".join(f"{name} {value:.4f}" for name, value in logs.items())
            )
        ),
        keras_mp.TrainingCheckpoint("checkpoints", batches),
    ],
)
loss, accuracy = model.evaluate(*test, verbose=0)
print(f"on waves that it has not seen: accuracy {accuracy:.3f}, loss {loss:.3f}")

# %% [markdown]
# ## Audit: what would a lower precision lose?
#
# One float32 run, forward and backward. `audit.to_html("audit.html")` has a row a layer.

# %%
audit = keras_mp.audit(model, [(x[start : start + 64], y[start : start + 64]) for start in range(0, 256, 64)])
print(audit)

# %% [markdown]
# ## Inspect: what does an H100 run?
#
# The step is compiled by the chip's compiler, here. Nothing is executed.

# %%
batch = keras.KerasTensor((64, LENGTH, 1), "float32"), keras.KerasTensor((64,), "int32")
report = keras_mp.inspect(model, batch, target="h100", compare=["float32"])
print(report)

# %% [markdown]
# ## Export
#
# A SavedModel in float32 throughout, or an error that names the layer. Every node of it is looked at, and its outputs
# are compared with those of the model run in float32.

# %%
import shutil

shutil.rmtree("saved_model", ignore_errors=True)
print(keras_mp.export_float32(model, "saved_model", verify=test[0][:64]))

# %% [markdown]
# ## The same from the shell
#
# With the model in a file, and a few batches beside it.

# %%
model.save("mine.keras")
np.savez("batches.npz", x=x[:256], y=y[:256])
shell("audit mine.keras --data batches.npz --html audit.html")
shell("inspect mine.keras --target h100 --batch-size 64 --compare float32 --html report.html")
shutil.rmtree("again", ignore_errors=True)
shell("export mine.keras again")
print(*sorted(path.name for path in Path.cwd().iterdir()), sep="\n")

# %% [markdown]
# ## Serve it
#
# Who loads the SavedModel needs TensorFlow, and neither Keras nor this kit.

# %%
program = """
import numpy as np, tensorflow as tf
loaded = tf.saved_model.load("saved_model")
batches = np.load("batches.npz")
outputs = loaded.serve(batches["x"])
right = np.mean(np.argmax(outputs, axis=1) == batches["y"])
print(f"{outputs.dtype.name} outputs, {right:.3f} right")
"""
quiet = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
print(subprocess.run([sys.executable, "-c", program], env=quiet, capture_output=True, text=True, check=True).stdout)
