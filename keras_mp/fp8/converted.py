"""The layers that `convert` makes: they keep their class's name, and those inside others are converted when built."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import keras

from keras_mp.fp8.convolution_layer import Int8Conv2D
from keras_mp.fp8.layers import Config, Float8Dense, Float8EinsumDense, Float8Layer
from keras_mp.fp8.recipes import get_recipe
from keras_mp.fp8.scaling_recipe import Recipe
from keras_mp.rebuild import children_of, original_config
from keras_mp.rebuild.treated import REGISTERED_NAMES, original_class, treat, treatments_of

CHILDREN = "keras_mp>Float8Children"
# The order of a child among its parent's, from an outer layer inwards.
Place = tuple[int, ...]


# Keras files weights by the class's name, so these load from the plain model's file, and the other way round.
@keras.saving.register_keras_serializable("keras_mp", "ConvertedDense")
class Dense(Float8Dense):
    """A Dense layer that `convert` made an FP8 one."""


@keras.saving.register_keras_serializable("keras_mp", "ConvertedEinsumDense")
class EinsumDense(Float8EinsumDense):
    """An EinsumDense layer that `convert` made an FP8 one."""


@keras.saving.register_keras_serializable("keras_mp", "ConvertedConv2D")
class Conv2D(Int8Conv2D):
    """A Conv2D layer that `convert` made an INT8 one."""


CONVERTED: dict[type, type] = {
    keras.layers.Dense: Dense,
    keras.layers.EinsumDense: EinsumDense,
    keras.layers.Conv2D: Conv2D,
}
_PLAIN = {
    keras.saving.get_registered_name(layer_class): plain
    for layer_class, plain in [
        (Dense, keras.layers.Dense),
        (EinsumDense, keras.layers.EinsumDense),
        (Float8Dense, keras.layers.Dense),
        (Float8EinsumDense, keras.layers.EinsumDense),
        (Conv2D, keras.layers.Conv2D),
        (Int8Conv2D, keras.layers.Conv2D),
    ]
}
# What Keras writes around a layer's config, not into it.
_OUTSIDE = ("shared_object_id", "inbound_nodes", "name")


class Float8Children:
    """A layer some of whose sublayers, which its own code creates and no config shows, are FP8 layers.

    Its config holds the original layer's config, and the place and the scaling recipe of each such sublayer.
    """

    _original: type
    _float8: dict[Place, Recipe]

    def build(self, *args: Any, **kwargs: Any) -> None:
        super().build(*args, **kwargs)  # type: ignore[misc]
        self.convert_children()  # before weights are loaded into them

    def call(self, *args: Any, **kwargs: Any) -> Any:
        self.convert_children()
        return super().call(*args, **kwargs)  # type: ignore[misc]

    def convert_children(self) -> None:
        """Converts those sublayers that exist by now."""
        for place, layer in _places(self):
            if place in self._float8 and not isinstance(layer, Float8Layer):
                convert_in_place(layer, self._float8[place])

    def get_config(self) -> Config:
        layer = original_config(self, self._original)
        return {"name": self.name, "layer": layer, "float8": _serialized(self._float8)}  # type: ignore[attr-defined]

    @classmethod
    def from_config(cls, config: Config) -> Any:
        layer = keras.saving.deserialize_keras_object(config["layer"])
        places = {tuple(entry["place"]): get_recipe(entry["recipe"]) for entry in config["float8"]}
        layer.__class__ = _with_children(type(layer))  # type: ignore[arg-type]
        object.__setattr__(layer, "_float8", places)  # a value, which Keras need not track
        layer.convert_children()
        return layer


# One name in saved models for whatever class was extended: Float8Children.from_config reads the class from the config.
_register = keras.saving.register_keras_serializable("keras_mp", "Float8Children")
_register(Float8Children)


@functools.cache
def _with_children(original: type) -> type:
    extended = type(original.__name__, (Float8Children, original), {"_original": original, "__module__": __name__})
    _register(extended)
    _register(Float8Children)
    return extended


def convert_in_place(layer: keras.layers.Layer, recipe: Recipe) -> None:
    """Makes a live layer an FP8 or INT8 one; it must be part of no compiled function yet."""
    treatments, precision = treatments_of(layer), getattr(layer, "_precision", "")
    layer.__class__ = CONVERTED[original_class(layer)]
    layer._recipe = recipe
    if layer.built:
        layer.build_history()
    if treatments:
        treat(layer, treatments, precision)


def places_below(layer: keras.layers.Layer, wanted: dict[int, Recipe]) -> dict[Place, Recipe]:
    """Finds where the sublayers with the wanted ids stand."""
    return {place: wanted[id(sublayer)] for place, sublayer in _places(layer) if id(sublayer) in wanted}


def _places(layer: keras.layers.Layer) -> Iterator[tuple[Place, Any]]:
    """Every layer below another, depth first, each once. Places stay valid while more sublayers are created."""
    seen: set[int] = set()

    def visit(layer: keras.layers.Layer, place: Place) -> Iterator[tuple[Place, Any]]:
        for index, child in enumerate(children_of(layer)):
            if id(child) not in seen:
                seen.add(id(child))
                yield (*place, index), child
                yield from visit(child, (*place, index))

    return visit(layer, ())


def converted_node(node: Config, recipe: Recipe | None, below: dict[Place, Recipe]) -> Config:
    """Rewrites the config of a layer.

    Args:
        node: as Keras serializes a layer.
        recipe: the scaling recipe of the layer itself, in FP8 already or not; None leaves it as it is.
        below: of the sublayers that no config shows.

    Returns:
        The config of the converted layer.
    """
    config = node["config"]
    if node["registered_name"] in REGISTERED_NAMES:
        return {**node, "config": {**config, "layer": converted_node(config["layer"], recipe, below)}}
    if recipe is not None:
        name = {} if node["registered_name"] in _PLAIN else _named(CONVERTED[getattr(keras.layers, node["class_name"])])
        node = {**node, **name, "config": {**config, "recipe": keras.saving.serialize_keras_object(recipe)}}
    if below and node["registered_name"] == CHILDREN:
        node = {**node, "config": {**config, "float8": [*config["float8"], *_serialized(below)]}}
    elif below:
        inner = {key: value for key, value in node.items() if key not in _OUTSIDE}
        name = {"module": __name__, "class_name": node["class_name"], "registered_name": CHILDREN}
        outer = {"name": config.get("name"), "layer": inner, "float8": _serialized(below)}
        node = {**name, "config": outer, **{key: node[key] for key in _OUTSIDE if key in node}}
    return node


def plain_node(node: Config) -> Config:
    """Rewrites the config of an FP8 layer to that of the plain layer; any other dict is returned as it is."""
    name = node.get("registered_name")
    if name == CHILDREN and "layer" in node["config"]:
        return {**node["config"]["layer"], **{key: node[key] for key in _OUTSIDE if key in node}}
    if name in _PLAIN:
        config = {key: value for key, value in node["config"].items() if key != "recipe"}
        return {**node, **_named(_PLAIN[name]), "config": config}
    return node


def _serialized(places: dict[Place, Recipe]) -> list[Config]:
    return [
        {"place": list(place), "recipe": keras.saving.serialize_keras_object(recipe)}
        for place, recipe in places.items()
    ]


def _named(cls: type) -> Config:
    if cls.__module__.startswith("keras.src."):
        return {"module": "keras.layers", "class_name": cls.__name__, "registered_name": None}
    registered = keras.saving.get_registered_name(cls)
    return {"module": cls.__module__, "class_name": cls.__name__, "registered_name": registered}
