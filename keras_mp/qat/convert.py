"""A model that trains as it will be once it is quantized."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

from keras_mp.qat.keras_modes import QAT, WEIGHTS, QuantizationAware
from keras_mp.rebuild import layers_by_path
from keras_mp.rebuild.notes import original_class, treatments_of
from keras_mp.system.one_of import one_of
from keras_mp.treatment.change import change
from keras_mp.treatment.treated import Treatment, register_treatments, untreat

Select = Callable[[str, Any], bool]


def trains_quantized(scaling: Any) -> bool:
    """Whether what `keras_mp.convert` is given asks for quantization-aware training."""
    named = isinstance(scaling, str) and scaling.startswith("qat_")
    return named or isinstance(scaling, keras.quantizers.QuantizationConfig)


def convert(model: keras.Model, mode: Any, select: Select | None = None) -> keras.Model:
    """Lets a built model train as it will be once it is quantized, in place.

    Args:
        mode: a name of `WAYS`, or Keras's config for int8 or int4.
        select: a function `select(path, layer) -> bool`; by default all layers that can be quantized so.

    Raises:
        ValueError: The name is none of `WAYS`, or no layer can be quantized so.
    """
    if not isinstance(mode, str):
        return _to_keras_mode(model, mode, select)
    return WAYS[one_of("scaling", mode, WAYS)](model, select)


def why_not(layer: Any, config: Any) -> str:
    """Why a layer cannot train for Keras's quantization; empty where it can."""
    if layer.quantization_mode is not None:
        return f"it is quantized to {layer.quantization_mode}"
    if "fp8" in treatments_of(layer) or original_class(layer) not in WEIGHTS:
        return "it computes in FP8" if "fp8" in treatments_of(layer) else "its class has code of its own"
    if layer.variable_dtype != "float32":
        return f"its weights are {layer.variable_dtype}: build the model under 'mixed_{layer.variable_dtype}'"
    if "..." in getattr(layer, "equation", ""):
        return "Keras quantizes no equation with '...'"
    try:
        layer._check_quantize_args(config.mode, layer.compute_dtype)  # private, and what `quantize()` asks first
    except ValueError as error:
        return str(error)
    return ""


def _to_keras_mode(model: keras.Model, config: Any, select: Select | None) -> keras.Model:
    if config.mode not in ("int8", "int4"):
        raise ValueError(f"scaling={config.mode!r} is no mode to train for: Keras's configs for int8 and int4 are")
    layers = {path: layer for path, layer in layers_by_path(model).items() if isinstance(layer, tuple(WEIGHTS))}
    chosen = {path: layer for path, layer in layers.items() if select is None or select(path, layer)}
    reasons = {path: reason for path, layer in chosen.items() if (reason := why_not(layer, config))}
    if len(reasons) == len(chosen) or (select is not None and reasons):
        told = "; ".join(f"{path}: {reason}" for path, reason in reasons.items()) or "no layer is chosen"
        raise ValueError(f"convert({model.name!r}): cannot train for {config.mode}. {told}")
    options = keras.saving.serialize_keras_object(config)
    change(model, [(layer, {QAT: options}) for path, layer in chosen.items() if path not in reasons])
    return model


WAYS: dict[str, Callable[[keras.Model, Select | None], keras.Model]] = {
    "qat_int8": lambda model, select: _to_keras_mode(model, keras.quantizers.Int8QuantizationConfig(), select),
    "qat_int4": lambda model, select: _to_keras_mode(model, keras.quantizers.Int4QuantizationConfig(), select),
}


def _no_more(layer: Any) -> None:
    if not getattr(layer, "lora_enabled", False):
        untreat(layer, (QAT,))


register_treatments({QAT: Treatment(lambda original, names: QuantizationAware, before_quantize=_no_more, order=-1)})
