"""Layers, operations and variables of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import keras

from keras_mp.rebuild.notes import original_class

Config = dict[str, Any]
Rule = Callable[[Config, Any], Config]
LOW_PRECISION = ("float16", "bfloat16")


class RebuildError(ValueError):
    """A model that cannot be rebuilt, by the layer named."""


def check_is_model(model: Any) -> None:
    """Refuses what is no Keras model.

    Raises:
        TypeError: it is none; the message names its type.
    """
    if not isinstance(model, keras.Model):
        kind = f"the class {model.__name__}" if isinstance(model, type) else f"of type {type(model).__name__}"
        remedy = ": wrap it in keras.Sequential([...])" if isinstance(model, keras.Layer) else ""
        raise TypeError(f"model must be a keras.Model, and is {kind}{remedy}")


def is_built(model: keras.Layer) -> bool:
    """Whether a model has its weights; without `call()`, its parts."""
    parts = children_of(model)
    return model.built or (has_no_call(model) and bool(parts) and all(part.built for part in parts))


def has_no_call(model: keras.Layer) -> bool:
    """Whether a model has no `call()`, like a GAN."""
    return isinstance(model, keras.Model) and original_class(model).call is keras.Model.call


class Walk:
    """One walk over a model: what is in it, and where.

    Changes in place leave its structure as it is, so that one walk serves all of them.

    Attributes:
        model: the model, or a layer.
        every: the model and the layers below it, depth first and once.
        layers: the layers below the model, by path.
        children: the layers directly inside the model and each of its layers, by the id of that.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.every: list[Any] = [model]
        self.layers: dict[str, Any] = {}
        self.children: dict[int, list[Any]] = {}
        self._visit(model, "")

    def _visit(self, layer: Any, path: str) -> None:
        self.children[id(layer)] = children_of(layer)
        for child in self.children[id(layer)]:
            if id(child) not in self.children:
                self.every.append(child)
                self.layers[path + child.name] = child
                self._visit(child, f"{path}{child.name}/")

    @property
    def operations(self) -> list[Any]:
        """Operations of the model's graphs, such as softmax."""
        inside = [operation for layer in self.every for operation in getattr(layer, "operations", [])]
        return [operation for operation in inside if not isinstance(operation, keras.layers.Layer)]

    def below(self, layer: Any) -> Iterator[Any]:
        """Yields layers below another, as often as they are reached."""
        for child in self.children[id(layer)]:
            yield child
            yield from self.below(child)


def layers_by_path(model: keras.Layer) -> dict[str, keras.Layer]:
    """Layers below a model, depth first and once, by path."""
    return Walk(model).layers


def operations_of(model: keras.Layer) -> list[keras.Operation]:
    """Operations of a model's graphs, such as softmax."""
    return Walk(model).operations


def with_self(model: keras.Layer) -> list[keras.Layer]:
    return Walk(model).every


def compute_dtypes(model: keras.Layer) -> set[str]:
    """Dtypes that a model and its layers compute in."""
    return {layer.compute_dtype for layer in with_self(model)}


def children_of(layer: keras.Operation) -> list[keras.Layer]:
    """The layers directly inside a layer; an operation has none."""
    if not isinstance(layer, keras.layers.Layer):
        return []
    # Private: composite layers have no public list of their sublayers, as models have in `Model.layers`, which is this.
    return layer._flatten_layers(include_self=False, recursive=False)


def graph_of(model: keras.Layer) -> Any:
    """Functional model with a model's graph, or None."""
    # Private: a Sequential keeps its graph there, and a graph gives its calls there in the order of computation.
    graph = getattr(model, "_functional", None) if isinstance(model, keras.Sequential) else model
    return graph if hasattr(graph, "_nodes_by_depth") else None


def calls_of(graph: Any) -> list[Any]:
    """Nodes of a functional model in order, without its inputs."""
    by_depth = graph._nodes_by_depth
    return [node for depth in sorted(by_depth, reverse=True) for node in by_depth[depth] if not node.is_input]


def layers_below(layer: keras.Layer) -> Iterator[keras.Layer]:
    """Yields layers below another, as often as they are reached."""
    yield from Walk(layer).below(layer)


def inputs_of(model: keras.Model) -> Any:
    """Structure of a model's inputs, as KerasTensors, or None."""
    if not getattr(model, "inputs", None):
        return None
    # Private, because `Model.inputs` is flat, and a model that takes a dict must be served with one.
    return getattr(model, "_inputs_struct", model.inputs[0])


def own_variables(layer: keras.Layer) -> list[keras.Variable]:
    """Variables of a layer, seeds included, without its sublayers'."""
    inner = {id(variable) for child in children_of(layer) for variable in child.variables}
    return [variable for variable in layer.variables if id(variable) not in inner]


def map_shapes(function: Any, shapes: Any) -> Any:
    """Applies a function to each shape that Keras recorded."""
    if isinstance(shapes, dict):
        return {key: map_shapes(function, shape) for key, shape in shapes.items()}
    if all(size is None or isinstance(size, int) for size in shapes):
        return function(shapes)
    return type(shapes)(map_shapes(function, shape) for shape in shapes)
