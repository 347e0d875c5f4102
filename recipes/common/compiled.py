"""A model compiled for training in the precision that a recipe was asked for."""

from collections.abc import Sequence
from typing import Any

import keras

import keras_mp
from keras_mp.precision.policy import PolicyChoice
from keras_mp.rebuild import layers_by_path


def compiled(
    model: keras.Model,
    choice: PolicyChoice,
    optimizer: keras.optimizers.Optimizer,
    loss: Any,
    metrics: Sequence[Any] = (),
    fp8: str = "current",
) -> keras.Model:
    """Puts a model in its precision, and compiles it with the loss scaling that its layers need.

    What needs float32 computes in float32. For the policy "fp8" all matrix products run in FP8, which at a recipe's
    sizes gains no speed: what is to be seen is what it does to the training.

    Args:
        model: built under the policy.
        choice: what `keras_mp.set_global_policy` returned.
        optimizer: without loss scaling.
        loss: as `compile` takes it.
        metrics: as `compile` takes them.
        fp8: for that policy, how products are scaled: "current", "delayed" or "rowwise".

    Returns:
        A new model. Where it computes in float16, a step that overflows changes nothing.
    """
    model = keras_mp.stabilize(model)
    if choice.policy == "fp8":
        model = keras_mp.fp8.convert(model, fp8, select=lambda path, layer: True)
    optimizer = keras_mp.wrap_optimizer(optimizer, model)
    if keras.backend.backend() == "jax":
        # Keras rules out jit for augmentation because of TensorFlow's kernels. JAX would be 150 times slower without.
        for layer in layers_by_path(model).values():
            layer.supports_jit |= type(layer).__module__.startswith("keras.src.layers.preprocessing")
    # "auto" and not True: TensorFlow cannot jit some augmentations, and "auto" then does without.
    jit_compile = "auto" if choice.jit_compile and keras_mp.backend.can_jit() else False
    model.compile(optimizer, loss, metrics=list(metrics), jit_compile=jit_compile)
    scales = isinstance(optimizer, keras_mp.LossScaleOptimizer)
    return keras_mp.atomic_skip(model) if scales else model
