"""Layers that compute a model's outputs, by graph or trace."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import keras

from keras_mp.backend.common.keras_patches import wrapped_methods
from keras_mp.backend.common.keras_private import compute_output_spec
from keras_mp.rebuild.walk import LOW_PRECISION, Walk, graph_of, has_no_call, map_shapes, original_class

# Layers whose softmax is a sublayer.
ATTENTION_LAYERS = (keras.layers.MultiHeadAttention, keras.layers.GroupQueryAttention)
NORMALIZATIONS = (
    keras.layers.BatchNormalization,
    keras.layers.GroupNormalization,
    keras.layers.LayerNormalization,
    keras.layers.Normalization,
    keras.layers.RMSNormalization,
    keras.layers.SpectralNormalization,
    keras.layers.UnitNormalization,
)
# Layers between the last product and the model's output that do not change which product that is.
PASSING_ON = (
    keras.layers.Activation,
    keras.layers.Dropout,
    keras.layers.Flatten,
    keras.layers.Identity,
    keras.layers.Permute,
    keras.layers.Reshape,
    keras.layers.Softmax,
)


def calls_steps(layer: keras.Operation) -> bool:
    """Whether a TimeDistributed layer calls another in its own dtype."""
    steps = keras.layers.TimeDistributed
    return isinstance(layer, steps) and original_class(layer).call is steps.call


def output_layers(walk: Walk) -> dict[int, str]:
    """Finds the layers that compute the model's outputs, by id.

    Each has a word for what it computes. Of a subclassed model its call is traced: a layer counts where the model
    returns that layer's very result, and the model itself where its own code computes an output in 16 bits, or cannot
    be traced. Those of its parts where it only trains models, as a GAN does its generator and its discriminator, and
    has no `call()`.
    """
    model = walk.model
    reasons: dict[int, str] = {}

    def trace(tensor: Any) -> None:
        # Private, as there is no public way from a symbolic tensor to the layer that made it.
        operation, node_index, _ = tensor._keras_history
        if isinstance(operation, keras.Model) and getattr(operation, "outputs", None):
            for output in operation.outputs:
                trace(output)
        elif isinstance(operation, keras.layers.Layer) and not isinstance(operation, keras.layers.InputLayer):
            computes = operation
            while calls_steps(computes):
                computes = computes.layer
            if isinstance(computes, keras.Model) and getattr(computes, "outputs", None):
                for output in computes.outputs:
                    trace(output)
                return
            reasons.update(_computing(computes))
            if isinstance(computes, PASSING_ON):
                for source in operation._inbound_nodes[node_index].input_tensors:
                    trace(source)

    trained_alone = has_no_call(model)
    for part in walk.children[id(model)] if trained_alone else [model]:
        for output in keras.tree.flatten(getattr(part, "outputs", None) or []):
            trace(output)
    if not reasons and not trained_alone and graph_of(model) is None:
        return _returned_by_call(walk)
    return reasons or {id(model): "its output"}


def _returned_by_call(walk: Walk) -> dict[int, str]:
    """The same of a subclassed model."""
    model = walk.model
    traced = trace_layers(model, [layer for _, layer in reached(walk) if layer is not model])
    if traced is None:
        return {id(model): "its output"}
    reasons: dict[int, str] = {}
    tensors = keras.tree.flatten(traced.outputs)
    low = [x for x in tensors if keras.backend.standardize_dtype(x.dtype) in LOW_PRECISION]
    if not all(map(traced.makers, low)):
        reasons[id(model)] = "its output"
    for tensor in tensors:
        for place, call in enumerate(traced.makers(tensor)):
            computes = call.layer
            while calls_steps(computes):
                computes = computes.layer
            if place == 0 or not walk.children[id(computes)]:  # a layer around that which made it computes nothing more
                reasons |= _computing(computes)
            if isinstance(computes, PASSING_ON) and call.inputs is not tensor:
                tensors.append(call.inputs)
    return reasons


def _computing(layer: Any) -> dict[int, str]:
    """A layer that computes an output, and its activation."""
    activation = getattr(layer, "activation", None)
    layers = [layer, activation] if isinstance(activation, keras.layers.Layer) else [layer]
    return {id(one): "the model's output" for one in layers}


def reached(walk: Walk) -> Iterator[tuple[str, Any]]:
    """Walks a model by path, without what is inside attention."""
    # Its softmax is a sublayer, which the treatment of the scores leaves unused.
    seen: set[int] = set()

    def visit(layer: Any, path: str) -> Iterator[tuple[str, Any]]:
        if id(layer) not in seen:
            seen.add(id(layer))
            yield path, layer
            for child in () if isinstance(layer, ATTENTION_LAYERS) else walk.children[id(layer)]:
                yield from visit(child, f"{path}/{child.name}")

    return visit(walk.model, walk.model.name)


class TracedCall(NamedTuple):
    """A call of a layer."""

    layer: keras.layers.Layer  # the layer that was called
    inputs: Any  # the first argument, as the layer was given it
    outputs: Any  # the result, as the layer returned it


class Traced(NamedTuple):
    """A call of a model."""

    outputs: Any  # the structure of tensors that the model returned; of each only identity, shape and dtype are of use
    calls: list[TracedCall]  # the calls of its layers, one inside another first

    def makers(self, tensor: Any) -> list[TracedCall]:
        """Calls that returned this very tensor, its maker first."""
        return [call for call in self.calls if call.outputs is tensor]


def trace_layers(model: keras.Model, layers: Iterable[keras.layers.Layer]) -> Traced | None:
    """Traces calls of a model's layers by shapes, if possible."""
    watched = [("", layer) for layer in {id(layer): layer for layer in layers}.values()]
    for dtype in ("float32", "int32"):  # Keras does not record it
        try:
            return _traced(model, watched, dtype)
        except Exception:  # whatever a stranger's call raises
            continue
    return None


def _traced(model: keras.Model, watched: list[tuple[str, Any]], dtype: str) -> Traced:
    shapes, calls, returned = model.get_build_config() or {}, [], []

    def noting(path: str, layer: Any, name: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            outputs = function(*args, **kwargs)
            calls.append(TracedCall(layer, args[0] if args else None, outputs))
            return outputs

        return call

    def run(*args: Any, **kwargs: Any) -> Any:
        returned.append(model(*args, **kwargs))
        return returned[0]

    def tensor(shape: Any) -> Any:
        return keras.KerasTensor(tuple(shape), dtype)

    arguments, named = [], {}
    if "input_shape" in shapes:
        arguments = [map_shapes(tensor, shapes["input_shape"])]
    else:
        given = shapes["shapes_dict"]
        named = {name.removesuffix("_shape"): map_shapes(tensor, shape) for name, shape in given.items()}
    with wrapped_methods(watched, ["call"], noting):
        compute_output_spec(run, *arguments, **named)
    return Traced(returned[0], calls)
