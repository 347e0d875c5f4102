"""The layers, operations and variables of a model; what a rebuild is told, and how it fails."""

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
    """Whether a model has its weights; one that only trains models, and has no `call()`, is built when they are."""
    parts = children_of(model)
    return model.built or (has_no_call(model) and bool(parts) and all(part.built for part in parts))


def has_no_call(model: keras.Layer) -> bool:
    """Whether a model has no `call()`, because its `train_step()` calls the models in it, as that of a GAN does."""
    return isinstance(model, keras.Model) and original_class(model).call is keras.Model.call


def layers_by_path(model: keras.Layer) -> dict[str, keras.Layer]:
    """Every layer below `model`, depth first, by the `/`-joined names that lead to it; a shared layer appears once."""
    layers: dict[str, keras.Layer] = {}
    seen: set[int] = set()

    def visit(layer: keras.Layer, path: str) -> None:
        for child in children_of(layer):
            if id(child) not in seen:
                seen.add(id(child))
                child_path = f"{path}/{child.name}" if path else child.name
                layers[child_path] = child
                visit(child, child_path)

    visit(model, "")
    return layers


def operations_of(model: keras.Layer) -> list[keras.Operation]:
    """The operations that are no layers, such as keras.ops.softmax, in the graphs of a model and its submodels."""
    operations = [operation for layer in with_self(model) for operation in getattr(layer, "operations", [])]
    return [operation for operation in operations if not isinstance(operation, keras.layers.Layer)]


def with_self(model: keras.Layer) -> list[keras.Layer]:
    return [model, *layers_by_path(model).values()]


def compute_dtypes(model: keras.Layer) -> set[str]:
    """The dtypes that the layers of a model, and the model itself, compute in."""
    return {layer.compute_dtype for layer in with_self(model)}


def children_of(layer: keras.Operation) -> list[keras.Layer]:
    """The layers directly inside a layer; an operation has none."""
    if not isinstance(layer, keras.layers.Layer):
        return []
    # Private: composite layers have no public list of their sublayers, as models have in `Model.layers`, which is this.
    return layer._flatten_layers(include_self=False, recursive=False)


def graph_of(model: keras.Layer) -> Any:
    """The functional model that holds the graph of a functional or sequential model; None of any other layer."""
    # Private: a Sequential keeps its graph there, and a graph gives its calls there in the order of computation.
    graph = getattr(model, "_functional", None) if isinstance(model, keras.Sequential) else model
    return graph if hasattr(graph, "_nodes_by_depth") else None


def calls_of(graph: Any) -> list[Any]:
    """The nodes of a functional model in the order in which it computes them, without its inputs."""
    by_depth = graph._nodes_by_depth
    return [node for depth in sorted(by_depth, reverse=True) for node in by_depth[depth] if not node.is_input]


def layers_below(layer: keras.Layer) -> Iterator[keras.Layer]:
    """Yields every layer below another, depth first; a shared one as often as it is reached."""
    for child in children_of(layer):
        yield child
        yield from layers_below(child)


def inputs_of(model: keras.Model) -> Any:
    """The structure of a functional or sequential model's inputs, as KerasTensors; None where they are not known."""
    if not getattr(model, "inputs", None):
        return None
    # Private, because `Model.inputs` is flat, and a model that takes a dict must be served with one.
    return getattr(model, "_inputs_struct", model.inputs[0])


def own_variables(layer: keras.Layer) -> list[keras.Variable]:
    """The layer's variables, seed state included, without those of its sublayers."""
    inner = {id(variable) for child in children_of(layer) for variable in child.variables}
    return [variable for variable in layer.variables if id(variable) not in inner]


def map_shapes(function: Any, shapes: Any) -> Any:
    """Applies a function to each shape in what Keras records of the inputs that a layer was built for."""
    if isinstance(shapes, dict):
        return {key: map_shapes(function, shape) for key, shape in shapes.items()}
    if all(size is None or isinstance(size, int) for size in shapes):
        return function(shapes)
    return type(shapes)(map_shapes(function, shape) for shape in shapes)
