# ---
# jupyter:
#   accelerator: TPU
#   colab:
#     gpuType: V5E1
#   jupytext:
#     text_representation:
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Train on a TPU, take home a float32 SavedModel
#
# Colab's TPU runtime has JAX and no TensorFlow. So a small GPT trains here on JAX, in bfloat16, with shapes that
# never change. Then TensorFlow's CPU wheel, in a folder of its own, writes a SavedModel without one 16-bit float in
# it, and its outputs are compared with those of the chip that trained.
#
# Without a TPU all of it runs as well, smaller.

# %% [markdown]
# ## The kit
#
# In Colab, choose `keras_mp.zip` in the dialogue that this cell opens; `make bundle` in a clone writes that file.
# Elsewhere put it beside this notebook, or run the notebook within a clone.

# %%
import os

os.environ["KERAS_BACKEND"] = "jax"

from first_cell import install

install("jax", needed=["jax"])

# %%
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # else TensorFlow writes pages before its first line

# %% [markdown]
# ## What is there, and a size that fits it

# %%
import warnings

import jax
import keras

import keras_mp
from models.transformer import Size

device = keras_mp.chips.list_devices()[0]
on_tpu = device.kind == "tpu"
print(f"Keras {keras.__version__} on JAX {jax.__version__}: {len(jax.local_devices())} {device.kind} ({device.name})")

if on_tpu:
    size, length, batch_size, epochs, corpus = Size(6, 384, 6), 512, 64, 12, "stdlib"
else:
    size, length, batch_size, epochs, corpus = Size(2, 128, 2), 64, 16, 1, "pydoc"
print(f"{size}, sequences of {length} bytes, {batch_size} a step")

# %% [markdown]
# ## Data of one shape
#
# A TPU compiles a step for each shape that it meets. So every batch has the same one: sequences of one length, and an
# epoch leaves out what does not fill a batch. The order is a function of the seed and the epoch, so that a training
# that was cut off goes on where it was.

# %%
from recipes.datasets.text import VOCABULARY, read, sequences, split

train_bytes, test_bytes = split(read(corpus), length)
batches = keras_mp.training.ShuffledBatches(*sequences(train_bytes, length), batch_size, seed=0)
test_inputs, test_targets = sequences(test_bytes, length)
whole = len(test_inputs) // batch_size * batch_size
test_inputs, test_targets = test_inputs[:whole], test_targets[:whole]
print(f"{batches.steps} steps an epoch, {len(test_inputs)} sequences to test on")

# %% [markdown]
# ## The model in bfloat16
#
# `mixed_bfloat16` computes in bfloat16 and keeps the weights in float32. `stabilize` gives back to float32 what needs
# it. bfloat16 has float32's range, so no loss scaling is needed.

# %%
from models.gpt import gpt
from recipes.common.schedule import warmup_then_cosine

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # that a CPU gains nothing by it
    keras_mp.set_global_policy("mixed_bfloat16")
keras.utils.set_random_seed(0)
model = gpt(size, VOCABULARY, length)
print(keras_mp.report(model))
model = keras_mp.stabilize(model)
schedule = warmup_then_cosine(4e-3 if not on_tpu else 1e-3, epochs * batches.steps)
optimizer = keras.optimizers.AdamW(schedule, beta_2=0.95, weight_decay=0.1, global_clipnorm=1.0)
model.compile(optimizer, keras_mp.lean.ChunkedCrossEntropy(), jit_compile=True)
print(f"{model.count_params():,} parameters")

# %% [markdown]
# ## Train
#
# `TrainingCheckpoint` saves all that the training depends on: run this cell again after Colab took the machine away,
# and it goes on where it was, to the same weights. (Give it a folder on your Drive for that.)

# %%
import math

from recipes.common.step_timer import StepTimer

timer = StepTimer()
history = model.fit(
    batches,
    epochs=epochs,
    shuffle=False,
    validation_data=(test_inputs, test_targets),
    validation_batch_size=batch_size,
    verbose=0,
    callbacks=[timer, keras_mp.TrainingCheckpoint("checkpoints", batches, every=200)],
).history
for epoch, loss in enumerate(history["val_loss"], start=1):
    print(f"epoch {epoch}: {loss / math.log(2):.3f} bits per byte on text that it has not seen")
if timer.step_seconds:
    tokens = batch_size * length / timer.step_seconds
    print(f"{tokens:,.0f} bytes a second; the first step took {timer.compile_seconds:.1f} s, with the compilation")

# %%
from recipes.common.generate import generate, readable

print("The " + readable(generate(model, b"The ", 150 if on_tpu else 60, temperature=0.7, seed=0)))

# %% [markdown]
# ## TensorFlow's CPU wheel, for the export alone
#
# It goes into a folder of its own: the packages that JAX runs on stay as they are. The first time takes some minutes.

# %%
import importlib.util
import platform
import subprocess
import sys
from pathlib import Path

import numpy as np

wheels = Path("tensorflow_for_export").resolve()
if importlib.util.find_spec("tensorflow") is None and not wheels.is_dir():
    intel_linux = sys.platform == "linux" and platform.machine() == "x86_64"
    tensorflow = "tensorflow-cpu>=2.20" if intel_linux else "tensorflow>=2.20"
    # The Keras that wrote the model reads it, and what is loaded here stays the same version.
    pins = [f"keras=={keras.__version__}", f"numpy=={np.__version__}"]
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "--target", str(wheels), tensorflow, *pins], check=True, stderr=subprocess.DEVNULL)
if wheels.is_dir():
    # First, because TensorFlow needs its own versions of what else is there. The export inherits this path.
    sys.path.insert(0, str(wheels))
    importlib.invalidate_caches()
print("TensorFlow is there" if importlib.util.find_spec("tensorflow") else "TensorFlow is missing")

# %% [markdown]
# ## Export in float32, and compare
#
# The model is saved, and a process of its own, in which Keras runs on TensorFlow, rebuilds it in float32, writes the
# SavedModel and looks at every node of it. What it answers on a batch is then compared with two things: this model
# run in float32 on this device, which must agree, and this model as it trained, in bfloat16.

# %%
import shutil

shutil.rmtree("saved_model", ignore_errors=True)
model.save("model.keras")
report = keras_mp.export_float32(model, "saved_model", verify=test_inputs[:8])
if wheels.is_dir():
    sys.path.remove(str(wheels))
print(f"{report.nodes} nodes, {report.low_precision_ops} of them in low precision")
print(f"from the model in float32 on this {device.kind}: {report.max_difference:.1e}")
print(f"from the model in bfloat16 on this {device.kind}: {report.precision_gap:.1e}")
assert report.low_precision_ops == 0

# %% [markdown]
# Differences are relative to the largest logit. The folder `saved_model` is what you take home: `tf.saved_model.load`
# needs neither Keras nor this kit.

# %%
files = [path for path in Path("saved_model").rglob("*") if path.is_file()]
print(f"saved_model: {len(files)} files, {sum(path.stat().st_size for path in files) / 2**20:.1f} MiB")
shutil.make_archive("saved_model", "zip", "saved_model")
print(f"saved_model.zip: {Path('saved_model.zip').stat().st_size / 2**20:.1f} MiB")
