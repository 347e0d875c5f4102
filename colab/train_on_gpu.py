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
# # Train on a GPU in the precision that it is made for
#
# A T4 has fast float16 and no bfloat16: it needs loss scaling. An L4, an A100 or an H100 has bfloat16, which needs
# none; an L4 and an H100 also multiply in FP8. The same small GPT is trained here in each precision that is worth it,
# and the results are compared. Without a GPU all of it runs as well, smaller, to see how it is done.

# %% [markdown]
# ## The kit
#
# In Colab, choose `keras_mp.zip` in the dialogue that this cell opens; `make bundle` in a clone writes that file.
# Elsewhere put it beside this notebook, or run the notebook within a clone.

# %%
import os

os.environ.setdefault("KERAS_BACKEND", "tensorflow")  # or "jax": the rest is the same

from first_cell import install

install("tensorflow", needed=["tensorflow"])

# %%
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # else TensorFlow writes pages before its first line

# %% [markdown]
# ## What this device can do

# %%
import keras

import keras_mp

device = keras_mp.chips.list_devices()[0]
on_gpu = device.kind == "gpu"
print(f"Keras {keras.__version__} on {keras.backend.backend()}: {device.name}")
supported = {dtype: keras_mp.chips.support(dtype) for dtype in ("float16", "bfloat16", "fp8")}
for dtype, support in supported.items():
    print(f"{dtype:<9} {'yes' if support.ok else 'no '} {support.reason}")
choice = keras_mp.set_global_policy("auto")
print(f"\nauto: {choice.policy}. {choice.reason}")

# %% [markdown]
# ## Which precisions to compare
#
# float32 as the measure of all. float16 with loss scaling everywhere: on a T4 it is what to train in, elsewhere it
# shows what bfloat16 spares you. bfloat16 and FP8 where the device has them.

# %%
from models.transformer import Size

precisions = ["float32", "mixed_float16"]
precisions += ["mixed_bfloat16"] if supported["bfloat16"].ok else []
precisions += ["fp8"] if supported["fp8"].ok else []
if on_gpu:
    size, length, batch_size, epochs, corpus = Size(6, 384, 6), 512, 16, 2, "stdlib"
else:
    size, length, batch_size, epochs, corpus = Size(2, 128, 2), 64, 16, 1, "pydoc"
print(f"{', '.join(precisions)}: {size}, sequences of {length} bytes, {batch_size} a step")

# %%
from recipes.datasets.text import VOCABULARY, read, sequences, split

train_bytes, test_bytes = split(read(corpus), length)
test = sequences(test_bytes, length)
print(f"{len(train_bytes):,} bytes to train on, {len(test_bytes):,} to test on")

# %% [markdown]
# ## One training
#
# What changes with the precision is the policy, and nothing else. `wrap_optimizer` scales the loss where a layer
# computes in float16, and only there; `atomic_skip` makes a step that overflowed leave no trace.

# %%
import math
import warnings

from models.gpt import gpt
from recipes.common.schedule import warmup_then_cosine
from recipes.common.step_timer import StepTimer


def train(precision):
    """Trains from the same weights on the same batches, and says what came out."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that this device gains nothing by a precision: here it is to be seen
        jit_compile = keras_mp.set_global_policy(precision).jit_compile
    keras.utils.set_random_seed(0)
    batches = keras_mp.training.ShuffledBatches(*sequences(train_bytes, length), batch_size, seed=0)
    model = keras_mp.stabilize(gpt(size, VOCABULARY, length))
    if precision == "fp8":
        model = keras_mp.convert(model)
    schedule = warmup_then_cosine(3e-3, epochs * batches.steps)
    optimizer = keras.optimizers.AdamW(schedule, beta_2=0.95, weight_decay=0.1, global_clipnorm=1.0)
    optimizer = keras_mp.loss_scaling.wrap_optimizer(optimizer, model)
    model.compile(optimizer, keras_mp.lean.ChunkedCrossEntropy(), jit_compile=jit_compile)
    scaled = isinstance(optimizer, keras_mp.LossScaleOptimizer)
    if scaled:
        keras_mp.loss_scaling.atomic_skip(model)
    timer = StepTimer()
    callbacks = [*([keras_mp.PrecisionMonitor()] if scaled else []), timer]
    logs = model.fit(batches, epochs=epochs, shuffle=False, verbose=0, callbacks=callbacks).history
    bits = model.evaluate(*test, batch_size=batch_size, verbose=0) / math.log(2)
    print(
        f"{precision:<15} {bits:.3f} bits per byte, {1e3 * timer.step_seconds:6.1f} ms a step"
        + (f", {logs['skipped_steps'][-1]} steps skipped, loss scale {logs['loss_scale'][-1]:g}" if scaled else "")
    )
    return model, bits, timer.step_seconds


trained = {precision: train(precision) for precision in precisions}

# %% [markdown]
# On a CPU float16 is slower than float32, and all times here are of one run. On a GPU the first precision that is
# worth it is the one that `auto` chose.

# %%
_, float32_bits, float32_seconds = trained["float32"]
for precision, (_, bits, seconds) in trained.items():
    speed = float32_seconds / seconds
    print(f"{precision:<15} {bits - float32_bits:+.3f} bits per byte, {speed:.2f} times float32's speed")

# %% [markdown]
# ## What loss scaling did
#
# Gradients below 6e-8 are zero in float16. So the loss is multiplied by a large number, and the gradients are divided
# by it in float32. A step that overflows is skipped and halves the number; 2000 steps without one double it. The
# training above began at 2^15. Begun at 2^24, the highest that is allowed, it finds its way down in the first steps
# and loses nothing else:


# %%
class LossScales(keras.callbacks.Callback):
    """Notes the loss scale after each step."""

    def __init__(self):
        super().__init__()
        self.scales = []

    def on_train_batch_end(self, batch, logs=None):
        if "loss_scale" in logs:
            self.scales.append(logs["loss_scale"])


with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    keras_mp.set_global_policy("mixed_float16")
keras.utils.set_random_seed(0)
batches = keras_mp.training.ShuffledBatches(*sequences(train_bytes, length), batch_size, seed=0)
model = keras_mp.stabilize(gpt(size, VOCABULARY, length))
optimizer = keras_mp.LossScaleOptimizer(keras.optimizers.AdamW(1e-3), keras_mp.LossScale(2.0**24))
model.compile(optimizer, keras_mp.lean.ChunkedCrossEntropy(), jit_compile=choice.jit_compile)
keras_mp.loss_scaling.atomic_skip(model)
seen = LossScales()
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # that this many skips in a row are not usual
    monitor = keras_mp.PrecisionMonitor()
    model.fit(batches, steps_per_epoch=40, shuffle=False, verbose=0, callbacks=[monitor, seen])
changes = [0, *(step for step in range(1, len(seen.scales)) if seen.scales[step] != seen.scales[step - 1])]
for step in changes:
    print(f"after step {step + 1:>2}: loss scale {seen.scales[step]:g}")
print(f"after step {len(seen.scales)}: loss scale {seen.scales[-1]:g}")

# %% [markdown]
# ## Take it home in float32

# %%
import shutil

best = choice.policy if choice.policy in trained else "float32"
shutil.rmtree("saved_model", ignore_errors=True)
print(f"trained in {best}:")
print(keras_mp.export_float32(trained[best][0], "saved_model", verify=test[0][:8]))
