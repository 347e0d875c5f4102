"""The float32 model without quantization and LoRA that a quantized or adapted model stands for."""

from __future__ import annotations

from typing import Any

import keras

from keras_mp.conversion.to_float32 import to_float32, to_merged_float32
from keras_mp.rebuild import RebuildError, layers_by_path, rebuild
from keras_mp.rebuild.merged import is_adapted


def is_merged(model: keras.Model) -> bool:
    """Whether no layer of a model is quantized to integers or has LoRA."""
    return not any(map(is_adapted, layers_by_path(model).values()))


def merged_float32(model: keras.Model, sample: Any = None) -> keras.Model:
    """A new model in float32 whose layers have one matrix of floats each: dequantized, with LoRA's product added.

    Args:
        model: a built Keras model in any precision.
        sample: as for `rebuild`.

    Returns:
        The new model, not compiled.

    Raises:
        RebuildError: as `rebuild`; a layer is quantized in a mode that is not known; or a weight is not carried over.
    """
    return _whole(
        model, rebuild(model, to_merged_float32, policy="float32", sample=sample, carry_compile=False, merge=True)
    )


def unmerged_float32(model: keras.Model, sample: Any = None) -> keras.Model:
    """The same with quantization and LoRA as they are, computed by Keras in float32 from inputs that are not quantized.

    What it computes differs from `merged_float32` by rounding in float32 alone.
    """
    new = _whole(model, rebuild(model, to_float32, policy="float32", sample=sample, carry_compile=False))
    for layer in layers_by_path(new).values():
        if getattr(layer, "inputs_quantizer", None) is not None:
            layer.inputs_quantizer = None
    return new


def _whole(model: keras.Model, rebuilt: Any) -> keras.Model:
    if rebuilt.unreached:
        raise RebuildError(f"model {model.name!r} could not be carried over to float32: {'; '.join(rebuilt.unreached)}")
    return rebuilt.model
