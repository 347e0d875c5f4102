"""Recompute in the backward pass what was not kept."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import keras

from keras_mp import backend
from keras_mp.backend.common.keras_private import (
    AutocastScope,
    get_autocast_scope,
    get_keras_mask,
    get_stateless_scope,
    global_state,
    set_keras_mask,
)
from keras_mp.lean.training_step import may_be_differentiated
from keras_mp.rebuild.walk import layers_below
from keras_mp.treatment.treated import Treatment, register_treatments, treat

engine = backend.engine_of(__package__)

_CALL_CONTEXT = "current_call_ctx"


def remat(layer_or_function: Any) -> Any:
    """Recomputes a layer or function in the backward pass.

    Only its arguments are kept. Results and gradients are those without: the recomputation runs in the same autocast
    scope, in the same training phase, and from the state that the forward pass began with, so that dropout draws the
    same mask. What the forward pass assigns (seeds, moving averages, metrics) is assigned once. In graph, eager and
    jitted code.

    Args:
        layer_or_function: a Keras layer or model; or a function of tensors, in any structure, that calls layers and
            operations.

    Returns:
        The layer, changed in place, as `make_lean(remat=...)` changes blocks; `keras_mp.revert` undoes it. For a
        function a function, to be called inside a layer or a loss.

    Raises:
        TypeError: If the argument is neither a layer nor a function.

    References:
        Chen, Xu, Zhang, Guestrin, "Training Deep Nets with Sublinear Memory Cost", 2016 (arXiv:1604.06174).
    """
    if isinstance(layer_or_function, keras.layers.Layer):
        return treat(layer_or_function, {BLOCK: None})
    if not callable(layer_or_function):
        raise TypeError(f"remat takes a Keras layer or a function, got {layer_or_function!r}")

    variables: list[Any] = []

    @functools.wraps(layer_or_function)
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        results, losses = recomputed_call(layer_or_function, [], variables, args, kwargs)
        if losses:
            name = getattr(layer_or_function, "__name__", repr(layer_or_function))
            raise ValueError(
                f"remat({name}): a layer in the function adds {len(losses)} losses, which would belong to no layer "
                "here: use keras_mp.lean.remat(layer) for that layer, or call it outside the function"
            )
        return results

    return recomputed


BLOCK = "remat"


class RematBlock:
    """A layer that keeps its arguments, and recomputes the rest."""

    def call(self, *args: Any, **kwargs: Any) -> Any:
        call = super().call  # type: ignore[misc]
        if not may_be_differentiated(kwargs.get("training")) or _unbuilt(self):
            results = call(*args, **kwargs)
            # What a call has left unbuilt is never used.
            vars(self).setdefault("_unused_layers", set()).update(_unbuilt(self))
            return results
        results, losses = recomputed_call(call, [self], self.variables, args, kwargs)  # type: ignore[list-item, attr-defined]
        add_losses(self, losses)
        return results


def _unbuilt(layer: Any) -> set[int]:
    known = vars(layer).get("_unused_layers", set())
    return {id(inner) for inner in layers_below(layer) if not inner.built} - known


def add_losses(layer: Any, losses: Sequence[Any]) -> None:
    """Adds the losses of a recomputed call to a layer."""
    for loss in losses:
        # The class of a functional model refuses losses, and that of a stabilized layer has widened them already.
        keras.layers.Layer.add_loss(layer, loss)


register_treatments(
    {
        BLOCK: Treatment(
            lambda original, names: RematBlock, undo=lambda layer: vars(layer).pop("_unused_layers", None), order=-1
        )
    }
)


class _UnknownVariables(Exception):
    """Variables were used that are no arguments."""


class _Scope(keras.StatelessScope):
    """Variables as the forward pass began; notes assignments."""

    def __init__(self, variables: tuple[Any, ...], values: Any, outer: Any) -> None:
        super().__init__(collect_losses=True, initialize_variables=False)
        self.state_mapping = {id(variable): value for variable, value in zip(variables, values, strict=True)}
        self.outer = outer
        self.assigned: dict[int, Any] = {}
        self.unknown: dict[int, Any] = {}

    def get_current_value(self, variable: Any) -> Any:
        value = self.state_mapping.get(id(variable))
        if value is None and self.outer is not None:
            value = self.outer.get_current_value(variable)
        if value is None:
            self.unknown[id(variable)] = variable
        return value

    def add_update(self, update: Any) -> None:
        variable, _ = update
        self.get_current_value(variable)
        self.assigned[id(variable)] = variable
        super().add_update(update)


def recomputed_call(
    function: Callable[..., Any], layers: Sequence[keras.layers.Layer], variables: list[Any], args: Any, kwargs: Any
) -> tuple[Any, list[Any]]:
    """Calls a function so that the backward pass recomputes it.

    Args:
        layers: the layers that the function calls, and that may add losses, which are returned beside its results.
        variables: the variables that the function is known to use; others that it uses are added to the list.
    """
    while True:
        call = _PureCall(function, layers, tuple(variables), (args, kwargs))
        try:
            outputs = engine.recompute(call)(*map(backend.as_tensor, call.inputs()))
        except _UnknownVariables as unknown:
            # What is computed from a variable that is no argument would be no part of the gradient, or not be the same
            # again. Nothing has been assigned: begin anew with them as arguments.
            variables += unknown.args[0]
        else:
            return call.unpacked(list(outputs))


class _PureCall:
    """A call as a function of tensors that assigns nothing."""

    def __init__(
        self,
        function: Callable[..., Any],
        layers: Sequence[keras.layers.Layer],
        variables: tuple[Any, ...],
        arguments: tuple[Any, Any],
    ) -> None:
        self._function, self._layers, self._variables, self._arguments = function, layers, variables, arguments
        self._leaves = keras.tree.flatten(arguments)
        self._places = [index for index, leaf in enumerate(self._leaves) if keras.ops.is_tensor(leaf)]
        self._masks = [get_keras_mask(self._leaves[place]) for place in self._places]
        self._stateless, self._autocast = get_stateless_scope(), get_autocast_scope()
        # Layers find in it whether they train; a copy, because layers that are called later change it.
        self._call_context = copy.copy(global_state.get_global_attribute(_CALL_CONTEXT))

    def inputs(self) -> list[Any]:
        """Values of variables, tensors of arguments, and their masks."""
        values = []
        for variable in self._variables:
            value = None if self._stateless is None else self._stateless.get_current_value(variable)
            # Private, because the public value is cast inside an autocast scope.
            values.append(variable._value if value is None else value)
        tensors = [self._leaves[place] for place in self._places]
        return values + tensors + [mask for mask in self._masks if mask is not None]

    @contextmanager
    def _outer_scopes(self) -> Iterator[None]:
        before = global_state.get_global_attribute(_CALL_CONTEXT)
        global_state.set_global_attribute(_CALL_CONTEXT, self._call_context)
        try:
            with nullcontext() if self._autocast is None else AutocastScope(self._autocast.dtype):
                yield
        finally:
            global_state.set_global_attribute(_CALL_CONTEXT, before)

    def __call__(self, *inputs: Any) -> tuple[Any, ...]:
        """Calls the function on `inputs()`, or others of their shapes.

        Returns:
            The results, the masks that some of them have, the new values of the assigned variables, the losses.
        """
        count, leaves = len(self._variables), list(self._leaves)
        remaining = iter(inputs[count:])
        for place in self._places:
            leaves[place] = next(remaining)
        for place, mask in zip(self._places, self._masks, strict=True):
            if mask is not None:
                set_keras_mask(leaves[place], next(remaining))
        args, kwargs = keras.tree.pack_sequence_as(self._arguments, leaves)
        with _Scope(self._variables, inputs[:count], self._stateless) as scope, self._outer_scopes():
            self._results = self._function(*args, **kwargs)
        if scope.unknown:
            raise _UnknownVariables(list(scope.unknown.values()))
        for inner in [inner for layer in self._layers for inner in (layer, *layers_below(layer))]:
            # Keras knows a loss by its id, which another may have once this one is gone.
            inner._loss_ids.difference_update(map(id, scope.losses))
        results = keras.tree.flatten(self._results)
        masks = [get_keras_mask(result) for result in results]
        self._has_mask = [mask is not None for mask in masks]
        self._assigned = list(scope.assigned.values())
        new_values = [scope.state_mapping[id(variable)] for variable in self._assigned]
        given_masks = [mask for mask in masks if mask is not None]
        return tuple(map(backend.as_tensor, [*results, *given_masks, *new_values, *scope.losses]))

    def unpacked(self, outputs: list[Any]) -> tuple[Any, list[Any]]:
        """Assigns the new values; returns results, with masks, and losses."""
        results = [outputs.pop(0) for _ in self._has_mask]
        for result, has_mask in zip(results, self._has_mask, strict=True):
            if has_mask:
                set_keras_mask(result, outputs.pop(0))
        for variable in self._assigned:
            variable.assign(outputs.pop(0))
        return keras.tree.pack_sequence_as(self._results, results), outputs
