"""Layers, operations and variables of a model, and the kit's notes on a layer that it has changed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np

from keras_mp import backend

Config = dict[str, Any]
Rule = Callable[[Config, Any], Config]
LOW_PRECISION = ("float16", "bfloat16")
# Keras and this kit: what is defined elsewhere is its user's, or another library's.
LIBRARIES = ("keras", "keras_mp")
# The way from a layer to one inside it: at each level the index among the sublayers, or "o" and the index among the
# operations of a graph that are no layers.
Place = tuple[int | str, ...]
_NAME = "_keras_mp"
# The treatments of a layer that `keras_mp.convert` changed: rooms ask for them that know no more of it. The options of
# one are its scalings, those of the other Keras's config of the quantization that the layer trains for, serialized.
FLOAT8, QAT = "fp8", "qat"


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
    """Walk over a model, once: what is in it, where.

    Changes in place leave its structure as it is, so that one walk serves all of them.
    """

    def __init__(self, model: Any) -> None:
        self.model = model  # or a layer
        self.every: list[Any] = [model]  # and the layers below it, depth first and once
        self.layers: dict[str, Any] = {}  # the layers below it, by path
        self.children: dict[int, list[Any]] = {}  # the layers directly inside each of `every`, by the id of that
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


def compute_dtypes(model: keras.Layer) -> set[str]:
    """Dtypes that a model and its layers compute in."""
    return {layer.compute_dtype for layer in Walk(model).every}


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


def package_of(thing: Any) -> str:
    """Names a class's or function's package, such as "keras"."""
    return (thing.__module__ or "").partition(".")[0]


# What is noted on a layer.


@dataclasses.dataclass
class Notes:
    """The notes on one layer."""

    treatments: dict[str, Any]  # the options of each treatment that is applied to the layer, by the treatment's name
    precision: str  # dtype that it computes in without any
    policy: Any = None  # dtype policy of the layer without any, where its weights are of 16 bits; else None
    # the treatments of sublayers that the layer's own code has yet to create
    waiting: dict[Place, tuple[dict[str, Any], str]] = dataclasses.field(default_factory=dict)
    # the things that a treatment keeps from one step to the next, by its name
    kept: dict[str, Any] = dataclasses.field(default_factory=dict)


class Changed:
    """Marks the class of a layer that has treatments."""

    _original: type | None = None


def notes_of(layer: Any) -> Notes | None:
    """Notes on a layer or operation, or None."""
    return vars(layer).get(_NAME)


def existing_notes(layer: Any) -> Notes:
    """Returns the notes on a layer that has some."""
    notes = notes_of(layer)
    assert notes is not None, layer  # a layer has its notes before it is treated, and until it has no treatment
    return notes


def write_notes(layer: Any, notes: Notes | None) -> None:
    """Writes notes past Keras's tracking; None takes them away."""
    if notes is None:
        vars(layer).pop(_NAME, None)
    else:
        vars(layer)[_NAME] = notes


def treatments_of(layer: Any) -> dict[str, Any]:
    """Treatments of a layer by name, with their options."""
    notes = notes_of(layer)
    return {} if notes is None else notes.treatments


def quantization_trained_for(layer: Any) -> Any:
    """Keras's config of the quantization trained for, or None."""
    options = treatments_of(layer).get(QAT) if getattr(layer, "quantization_mode", None) is None else None
    return None if options is None else keras.saving.deserialize_keras_object(options)


def original_class(layer: Any) -> Any:
    """The class of a layer without its treatments."""
    return isinstance(layer, Changed) and layer._original or type(layer)


def precision_of_layer(layer: Any) -> str:
    """Dtype that a layer computes in without treatments."""
    notes = notes_of(layer)
    if notes is not None:
        return notes.precision
    return layer.compute_dtype if isinstance(layer, keras.layers.Layer) else "float32"


# Values of variables.


def is_overwritten(variable: keras.Variable) -> bool:
    """Tells whether a variable's "gradient" is its next value."""
    # Keras marks scales and amax histories so; they mean nothing outside the FP8 layer that made them.
    return bool(getattr(variable, "overwrite_with_gradient", False))


def copy_value(old: keras.Variable, new: keras.Variable) -> None:
    if has_no_value(old):
        return
    # A real copy: on JAX assigning would share the buffer, which training one of the two models donates and deletes.
    # By way of the host, because the two may lie on different devices.
    new.assign(value_on_host(old))


def is_narrow(variable: Any) -> bool:
    """Tells whether a weight is stored in bfloat16."""
    return bool(keras.backend.standardize_dtype(variable.dtype) == "bfloat16")


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
