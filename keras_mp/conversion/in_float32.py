"""A model that computes in float32 for a while, in place: what its own precision is judged against."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import keras

from keras_mp.fp8.convert import without_float8
from keras_mp.fp8.layers import Float8Layer
from keras_mp.precision.policy import restored_policy
from keras_mp.rebuild import widen
from keras_mp.rebuild.notes import notes_of
from keras_mp.rebuild.quantized_policies import (
    keep_statistics_as_computed,
    settle_policies,
    to_compute_in_float32,
)
from keras_mp.rebuild.walk import compute_dtypes, graph_of, with_self
from keras_mp.stability.sensitive import LOW_PRECISION


def computes_in_float32(model: keras.Model) -> bool:
    """Whether every layer of a model computes in float32."""
    return compute_dtypes(model) == {"float32"}


@contextmanager
def in_float32(model: keras.Model) -> Iterator[None]:
    """Lets a model compute in float32 throughout; afterwards it is what it was, bit for bit.

    Dtype policies, what treated layers multiply in, 16-bit weights, and the dtypes that functional graphs and
    Sequential models cast their inputs to. FP8 layers compute as plain ones. Steps that were traced before are not
    affected.
    """
    layers = with_self(model)
    plain = not any(isinstance(layer, Float8Layer) or _low_inputs(layer) for layer in layers)
    with restored_policy("float32"), ExitStack() as after:  # which layers take that a call makes
        if computes_in_float32(model) and plain:
            yield
            return
        after.enter_context(without_float8(model))
        for layer, policies in settle_policies(model):
            after.callback(setattr, layer, "_dtype_policy", policies)
        for layer in layers:
            after.enter_context(_computing_in_float32(layer))
        for variable in model.variables:
            if keras.backend.standardize_dtype(variable.dtype) in LOW_PRECISION:
                # Private, as in `widen`.
                after.callback(vars(variable).update, {"_dtype": variable._dtype, "_value": variable._value})
                widen(variable)
        yield


@contextmanager
def _computing_in_float32(layer: Any) -> Iterator[None]:
    notes, policy = notes_of(layer), layer._dtype_policy
    precision = "" if notes is None else notes.precision
    inputs = _low_inputs(layer)
    dtypes = [x._dtype for x in inputs]  # private, as neither has a public way to become wider
    try:
        to_compute_in_float32(layer)
        if notes is not None:
            notes.precision = "float32"
        for x in inputs:
            x._dtype = "float32"
        keep_statistics_as_computed(layer)
        yield
    finally:
        layer._dtype_policy = policy
        if notes is not None:
            notes.precision = precision
        for x, dtype in zip(inputs, dtypes, strict=True):
            x._dtype = dtype
        keep_statistics_as_computed(layer)


def _low_inputs(layer: Any) -> list[Any]:
    """The inputs of a layer's graph, or the layer itself where it is an InputLayer, that are cast to 16 bits."""
    inputs = [layer] if isinstance(layer, keras.layers.InputLayer) else getattr(graph_of(layer), "inputs", [])
    return [x for x in inputs if x.dtype in LOW_PRECISION]
