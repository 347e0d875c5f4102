"""Models that train as they will be quantized; noise of weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from keras_mp import backend
from keras_mp.qat.keras_modes import WEIGHTS, QuantizationAware, quantized_twin
from keras_mp.qat.litert_ranges import plan_litert, trained_for
from keras_mp.rebuild.merged import merged_weights
from keras_mp.rebuild.walk import FLOAT8, QAT, Walk, original_class, quantization_trained_for, treatments_of
from keras_mp.system.argument_checks import one_of
from keras_mp.treatment.change import ChangePlan, Planned
from keras_mp.treatment.treated import Treatment, register_treatments
from keras_mp.treatment.waiting import register_calls

Select = Callable[[str, Any], bool]
# In dB, between int8 and int4: normal weights keep 41 of 8 bits, 12 (127 / 4)^2, and 18 of 4 bits, 12 (7 / 3)^2.
LOW_SQNR = 30.0
SAMPLE = 2**19
CONFIGS = {"qat_int8": keras.quantizers.Int8QuantizationConfig, "qat_int4": keras.quantizers.Int4QuantizationConfig}
LITERT_FORMATS = {"qat_litert": "int8", "qat_litert_int16x8": "int16x8"}


def plan_quantized(plan: ChangePlan, mode: Any, select: Select | None = None) -> None:
    """Plans that a model trains as it will be quantized.

    Args:
        mode: a name of `CONFIGS` or `LITERT_FORMATS`, or Keras's config for int8 or int4.
        select: a function `select(path, layer) -> bool`; by default all layers that can be quantized so.
    """
    if isinstance(mode, str) and one_of("scaling", mode, [*CONFIGS, *LITERT_FORMATS]) in LITERT_FORMATS:
        plan_litert(plan, LITERT_FORMATS[mode], select)
        return
    config = mode_of(mode)
    if config.mode not in ("int8", "int4"):
        raise ValueError(f"scaling={config.mode!r} is no mode to train for: Keras's configs for int8 and int4 are")
    if (file := trained_for(plan.model)) is not None:
        raise ValueError(
            f"convert({plan.model.name!r}): it trains for LiteRT's {file}: revert(model, 'convert') before"
        )
    layers = _quantizable(plan)
    chosen = {path: layer for path, layer in layers.items() if select is None or select(path, layer)}
    reasons = {
        path: reason for path, layer in chosen.items() if (reason := why_not(layer, config, plan.is_wide(layer)))
    }
    if len(reasons) == len(chosen) or (select is not None and reasons):
        none = "It has no layer that Keras quantizes, Dense, EinsumDense or embeddings: 'qat_litert' takes convolutions"
        none = f"select chose none of {', '.join(layers)}" if layers else none
        told = "; ".join(f"{path}: {reason}" for path, reason in reasons.items()) or none
        raise ValueError(f"convert({plan.model.name!r}): cannot train for {config.mode}. {told}")
    options = keras.saving.serialize_keras_object(config)
    plan.rows += [Planned(path, layer, {QAT: options}) for path, layer in chosen.items() if path not in reasons]


def sqnr(layer: Any, config: Any) -> float:
    """The signal-to-noise ratio of a layer's quantized weights, in dB.

    It is the least of its matrices; of large ones that of some channels, spread evenly, with `SAMPLE` weights in all.
    """
    names = next(names for cls, names in WEIGHTS.items() if isinstance(layer, cls))
    weights = {name: backend.to_numpy(getattr(layer, name)) for name in names if hasattr(layer, name)}
    changed: dict[str, Any] = {"lora_enabled": False}
    _, _, equation = getattr(layer, "equation", ",").partition(",")
    for name, matrix in weights.items():
        axis, (kernel, _, result) = 0 if name == "_embeddings" else -1, equation.partition("->")
        if matrix.size > SAMPLE and (not kernel or kernel[-1] in result):
            channels = matrix.shape[axis]
            chosen = np.linspace(0, channels - 1, max(channels * SAMPLE // matrix.size, 1)).astype(int)
            weights[name] = matrix.take(chosen, axis)
            changed["input_dim" if isinstance(layer, keras.layers.Embedding) else "units"] = len(chosen)
    quantized = merged_weights(quantized_twin(layer, config, **changed, **weights)).values()
    ratios = []
    for matrix, values in zip(weights.values(), quantized, strict=True):
        wide = matrix.astype("float64")
        noise = np.square(wide - values).sum()
        ratios.append(np.square(wide).sum() / noise if noise else np.inf)
    return float(10 * np.log10(min(ratios))) if min(ratios) > 0 else 0.0


def mode_of(scaling: Any) -> Any:
    """Keras's config of "qat_int8" or "qat_int4"; a config is returned."""
    return CONFIGS[one_of("scaling", scaling, CONFIGS)]() if isinstance(scaling, str) else scaling


def decisions(walk: Walk, mode: Any) -> list[Planned]:
    """Says whether layers train for Keras's mode, and why."""
    config = mode_of(mode)
    treatments, rows = {QAT: keras.saving.serialize_keras_object(config)}, []
    for path, layer in _quantizable(walk).items():
        done, reason = quantization_trained_for(layer) is not None, why_not(layer, config)
        ratio = 0.0 if done or reason else sqnr(layer, config)
        told = reason or f"{ratio:.0f} dB SQNR of its weights after plain {config.mode}"
        pays = not reason and not done and ratio < LOW_SQNR
        rows.append(Planned(path, layer, treatments if pays else {}, "" if done else told, done=done))
    return rows


def _quantizable(walk: Walk) -> dict[str, Any]:
    return {path: layer for path, layer in walk.layers.items() if isinstance(layer, tuple(WEIGHTS))}


def why_not(layer: Any, config: Any, wide: bool = False) -> str:
    """Why a layer cannot train for a quantization; or empty."""
    if layer.quantization_mode is not None:
        return f"it is quantized to {layer.quantization_mode}"
    if FLOAT8 in treatments_of(layer):
        return "it computes in FP8"
    if original_class(layer) not in WEIGHTS:
        return "its class has code of its own"
    if layer.variable_dtype != "float32" and not wide:
        return f"its weights are {layer.variable_dtype}: build the model under 'mixed_{layer.variable_dtype}'"
    if "..." in getattr(layer, "equation", ""):
        return "Keras quantizes no equation with '...'"
    if not layer.built:
        return "it is not built: call the model once on a batch"
    if config.mode == "int8" and layer.compute_dtype == "float16" and not wide:
        return "Keras has no int8 in float16: build the model under 'mixed_bfloat16' or 'float32'"
    return ""


_TREATMENT = Treatment(lambda original, names: QuantizationAware, before_build=True, keeps_adaptation=True, order=-1)
register_calls({QAT: plan_quantized})
register_treatments({QAT: _TREATMENT})
