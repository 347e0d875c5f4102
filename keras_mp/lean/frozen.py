"""Weights that do not train, stored in fewer bits."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import keras

from keras_mp.lean.expert_blocks import bank_names, has_banks
from keras_mp.rebuild.quantized_banks import BITS, dequantize_bank, quantize_bank, quantized_banks
from keras_mp.rebuild.walk import (
    FLOAT8,
    LOW_PRECISION,
    narrow,
    original_class,
    package_of,
    precision_of_layer,
    treatments_of,
    widen,
)
from keras_mp.stability.sensitive import find
from keras_mp.treatment.change import ChangePlan, Planned, check_built
from keras_mp.treatment.treated import Treatment, register_treatments

FROZEN = "frozen"


def narrow_frozen(model: keras.Model, experts: str | None = None) -> keras.Model:
    """Stores the frozen weights of a model in 16 bits.

    Its layers read no more bits than these; the model is changed in place. Under Keras's mixed policies every weight is
    float32, and a layer that computes in 16 bits rounds it each time that it reads it. Of a weight that no update
    moves, this stores what is read: 2 bytes instead of 4, and the same outputs, losses and gradients, bit for bit. It
    is for a base that is frozen while something else trains: LoRA's matrices, or a new head.

        backbone.enable_lora(rank=8)
        keras_mp.prepare(model, optimizer, loss, narrow_frozen=True)

    Weights stay float32 where they train, where their layer computes in float32 (after `stabilize` normalization, and
    the bias of the output layer), and where a class of your own reads them, as its code may read them in any precision.
    So do those of quantized layers and of FP8 layers. A layer that is unfrozen by `layer.trainable = True` has float32
    weights again; freezing it stores them in 16 bits again. Freeze, quantize and `enable_lora` first.

    The low 16 bits of float32 are lost. Weights that were published in bfloat16 have none.

    `experts="int4"` also stores the banks of KerasHub's experts as integers, which Keras's `quantize` passes over, and
    which are most of such a model:

        backbone.quantize("int4")
        backbone.enable_lora(rank=8)
        keras_mp.lean.narrow_frozen(model, experts="int4")

    Each group of 128 rows of a column has a scale and a zero point, by Keras's own quantizer. The model then computes
    with the rounded weights, in training and in inference. A training step of a lean model dequantizes an eighth of a
    layer's experts at a time (`keras_mp.lean.make_lean`). Exports dequantize the banks.

    Args:
        model: a built Keras model, of which some weights do not train.
        experts: the integers in which to store banks of experts that do not train, in whatever precision they are read:
            "int8" or "int4". None leaves them as they are.

    Returns:
        The model. It is saved and loaded as usual; files of weights fit it and the model without. `keras_mp.revert`
        makes the weights float32 again. A file of weights with integers fits a model with the same integers.

    Raises:
        ValueError: If the model is not built, or has no weight that could be stored so, the message says why; if
            `experts` is another name, if no experts are frozen, or if they are stored in other integers already.
    """
    check_built(model)
    plan = ChangePlan(model)
    banks = {} if experts is None else _banks(plan, experts)
    plan_frozen(plan, find(plan), dict.fromkeys(banks, experts))
    plan.apply()
    return model


def plan_frozen(plan: ChangePlan, sensitive: Iterable[Planned], banks: Mapping[str, Any]) -> None:
    """Plans what `narrow_frozen` does.

    Sensitive layers need float32 and will not have it. Banks of experts are stored in integers, by their layer's path.
    """
    needs = {id(row.layer) for row in sensitive}
    layers = {path: layer for path, layer in plan.layers.items() if path in banks or _held(layer)}
    reasons = {path: "" if path in banks else _why_not(layer, plan, needs) for path, layer in layers.items()}
    chosen = {path: layer for path, layer in layers.items() if not reasons[path]}
    if not chosen:
        why = "; ".join(f"{path!r} {reason}" for path, reason in list(reasons.items())[:5]) or "It has no weights"
        name = plan.model.name
        raise ValueError(f"narrow_frozen({name!r}): no weight is both frozen and read only in 16 bits. {why}")
    plan.rows += [Planned(path, layer, {FROZEN: banks.get(path, _integers(layer))}) for path, layer in chosen.items()]


def _banks(plan: ChangePlan, experts: str) -> dict[str, Any]:
    """Layers whose banks of experts can be integers, by path."""
    if experts not in BITS:
        raise ValueError(f"experts={experts!r}: the integers are 'int8' or 'int4'; None stores none")
    layers = {path: layer for path, layer in plan.layers.items() if bank_names(layer)}
    banks = {
        path: layer
        for path, layer in layers.items()
        if not any(getattr(layer, name).trainable for name in bank_names(layer))
    }
    if not banks:
        why = "All its experts train: freeze them first" if layers else "It has no banks of experts"
        raise ValueError(f"narrow_frozen({plan.model.name!r}, experts={experts!r}): nothing to store. {why}")
    for path, layer in banks.items():
        if _integers(layer) not in (None, experts):
            raise ValueError(
                f"narrow_frozen({plan.model.name!r}, experts={experts!r}): {path!r} is in {_integers(layer)}. "
                "keras_mp.revert(model, 'make_lean') gives floats back"
            )
    return banks


def _integers(layer: Any) -> str | None:
    """Integers in which the banks of a layer are stored."""
    return treatments_of(layer).get(FROZEN)


class FrozenIn16Bits:
    """Mixin: weights of 16 bits while they do not train."""

    @property
    def trainable(self) -> bool:
        return keras.layers.Layer.trainable.fget(self)  # type: ignore[attr-defined,no-any-return]

    @trainable.setter
    def trainable(self, value: bool) -> None:
        keras.layers.Layer.trainable.fset(self, value)  # type: ignore[attr-defined]
        _store(self)


class FrozenExperts(FrozenIn16Bits):
    """Mixin: experts, whose own code is given dequantized weights."""

    def call(self, *args: Any, **kwargs: Any) -> Any:
        banks = quantized_banks(self)
        # Past Keras's tracking of attributes.
        stored = {name: vars(self)[name] for name in banks}
        vars(self).update({name: bank.floats(self.compute_dtype) for name, bank in banks.items()})  # type: ignore[attr-defined]
        try:
            return super().call(*args, **kwargs)  # type: ignore[misc]
        finally:
            vars(self).update(stored)


def _why_not(layer: Any, plan: ChangePlan, needs: set[int]) -> str:
    """Why no weight can be narrow, or ""."""
    if all(variable.trainable for variable in _held(layer)):
        return "trains"
    if package_of(original_class(layer)) not in ("keras", "keras_hub"):
        return "is of a class that may read its weights in any precision"
    if getattr(layer, "quantization_mode", None):
        return "is quantized"
    if FLOAT8 in plan.treatments(layer):
        return "is an FP8 layer"
    dtype = plan.compute_dtype(layer)
    if not _readable(layer, plan.treatments(layer), dtype):
        return f"reads them in {dtype}"
    if id(layer) in needs:
        return "needs stabilize first"
    return ""


def _held(layer: Any) -> list[Any]:
    # Private, as the public list leaves out those that do not train; statistics and seeds are in another.
    return [variable for variable in layer._trainable_variables if keras.backend.is_float_dtype(variable.dtype)]


def _readable(layer: Any, treatments: Collection[str], compute_dtype: str) -> list[Any]:
    """Weights of a layer that it reads in 16 bits."""
    if precision_of_layer(layer) not in LOW_PRECISION:
        return []
    if compute_dtype in LOW_PRECISION:
        return [variable for variable in _held(layer) if variable._autocast]  # private, as it has no other name
    # A kernel in float32 has LoRA's product added to it, or was asked for.
    in_float32 = getattr(layer, "lora_enabled", False)
    in_float32 |= getattr(layer, "reverse_dtype", None) not in (None, *LOW_PRECISION)
    if "result" in treatments and not in_float32:
        # The product has 16-bit operands, and the bias is added to its float32 result.
        return [variable for variable in _held(layer) if variable is not getattr(layer, "bias", None)]
    return []


def _store(layer: Any, just_built: bool = False) -> None:
    integers = _integers(layer)
    for name in bank_names(layer) if integers else ():
        trains, is_stored = getattr(layer, name).trainable, name in quantized_banks(layer)
        # Where a file is loaded, frozen or not: few configs say it.
        if not is_stored and (just_built or not trains):
            quantize_bank(layer, name, integers)  # type: ignore[arg-type]
        elif trains and is_stored:
            dequantize_bank(layer, name)
    for variable in _readable(layer, treatments_of(layer), layer.compute_dtype):
        if variable.trainable:
            widen(variable)
        else:
            narrow(variable, precision_of_layer(layer))


def _widen_all(layer: Any) -> None:
    for name in list(quantized_banks(layer)):
        dequantize_bank(layer, name)
    for variable in _held(layer):
        widen(variable)


register_treatments(
    {
        FROZEN: Treatment(
            lambda original, names: FrozenExperts if has_banks(original) else FrozenIn16Bits,
            undo=_widen_all,
            built=lambda layer: _store(layer, just_built=True),
            before_quantize=_widen_all,  # it rounds to integers with scales of the weights' own dtype
            order=2,
        )
    }
)
