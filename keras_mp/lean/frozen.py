"""Weights that do not train, stored in the 16 bits in which they are read."""

from __future__ import annotations

from typing import Any

import keras

from keras_mp.fp8.layers import Float8Layer
from keras_mp.rebuild import layers_by_path
from keras_mp.rebuild.notes import original_class, precision_of_layer, treatments_of
from keras_mp.rebuild.state import narrow, widen
from keras_mp.stability.sensitive import LOW_PRECISION, find, output_layers
from keras_mp.system.packages import package_of
from keras_mp.treatment.change import change, check_built
from keras_mp.treatment.treated import Treatment, register_treatments

FROZEN = "frozen"


def narrow_frozen(model: keras.Model) -> keras.Model:
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

    Args:
        model: a built Keras model, of which some weights do not train.

    Returns:
        The model. It is saved and loaded as usual; files of weights fit it and the model without. `keras_mp.revert`
        makes the weights float32 again.

    Raises:
        ValueError: If the model is not built, or has no weight that could be stored so; the message says why.
    """
    check_built(model)
    sensitive = {id(entry.layer) for entry in find(model, output_layers(model))}
    layers = {path: layer for path, layer in layers_by_path(model).items() if _held(layer)}
    reasons = {path: _why_not(layer, sensitive) for path, layer in layers.items()}
    chosen = [layer for path, layer in layers.items() if not reasons[path]]
    if not chosen:
        why = "; ".join(f"{path!r} {reason}" for path, reason in list(reasons.items())[:5]) or "It has no weights"
        raise ValueError(f"narrow_frozen({model.name!r}): no weight is both frozen and read only in 16 bits. {why}")
    change(model, [(layer, {FROZEN: None}) for layer in chosen])
    return model


class FrozenIn16Bits:
    """A layer whose weights are of 16 bits while they do not train, and float32 while they do."""

    @property
    def trainable(self) -> bool:
        return keras.layers.Layer.trainable.fget(self)  # type: ignore[attr-defined,no-any-return]

    @trainable.setter
    def trainable(self, value: bool) -> None:
        keras.layers.Layer.trainable.fset(self, value)  # type: ignore[attr-defined]
        _store(self)


def _why_not(layer: Any, sensitive: set[int]) -> str:
    """Why none of a layer's weights can be stored in 16 bits; empty where some can."""
    if all(variable.trainable for variable in _held(layer)):
        return "trains"
    if package_of(original_class(layer)) not in ("keras", "keras_hub"):
        return "is of a class that may read its weights in any precision"
    if getattr(layer, "quantization_mode", None):
        return "is quantized"
    if isinstance(layer, Float8Layer):
        return "is an FP8 layer"
    if not _readable(layer):
        return f"reads them in {layer.compute_dtype}"
    if id(layer) in sensitive:
        return "needs stabilize first"
    return ""


def _held(layer: Any) -> list[Any]:
    # Private, as the public list leaves out those that do not train; statistics and seeds are in another.
    return [variable for variable in layer._trainable_variables if keras.backend.is_float_dtype(variable.dtype)]


def _readable(layer: Any) -> list[Any]:
    """The weights of a layer that it reads in 16 bits alone."""
    if precision_of_layer(layer) not in LOW_PRECISION:
        return []
    if layer.compute_dtype in LOW_PRECISION:
        return [variable for variable in _held(layer) if variable._autocast]  # private, as it has no other name
    if "result" in treatments_of(layer) and not _adds_in_float32(layer):
        # The product has 16-bit operands, and the bias is added to its float32 result.
        return [variable for variable in _held(layer) if variable is not getattr(layer, "bias", None)]
    return []


def _adds_in_float32(layer: Any) -> bool:
    """Whether an output layer reads its kernel in float32: to add LoRA's product to it, or as it was made to."""
    return getattr(layer, "lora_enabled", False) or getattr(layer, "reverse_dtype", None) not in (None, *LOW_PRECISION)


def _store(layer: Any) -> None:
    for variable in _readable(layer):
        if variable.trainable:
            widen(variable)
        else:
            narrow(variable, precision_of_layer(layer))


def _widen_all(layer: Any) -> None:
    for variable in _held(layer):
        widen(variable)


register_treatments(
    {
        FROZEN: Treatment(
            lambda original, names: FrozenIn16Bits,
            undo=_widen_all,
            built=_store,
            before_quantize=_widen_all,  # it rounds to integers with scales of the weights' own dtype
            order=2,
        )
    }
)
