"""FP8 as what is done to a layer, and the files that earlier versions saved."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import keras

from keras_mp.fp8.layers import (
    FLOAT8,
    Config,
    Float8Dense,
    Float8EinsumDense,
    Float8Layer,
    build_history,
    set_history,
)
from keras_mp.fp8.recipes import get_recipe
from keras_mp.rebuild import layers_by_path
from keras_mp.rebuild.notes import original_class, treatments_of
from keras_mp.treatment.treated import (
    Treatment,
    rebase,
    register_treatments,
    treat,
    untreated_node,
    wait_inside,
)

# Layers that a user made FP8 ones, and the plain class of each.
PLAIN: dict[type, type] = {
    Float8Dense: keras.layers.Dense,
    Float8EinsumDense: keras.layers.EinsumDense,
}
_PLAIN_NAMES = {keras.saving.get_registered_name(cls): plain for cls, plain in PLAIN.items()}


def _mixin(original: type, names: Collection[str]) -> type | None:
    return None if issubclass(original, Float8Layer) else Float8Layer


def _without_history(layer: Any) -> None:
    set_history(layer, None)


register_treatments(
    {
        FLOAT8: Treatment(
            _mixin,
            undo=_without_history,
            built=build_history,
            order=1,
            write=keras.saving.serialize_keras_object,
            read=get_recipe,
        )
    }
)


def make_plain(layer: Any) -> None:
    """Makes a layer of one of this kit's FP8 classes one of Keras's, in place."""
    rebase(layer, PLAIN[original_class(layer)])
    set_history(layer, None)
    vars(layer).pop("_recipe", None)


@contextmanager
def without_float8(model: keras.Model) -> Iterator[None]:
    """Lets FP8 layers be plain ones for a while; their amaxes are kept."""
    before = []
    for layer in layers_by_path(model).values():
        if isinstance(layer, Float8Layer):
            history = layer.amax_history
            set_history(layer, None)
            before.append((layer, type(layer), dict(treatments_of(layer)), history))
            treatments_of(layer).pop(FLOAT8, None)
            original = original_class(layer)
            rebase(layer, PLAIN.get(original, original))
    try:
        yield
    finally:
        for layer, cls, treatments, history in before:
            treatments_of(layer).update(treatments)
            layer.__class__ = cls
            set_history(layer, history)


def plain_node(node: Config) -> Config:
    """Rewrites the config of an FP8 layer to that of the plain layer; any other dict is returned as it is."""
    node = untreated_node(node, (FLOAT8,))
    plain = _PLAIN_NAMES.get(node.get("registered_name") or "")
    if plain is None:
        return node
    config = {key: value for key, value in node["config"].items() if key != "recipe"}
    named = {"module": "keras.layers", "class_name": plain.__name__, "registered_name": None}
    return {**node, **named, "config": config}


def _reader(plain: type) -> type:
    """What stands in files of version 0.1.0 for a layer that was converted."""

    class Converted:
        def get_config(self) -> Config:
            raise NotImplementedError("it is never made; Keras registers only classes that have a config")

        @classmethod
        def from_config(cls, config: Config) -> Any:
            own = {key: value for key, value in config.items() if key != "recipe"}
            return treat(plain.from_config(own), {FLOAT8: get_recipe(config["recipe"])})  # type: ignore[attr-defined]

    return keras.saving.register_keras_serializable("keras_mp", f"Converted{plain.__name__}")(Converted)


for _plain in PLAIN.values():
    _reader(_plain)


@keras.saving.register_keras_serializable("keras_mp", "Float8Children")
class _Float8Children:
    """Stands in files of version 0.1.0 for a layer whose code creates layers that were converted."""

    def get_config(self) -> Config:
        raise NotImplementedError("it is never made; Keras registers only classes that have a config")

    @classmethod
    def from_config(cls, config: Config) -> Any:
        layer = keras.saving.deserialize_keras_object(config["layer"])
        recipes = {tuple(entry["place"]): get_recipe(entry["recipe"]) for entry in config["float8"]}
        return wait_inside(layer, {place: ({FLOAT8: recipe}, "") for place, recipe in recipes.items()})
