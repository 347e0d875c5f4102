"""A model in the precision that a recipe was asked for."""

import keras

import keras_mp
from keras_mp.policy import PolicyChoice


def in_precision(model: keras.Model, choice: PolicyChoice, fp8: str = "current") -> keras.Model:
    """Puts what needs float32 in float32 and, for the policy "fp8", the matrix products in FP8.

    All of them: at a recipe's sizes none gains speed, and what is to be seen is what FP8 does to the training.

    Args:
        model: built under the policy.
        choice: what `keras_mp.set_global_policy` returned.
        fp8: for that policy, how products are scaled: "current", "delayed" or "rowwise".

    Returns:
        A new model.
    """
    model = keras_mp.stabilize(model)
    if choice.policy == "fp8":
        model = keras_mp.fp8.convert(model, fp8, select=lambda path, layer: True)
    return model
