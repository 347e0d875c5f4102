"""What `prepare` did with a model, and why, in lines of at most 80 characters."""

from __future__ import annotations

import math
from collections import Counter

import keras

from keras_mp.fp8.layers import Float8Layer
from keras_mp.loss_scaling.loss_scale import NoLossScale
from keras_mp.loss_scaling.optimizer import LossScaleOptimizer
from keras_mp.loss_scaling.wide_weight import is_narrow
from keras_mp.precision.hardware import Support
from keras_mp.rebuild import layers_by_path
from keras_mp.reporting.shorten import listed, shorten_middle
from keras_mp.stability.sensitive import LOW_PRECISION, sensitive_layers

_LABEL, _TEXT = 11, 69  # characters


def lines_before(model: keras.Model) -> list[str]:
    """Two lines about a model as it was built, before `prepare` changes it."""
    return _lines(("precision", _precision(model)), ("float32", _float32(model)))


def prepared_lines(prepared: keras.Model, jit: Support) -> list[str]:
    """Three lines, and a fourth where weights are quantized.

    Args:
        prepared: what `prepare` returns, compiled.
        jit: whether to jit, and why.
    """
    return _lines(
        ("fp8", _fp8(prepared)),
        ("optimizer", _optimizer(prepared)),
        ("jit", _jit(prepared, jit)),
        ("quantized", _quantized(prepared)),
    )


def _lines(*told: tuple[str, str]) -> list[str]:
    return [f"{label:<{_LABEL}}{shorten_middle(text, _TEXT)}" for label, text in told if text]


def computes_in_fp8(model: keras.Model) -> bool:
    """Whether a layer of the model computes in FP8."""
    return bool(_fp8_layers(model))


def _fp8_layers(model: keras.Model) -> list[str]:
    return [layer.name for layer in layers_by_path(model).values() if isinstance(layer, Float8Layer)]


def _low(model: keras.Model) -> list[str]:
    return sorted({layer.compute_dtype for layer in layers_by_path(model).values()} & set(LOW_PRECISION))


def _precision(model: keras.Model) -> str:
    low = _low(model)
    policy = keras.config.dtype_policy().name
    if low:
        weights = "bfloat16" if any(map(is_narrow, model.trainable_variables)) else "float32"
        return f"{' and '.join(low)}, weights in {weights}: as the model was built"
    if policy != "float32":
        return f"float32: the model was built before the policy {policy}"
    return "float32: as the model was built"


def _float32(model: keras.Model) -> str:
    low = " and ".join(_low(model))
    if not low:
        return "everything"
    needed = [sensitive.layer.name for sensitive in sensitive_layers(model)]
    reason = f": {low} is too imprecise"
    return f"{listed(needed, _TEXT - len(reason), 'layers')}{reason}" if needed else "no layer needs it"


def _fp8(prepared: keras.Model) -> str:
    layers = _fp8_layers(prepared)
    if not layers:
        return "not used"
    return f"products of {listed(layers, _TEXT - len('products of '), 'layers')}"


def _quantized(prepared: keras.Model) -> str:
    layers = layers_by_path(prepared).values()
    modes = Counter(layer.quantization_mode for layer in layers if layer.quantization_mode not in (None, "float8"))
    if not modes:
        return ""
    stored = " and ".join(f"{_layers(count)} in {mode}" for mode, count in sorted(modes.items()))
    adapted = sum(bool(getattr(layer, "lora_enabled", False)) for layer in layers)
    weights = sum(math.prod(variable.shape) for variable in prepared.trainable_variables)
    return f"{stored}, {_layers(adapted) if adapted else 'none'} with LoRA; {weights:,} weights train"


def _layers(count: int) -> str:
    return f"{count} layer{'s' * (count > 1)}"


def _optimizer(prepared: keras.Model) -> str:
    optimizer = prepared.optimizer
    if not isinstance(optimizer, LossScaleOptimizer):
        return f"{type(optimizer).__name__}, loss not scaled: no layer computes in float16"
    name, states = type(optimizer.inner_optimizer).__name__, optimizer.state_dtype
    if any(map(is_narrow, prepared.trainable_variables)):
        rounding = "stochastically" if optimizer.weight_rounding == "stochastic" else "to nearest"
        step, more = f"bfloat16 weights rounded {rounding}", ", updated in float32"
    elif isinstance(optimizer.loss_scale, NoLossScale):
        step, more = "loss not scaled", "; wrapped, to step as it would in float16"
    else:
        scale = optimizer.loss_scale.initial_state().scale
        step, more = f"loss scale {scale:g}, for float16", "; an overflow changes nothing"
    return f"{name}, {step}{more}" if states == "float32" else f"{name}, states in {states}, {step}"


def _jit(prepared: keras.Model, jit: Support) -> str:
    if jit.ok and not prepared.jit_compile:
        return "off: Keras says that this model does not support it"
    return f"{'on' if prepared.jit_compile else 'off'}: {jit.reason.partition(': ')[2].rstrip('.')}"
