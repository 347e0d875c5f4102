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
# # See what the compiler did, for chips that you do not have
#
# A policy's name is what you ask for. What a chip runs is decided by its compiler. The compilers of NVIDIA's GPUs and
# of Google's TPUs come in wheels, and need no chip: here they compile one training step of a small GPT, and `inspect`
# reads what came out: in which precision each product runs, how much memory the step takes, what to change.
#
# No accelerator is needed, and nothing is trained.

# %% [markdown]
# ## The kit, and the compilers
#
# In Colab, choose `keras_mp.zip` in the dialogue that this cell opens; `make bundle` in a clone writes that file.
# Elsewhere put it beside this notebook, or run the notebook within a clone. The compilers are installed
# where they are missing: some hundred megabytes.

# %%
import os

os.environ["KERAS_BACKEND"] = "jax"
os.environ["JAX_PLATFORMS"] = "cpu"  # nothing runs: JAX need not look for the chips
os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"  # nor for the libraries of a GPU

from first_cell import install

install("inspect", needed=["jax", "libtpu", "jax_cuda13_plugin"])

# %%
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # else TensorFlow writes pages before its first line
os.environ.setdefault("JAX_PLATFORMS", "cpu")  # it compiles for chips that are not attached

# %%
import keras

import keras_mp

print(f"Keras {keras.__version__} on JAX, which compiles for {', '.join(keras_mp.chips.CHIPS)}")

# %% [markdown]
# ## A step to look at
#
# A GPT of four blocks of width 256, on 16 sequences of 256 tokens, in mixed_bfloat16. The batch is given by its
# shapes.

# %%
import warnings

from models.gpt import gpt
from models.transformer import Size

SIZE, LENGTH, BATCH, VOCABULARY = Size(4, 256, 4), 256, 16, 8192


def step(policy="mixed_bfloat16", change=keras_mp.stabilize, remat=False):
    """A compiled model and the shapes of a batch."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that this machine gains nothing by the policy
        keras_mp.set_global_policy(policy)
    model = change(gpt(SIZE, VOCABULARY, LENGTH, remat=remat))
    model.compile(keras.optimizers.AdamW(1e-3), keras_mp.lean.ChunkedCrossEntropy(), jit_compile=True)
    tokens = keras.KerasTensor((BATCH, LENGTH), "int32")
    return model, (tokens, tokens)


model, batch = step()
on_h100 = keras_mp.inspect(model, batch, target="h100")
on_v5e = keras_mp.inspect(model, batch, target="v5e")

# %% [markdown]
# ## What each product runs in
#
# Each product of the step, forward and backward, with the dtypes that were asked for and those that the compiler made
# of them, counted by operations.

# %%
from collections import Counter


def products(report):
    """The share of the operations in each precision, as asked for and as compiled."""
    total = sum(product.flops for product in report.matmuls)
    shares = Counter()
    for product in report.matmuls:
        asked, compiled = (" and ".join(sorted(set(dtypes))) for dtypes in (product.asked, product.compiled))
        shares[f"{asked} -> {compiled or 'nothing is left of it'}"] += product.flops
    return [f"{share / total:6.1%}  {kind}" for kind, share in shares.most_common()]


for report in (on_h100, on_v5e):
    print(f"{report.title}: {len(report.matmuls)} products, asked for -> compiled")
    print("\n".join(products(report)), end="\n\n")

# %% [markdown]
# ## Memory, and the least time a step can take
#
# Temporary memory is the compiler's own figure. The time is an estimate from the chip's peak rates: no step can be
# faster.

# %%
MIB = 2**20


def figures(report):
    """A line on memory and time."""
    return (
        f"{report.title:<12} {report.precision:<15} temporary {report.memory.temporary / MIB:7.1f} MiB, "
        f"at least {1e3 * report.roofline.seconds:.2f} ms a step, bound by {report.roofline.bound}"
    )


in_float32, _ = step("float32")
for report in (on_h100, keras_mp.inspect(in_float32, batch, target="h100"), on_v5e):
    print(figures(report))

# %% [markdown]
# `remat` keeps only the input of each block, and computes the rest once more in the backward pass.

# %%
recomputed, _ = step(remat=True)
with_remat = keras_mp.inspect(recomputed, batch, target="h100")
print(f"without remat {on_h100.memory.temporary / MIB:7.1f} MiB")
print(f"with remat    {with_remat.memory.temporary / MIB:7.1f} MiB")

# %% [markdown]
# ## Is FP8 really FP8?
#
# Keras's own float8 layers cast to FP8 and back, and hope that the compiler sees a product in FP8 there. The kit's
# layers ask for the product itself. Both are compiled for an H100, with autotuning off, because that needs the chip.


# %%
def in_float8(model):
    """Keras's own float8."""
    model = keras_mp.stabilize(model)
    for layer in model.layers:
        if isinstance(layer, keras.layers.Dense):
            layer.quantize("float8")
    return model


def in_fp8(model):
    """The kit's, in every layer that has one."""
    return keras_mp.convert(keras_mp.stabilize(model), select=lambda path, layer: True)


def fp8_products(report):
    """How many products were asked for in FP8, and how many of those run in it."""
    asked = [product for product in report.matmuls if all(dtype.startswith("float8") for dtype in product.asked)]
    run = [product for product in asked if all(dtype.startswith("float8") for dtype in product.compiled)]
    return f"{len(run)} of {len(asked)} products that ask for FP8 run in FP8"


for title, change in (("Keras's float8", in_float8), ("convert", in_fp8)):
    converted, _ = step(change=change)
    print(f"{title:<15} {fp8_products(keras_mp.inspect(converted, batch, target='h100'))}")

# %% [markdown]
# ## What to change
#
# A model of Keras's own layers in float16, and what `inspect` advises: before, and after the advice was taken.

# %%
from keras import layers


def of_keras_layers():
    """A token classifier with a softmax at its end."""
    tokens = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(VOCABULARY, 256)(tokens)
    x = x + layers.MultiHeadAttention(4, 64, dropout=0.1)(x, x)
    x = layers.LayerNormalization()(x)
    return keras.Model(tokens, layers.Dense(1000, activation="softmax")(x))


with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    keras_mp.set_global_policy("mixed_float16")
for title, change in (("as it is", lambda model: model), ("stabilized", keras_mp.stabilize)):
    model = change(of_keras_layers())
    model.compile(keras.optimizers.AdamW(1e-3), "sparse_categorical_crossentropy", jit_compile=True)
    report = keras_mp.inspect(model, batch, target="h100")
    print(f"{title}:")
    for advice in report.advice:
        print(f"  {advice.text}\n    {advice.code}")
    if not report.advice:
        print("  nothing to change")

# %% [markdown]
# The whole report is a table (`print(report)`) or a page with pictures:

# %%
from pathlib import Path

on_h100.to_html("report.html")
print(f"report.html: {Path('report.html').stat().st_size / 2**10:.0f} KiB")
