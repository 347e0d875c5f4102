"""A call of a subclassed model, traced without numbers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import keras

from keras_mp.backend.common.calls import wrapped_methods
from keras_mp.backend.common.keras_private import compute_output_spec
from keras_mp.rebuild.walk import map_shapes


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
    """Traces a built model by its shapes, noting layers' calls.

    Returns:
        None where its code cannot be traced with inputs of one dtype, or its shapes are not known.
    """
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
