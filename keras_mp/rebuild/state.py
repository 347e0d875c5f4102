"""Weights, states and assets, carried to another model."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np

from keras_mp import backend
from keras_mp.rebuild.merged import CALIBRATED, LAYERS, is_adapted, merged_weights, why_not_merged
from keras_mp.rebuild.quantized_policies import policy_of
from keras_mp.rebuild.walk import RebuildError, children_of, has_no_call, own_variables

# What `keras_mp.parallel.tensor_rules` leaves on a model, and no config holds.
RULES = "tensor_rules"


# What a KerasHub backbone keeps for save_lora_weights() and load_lora_weights(): places of layers, and the rank.
_LORA_OF_KERASHUB = ("_lora_enabled_layers", "_lora_rank")


class _Carried(NamedTuple):
    variables: dict[int, keras.Variable]  # id of the old variable -> the new variable
    unreached: list[str]


def carry_state(old: keras.Model, new: keras.Model, merge: bool = False) -> _Carried:
    """Gives a model the state of another.

    Args:
        merge: whether weights that are quantized, or have LoRA beside them, become float weights of layers without.

    Raises:
        RebuildError: as `rebuild`.
    """
    merged: set[int] = set()
    variables: dict[int, keras.Variable] = {}
    arrived: set[int] = set()
    for path, old_layer, new_layer in _pairs(old, new, old.name, set()):
        if has_no_call(new_layer):
            new_layer.built = old_layer.built
        if not new_layer.built and old_layer.built and old_layer.weights and not _build_as(old_layer, new_layer):
            raise RebuildError(
                f"layer {path!r} ({type(new_layer).__name__}) was not built by rebuilding {old.name!r}: pass a batch "
                "of inputs (verify= or sample=), or give the model a build_from_config() that builds it"
            )
        if hasattr(old_layer, RULES):
            setattr(new_layer, RULES, getattr(old_layer, RULES))
        if new_layer.trainable != old_layer.trainable:
            new_layer.trainable = old_layer.trainable
        if merge and is_adapted(old_layer):
            pairs = _merge_layer(path, old_layer, new_layer)
            merged |= {id(variable) for variable in own_variables(old_layer)}
        else:
            adapt(new_layer, adaptation_of(old_layer))
            for name in _LORA_OF_KERASHUB:
                if hasattr(old_layer, name):
                    setattr(new_layer, name, getattr(old_layer, name))
            pairs = _carry_layer(path, old_layer, new_layer)
        variables |= {id(old_variable): new_variable for old_variable, new_variable in pairs}
        arrived |= {id(new_variable) for _, new_variable in pairs}
    lost = [
        f"weight {v.path!r} of the original has no place in the new model"
        for v in old.weights
        if id(v) not in variables and id(v) not in merged and not is_overwritten(v)
    ]
    fresh = [
        f"weight {v.path!r} of the new model still has its initial value"
        for v in new.weights
        if id(v) not in arrived and not is_overwritten(v)
    ]
    return _Carried(variables, lost + fresh)


def adaptation_of(layer: Any) -> dict[str, Any]:
    """How a layer is quantized to integers, and its LoRA.

    Empty of a layer with neither. A layer's own config shows less than all: not how the inputs are quantized, and
    Keras's Dense reads no `lora_alpha`. No config of a model shows any of it where a layer's code creates the layer.
    """
    mode = getattr(layer, "quantization_mode", None)
    adaptation: dict[str, Any] = {}
    if mode is not None and mode != "float8":  # whose layers may become this kit's, or plain ones
        names = ("quantization_config", "inputs_quantizer")
        attributes = {name: getattr(layer, name) for name in names if hasattr(layer, name)}
        adaptation |= {"mode": mode, "config": _quantization_config(layer), "attributes": attributes}
    if isinstance(layer, LAYERS) and layer.lora_enabled:
        adaptation |= {"rank": layer.lora_rank, "alpha": layer.lora_alpha}
    return adaptation


def adapt(layer: Any, adaptation: Mapping[str, Any]) -> None:
    """Quantizes a layer and adds LoRA, as `adaptation_of` says."""
    mode = adaptation.get("mode")
    if mode is not None and layer.quantization_mode is None:
        layer.quantize(mode, type_check=False, config=adaptation["config"])
    if mode in CALIBRATED:
        setattr(layer, f"is_{mode}_calibrated", True)
        if hasattr(layer, "_kernel"):
            del layer._kernel  # as Keras does once it has calibrated a layer
    for name, value in adaptation.get("attributes", {}).items():
        setattr(layer, name, value)
    if "rank" in adaptation:
        if not layer.lora_enabled:
            layer.enable_lora(adaptation["rank"], lora_alpha=adaptation["alpha"])
        layer.lora_alpha = adaptation["alpha"]


def _quantization_config(layer: Any) -> Any:
    """Config that a layer was quantized with."""
    config, policy = getattr(layer, "quantization_config", None), policy_of(layer)
    if config is None and hasattr(layer, "_int4_block_size"):  # private: without a config Keras makes groups of 128
        return keras.quantizers.Int4QuantizationConfig(block_size=layer._int4_block_size or -1)
    if config is None and policy.quantization_mode in CALIBRATED:
        made = {"gptq": keras.quantizers.GPTQConfig, "awq": keras.quantizers.AWQConfig}[policy.quantization_mode]
        return made(None, None, weight_bits=policy.weight_bits, group_size=policy.group_size)
    return config


def _merge_layer(path: str, old: Any, new: Any) -> list[tuple[keras.Variable, keras.Variable]]:
    """Gives a plain layer the merged weights of another."""
    wrong = why_not_merged(old)
    if wrong:
        raise RebuildError(f"layer {path!r} cannot be made a layer with float weights: {wrong}")
    weights = merged_weights(old)
    by_name = {variable.name: variable for variable in own_variables(new)}
    pairs = []
    for name, value in weights.items():
        by_name[name].assign(value)
        pairs.append((next(v for v in own_variables(old) if v.name == name), by_name[name]))
    for variable in own_variables(old):  # the bias, and what a subclass has beside it
        if variable.name in by_name.keys() - weights.keys():
            copy_value(variable, by_name[variable.name])
            pairs.append((variable, by_name[variable.name]))
    return pairs


def _build_as(old: keras.Layer, new: keras.Layer) -> bool:
    """Builds a layer for the shapes of another."""
    shapes = old.get_build_config()
    if not shapes:
        return False
    new._parent_path = old._parent_path  # private, and what Keras names weights by
    new.build_from_config(shapes)
    return len(own_variables(new)) == len(own_variables(old))


def is_overwritten(variable: keras.Variable) -> bool:
    """Tells whether a variable's "gradient" is its next value."""
    # Keras marks scales and amax histories so; they mean nothing outside the FP8 layer that made them.
    return bool(getattr(variable, "overwrite_with_gradient", False))


def _pairs(
    old: keras.Layer, new: keras.Layer, path: str, seen: set[tuple[int, int]]
) -> Iterator[tuple[str, keras.Layer, keras.Layer]]:
    """Walks two models side by side, by name or order."""
    if (id(old), id(new)) in seen:
        return
    seen.add((id(old), id(new)))
    yield path, old, new
    olds, news = children_of(old), children_of(new)
    by_name = {layer.name: layer for layer in news}
    if {layer.name for layer in olds} <= by_name.keys():
        couples = [(layer, by_name[layer.name]) for layer in olds]
    else:
        couples = list(zip(olds, news, strict=False))  # what is left over is reported as unreached
    for old_child, new_child in couples:
        yield from _pairs(old_child, new_child, f"{path}/{old_child.name}", seen)


def _carry_layer(path: str, old: keras.Layer, new: keras.Layer) -> list[tuple[keras.Variable, keras.Variable]]:
    pairs = _pair_variables(own_variables(old), own_variables(new))
    if any(map(has_no_value, own_variables(old))):
        return pairs
    for old_variable, new_variable in pairs:
        fits = tuple(old_variable.shape) == tuple(new_variable.shape)
        if not fits and not (is_overwritten(new_variable) and isinstance(new, type(old))):
            raise RebuildError(
                f"weight {old_variable.name!r} of layer {path!r} has shape {tuple(old_variable.shape)}, "
                f"rebuilt {tuple(new_variable.shape)}: the layer's config does not describe what it built"
            )
    own_way = not is_adapted(old)  # Keras's way for those merges LoRA, and quantizes the result again
    if own_way and isinstance(new, type(old)) and len(pairs) == len(own_variables(old)) == len(own_variables(new)):
        # The layer's own way first: custom layers keep more than variables there, and Normalization recomputes from it.
        store: dict[str, Any] = {}
        old.save_own_variables(store)
        new.load_own_variables(store)
    for old_variable, new_variable in pairs:
        if is_overwritten(new_variable) and isinstance(new, type(old)):
            continue  # its layer has carried over what fits
        copy_value(old_variable, new_variable)
        if new_variable.trainable and not old_variable.trainable:
            new_variable.trainable = False  # a kernel beside LoRA's
    if hasattr(old, "save_assets") and hasattr(new, "load_assets"):
        with tempfile.TemporaryDirectory() as folder:
            old.save_assets(folder)
            if any(Path(folder).iterdir()):
                new.load_assets(folder)
    return pairs


def copy_value(old: keras.Variable, new: keras.Variable) -> None:
    if has_no_value(old):
        return
    # A real copy: on JAX assigning would share the buffer, which training one of the two models donates and deletes.
    # By way of the host, because the two may lie on different devices.
    new.assign(value_on_host(old))


def widen(variable: keras.Variable) -> None:
    """Makes a 16-bit variable float32, before it is compiled."""
    if keras.backend.standardize_dtype(variable.dtype) in ("bfloat16", "float16"):
        _store_as(variable, "float32")


def narrow(variable: keras.Variable, dtype: str) -> None:
    """Rounds a float32 variable to 16 bits in place, likewise."""
    if keras.backend.standardize_dtype(variable.dtype) == "float32":
        _store_as(variable, dtype)


def _store_as(variable: keras.Variable, dtype: str) -> None:
    # Private, as Keras has no way to change a variable's dtype, and its layer and its path are to stay.
    value = None if has_no_value(variable) else keras.ops.cast(value_on_host(variable), dtype)
    variable._dtype = dtype
    if value is not None:
        variable._initialize(value)


def has_no_value(variable: keras.Variable) -> bool:
    """Whether a variable has only a shape and a dtype."""
    return variable._value is None  # private, because the public value would draw one


def value_on_host(variable: keras.Variable) -> Any:
    return np.array(backend.to_numpy(variable))


def _pair_variables(olds: list[Any], news: list[Any]) -> list[tuple[Any, Any]]:
    """Pairs variables by name; the rest in order."""
    waiting: dict[str, list[Any]] = {}
    for variable in news:
        waiting.setdefault(variable.name, []).append(variable)
    pairs = [(variable, waiting[variable.name].pop(0)) for variable in olds if waiting.get(variable.name)]
    paired = {id(variable) for pair in pairs for variable in pair}
    rest = [[variable for variable in side if id(variable) not in paired] for side in (olds, news)]
    if [tuple(variable.shape) for variable in rest[0]] == [tuple(variable.shape) for variable in rest[1]]:
        pairs += zip(*rest, strict=True)
    return pairs
