# ---
# jupyter:
#   accelerator: GPU
#   colab:
#     gpuType: T4
#   jupytext:
#     text_representation:
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Fine-tune a KerasHub model with LoRA, take it home in float32
#
# LoRA freezes a pretrained model and trains two thin matrices beside each chosen kernel. On Colab's T4 this notebook
# trains them in mixed_float16 with loss scaling, on a TPU v5e in mixed_bfloat16 on JAX. Then the model with its
# adapters is written as a float32 SavedModel, and compared with the model that trained.
#
# For a v5e, choose Runtime, Change runtime type, v5e-1 TPU, before the first cell. Without either, and without access
# to Kaggle, all of it runs as well, on a tiny model with random weights.

# %% [markdown]
# ## The kit, and KerasHub
#
# In Colab, choose `keras_mp.zip` in the dialogue that this cell opens; `make bundle` in a clone writes that file.
# Elsewhere put it beside this notebook, or run the notebook within a clone.

# %%
import importlib.util
import os

# Colab's TPU runtime has no TensorFlow.
os.environ.setdefault("KERAS_BACKEND", "tensorflow" if importlib.util.find_spec("tensorflow") else "jax")
backend = os.environ["KERAS_BACKEND"]

from first_cell import install

install(backend, needed=[backend])

# %% [markdown]
# Colab's runtimes with a GPU have KerasHub. On the TPU runtime this cell installs it, and TensorFlow, which KerasHub's
# tokenizers and the export need.

# %%
import subprocess
import sys
from importlib.metadata import version

if importlib.util.find_spec("keras_hub") is None:
    pins = [f"{name}=={version(name)}" for name in ("keras", "numpy", "jax")]
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "keras-hub>=0.25", *pins], check=True, stderr=subprocess.DEVNULL)
    importlib.invalidate_caches()

# %%
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # else TensorFlow writes pages before its first line

# %% [markdown]
# ## The precision of this device
#
# `auto` chooses mixed_float16 on a T4, which has fast float16 and no bfloat16, and mixed_bfloat16 on a v5e. A CPU
# gains nothing by either; here it computes as the accelerator would, to show how it is done.

# %%
import warnings

warnings.filterwarnings("ignore", message="IProgress not found")  # of the download's progress bar, outside Colab

import keras
import keras_hub

import keras_mp

device = keras_mp.chips.list_devices()[0]
on_cpu = device.kind == "cpu"
precision = {"tensorflow": "mixed_float16", "jax": "mixed_bfloat16"}[backend] if on_cpu else "auto"
with warnings.catch_warnings():
    warnings.simplefilter("ignore" if on_cpu else "default")  # that a CPU gains nothing by it
    choice = keras_mp.set_global_policy(precision)
print(f"KerasHub {keras_hub.__version__}, Keras {keras.__version__} on {backend}: {device.name}")
print(f"{choice.policy}: {choice.reason}")

# %% [markdown]
# ## The model
#
# `PRESET` is the name of any causal language model of KerasHub. GPT-2 asks for no licence; for `llama3.2_1b` or
# `gemma3_1b` accept theirs on Kaggle, and give Colab your key under Secrets (`KAGGLE_USERNAME`, `KAGGLE_KEY`). Gemma 3
# belongs on the TPU: its activations leave the range of float16 (`docs/nan.md`).
#
# Where the preset cannot be loaded, a tiny GPT-2 takes its place: random weights, bytes for tokens. It shows that each
# step works, and writes no text worth reading.

# %%
import numpy as np

PRESET = "gpt2_base_en"

keras.utils.set_random_seed(0)
try:
    tokenizer = keras_hub.tokenizers.Tokenizer.from_preset(PRESET)
    model = keras_hub.models.CausalLM.from_preset(PRESET, preprocessor=None)
except Exception as error:  # without access to Kaggle: of the network, of kagglehub, or of KerasHub
    print(f"{PRESET} cannot be loaded ({type(error).__name__}); a tiny GPT-2 with random weights takes its place")
    PRESET = None
    sizes = dict(vocabulary_size=256, num_layers=2, num_heads=4, hidden_dim=128, intermediate_dim=256)
    backbone = keras_hub.models.GPT2Backbone(**sizes, max_sequence_length=64)
    model = keras_hub.models.GPT2CausalLM(backbone, preprocessor=None)

print(f"{model.name}: {model.count_params():,} parameters")


# %%
def encode(text):
    """Returns the token ids of a text."""
    return np.asarray(tokenizer(text)) if PRESET else np.frombuffer(text.encode(), "uint8")


def decode(ids):
    """Returns the text of token ids."""
    return tokenizer.detokenize(ids) if PRESET else bytes(ids.astype("uint8")).decode(errors="replace")


# %% [markdown]
# ## LoRA
#
# `enable_lora` freezes the backbone and puts adapters of a low rank beside the kernels of the attention's queries and
# values. The optimizer keeps states for the adapters only.

# %%
model.backbone.enable_lora(rank=8)

# %% [markdown]
# ## Data of one shape
#
# Your own text goes here. Every batch has the same shape: a TPU compiles a step for each shape that it meets.

# %%
text = "Mixed precision computes in sixteen bits and keeps its weights in thirty-two. " * 400
length, batch_size, epochs = (128, 8, 3) if not on_cpu else (32, 16, 10)
ids = encode(text)
count = min((len(ids) - 1) // length, 40 * batch_size) // batch_size * batch_size
tokens = ids[: count * length].reshape(count, length).astype("int32")
targets = ids[1 : count * length + 1].reshape(count, length).astype("int32")
inputs = {"token_ids": tokens, "padding_mask": np.ones_like(tokens)}
print(f"{count} sequences of {length} tokens, {count // batch_size} steps an epoch")

# %% [markdown]
# ## Ready for `fit`
#
# `prepare` gives back to float32 what needs it, scales the loss where a layer computes in float16, and compiles. The
# adapters stay as they are. GPT-2's queries and values also have biases, which `enable_lora` leaves trainable, and
# which a file of adapters does not contain: they are frozen here.

# %%
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model = keras_mp.prepare(model, keras.optimizers.AdamW(2e-3 if not on_cpu else 1e-2), loss, verbose=True)
for weight in model.trainable_weights:
    weight.trainable = "lora" in weight.name
trained = sum(int(np.prod(weight.shape)) for weight in model.trainable_weights)
frozen = model.count_params() - trained
print(f"{trained:,} parameters are trained, {frozen:,} are frozen")
print(f"Adam's states: {8 * trained / 2**20:.2f} MiB, and {8 * frozen / 2**20:.2f} MiB without LoRA")

# %%
before = model.evaluate(inputs, targets, batch_size=batch_size, verbose=0, return_dict=True)["loss"]
scaled = isinstance(model.optimizer, keras_mp.LossScaleOptimizer)  # in float16
callbacks = [keras_mp.PrecisionMonitor()] if scaled else []
model.fit(inputs, targets, batch_size=batch_size, epochs=epochs, verbose=0, callbacks=callbacks)
after = model.evaluate(inputs, targets, batch_size=batch_size, verbose=0, return_dict=True)["loss"]
print(
    f"loss {before:.3f} before, {after:.3f} after {epochs} epochs: a factor of {np.exp(before - after):.1f} per token"
)
assert after < before

# %% [markdown]
# ## What it learned
#
# The likeliest next token, again and again: greedy decoding, without a cache, so that one compiled shape is enough.

# %%
prompt = encode("Mixed precision computes")[:length]
line = np.zeros((1, length), "int32")
line[0, : len(prompt)] = prompt
for place in range(len(prompt), length):
    mask = (np.arange(length) < place).astype("int32")[None]
    logits = model.predict({"token_ids": line, "padding_mask": mask}, verbose=0)
    line[0, place] = logits[0, place - 1].argmax()
print(decode(line[0]))

# %% [markdown]
# ## Take it home: the adapters
#
# A file of the adapters alone is small. It fits the same preset anywhere, after `enable_lora` with the same rank.

# %%
from pathlib import Path

model.backbone.save_lora_weights("adapters.lora.h5")
print(f"adapters.lora.h5: {Path('adapters.lora.h5').stat().st_size / 2**20:.2f} MiB")

# %% [markdown]
# ## Take it home: a float32 SavedModel
#
# `export_float32` rebuilds the model in float32 with its adapters, writes it, looks at every node for 16-bit values,
# and compares its outputs with two models: this one in float32, with which it must agree, and this one as it trained.

# %%
report = keras_mp.export_float32(
    model, "saved_model", verify={name: part[:8] for name, part in inputs.items()}, overwrite=True
)
print(report)
assert report.low_precision_ops == 0

# %% [markdown]
# `tf.saved_model.load("saved_model")` needs neither Keras, KerasHub nor this kit.
