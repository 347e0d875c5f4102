"""Weights, states and assets, carried to another model."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras

from keras_mp.rebuild.merged import is_adapted, merged_weights, why_not_merged
from keras_mp.rebuild.quantized_policies import adapt, adaptation_of
from keras_mp.rebuild.walk import (
    RebuildError,
    children_of,
    copy_value,
    has_no_call,
    has_no_value,
    is_overwritten,
    own_variables,
)

# What `keras_mp.parallel.tensor_rules` leaves on a model, and no config holds.
RULES = "tensor_rules"
# What a KerasHub backbone keeps for save_lora_weights() and load_lora_weights(): places of layers, and the rank.
_LORA_OF_KERASHUB = ("_lora_enabled_layers", "_lora_rank")


def carry_state(old: keras.Model, new: keras.Model, merge: bool = False) -> tuple[dict[int, keras.Variable], list[str]]:
    """Gives a model the state of another.

    Args:
        merge: whether weights that are quantized, or have LoRA beside them, become float weights of layers without.

    Returns:
        The new variable in place of each old one, by the latter's id; and a sentence for each that was not carried.
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
    return variables, lost + fresh


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
