"""Layers that compute a model's outputs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras

from keras_mp.rebuild.notes import original_class
from keras_mp.rebuild.traced_call import trace_layers
from keras_mp.rebuild.walk import LOW_PRECISION, children_of, graph_of, has_no_call

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
    """Whether a layer ignores the dtype of the layer within.

    As Keras's TimeDistributed does: it calls the `call()` of the layer in it, and not the layer, so that inputs and
    weights come in its own dtype.
    """
    steps = keras.layers.TimeDistributed
    return isinstance(layer, steps) and original_class(layer).call is steps.call


def output_layers(model: keras.Model) -> dict[int, str]:
    """Finds the layers that compute the model's outputs, by id.

    Each has a word for what it computes. Of a subclassed model its call is traced: a layer counts where the model
    returns that layer's very result, and the model itself where its own code computes an output in 16 bits, or cannot
    be traced. Those of its parts where it only trains models, as a GAN does its generator and its discriminator, and
    has no `call()`.
    """
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

    for output in keras.tree.flatten(getattr(model, "outputs", None) or []):
        trace(output)
    if has_no_call(model):
        for part in children_of(model):
            reasons |= output_layers(part) if getattr(part, "outputs", None) else {}
    elif not reasons and graph_of(model) is None:
        return _returned_by_call(model)
    return reasons or {id(model): "its output"}


def _returned_by_call(model: keras.Model) -> dict[int, str]:
    """The same of a subclassed model."""
    traced = trace_layers(model, _reached(model))
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
            if place == 0 or not children_of(computes):  # a layer around that which made it computes nothing more
                reasons |= _computing(computes)
            if isinstance(computes, PASSING_ON) and call.inputs is not tensor:
                tensors.append(call.inputs)
    return reasons


def _computing(layer: Any) -> dict[int, str]:
    """A layer that computes an output, and the layer that it may have as its activation."""
    activation = getattr(layer, "activation", None)
    layers = [layer, activation] if isinstance(activation, keras.layers.Layer) else [layer]
    return {id(one): "the model's output" for one in layers}


def _reached(layer: keras.Operation) -> Iterator[keras.Layer]:
    """The layers below another that `find` looks at."""
    for child in children_of(layer):
        yield child
        if not isinstance(child, ATTENTION_LAYERS):
            yield from _reached(child)
