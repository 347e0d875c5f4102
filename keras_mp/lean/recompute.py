"""Recompute in the backward pass what the forward pass would have kept."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import keras

from keras_mp import backend
from keras_mp.backend.common.keras_private import (
    AutocastScope,
    compute_output_spec,
    get_autocast_scope,
    get_keras_mask,
    get_stateless_scope,
    global_state,
    set_keras_mask,
)
from keras_mp.lean.training_step import may_be_differentiated
from keras_mp.rebuild.walk import layers_below

engine = backend.engine_of(__package__)

_CALL_CONTEXT = "current_call_ctx"


def remat(layer_or_function: Any) -> Any:
    """Recomputes a layer or function in the backward pass.

    Only its arguments are kept. Results and gradients are those without: the recomputation runs in the same autocast
    scope, in the same training phase, and from the state that the forward pass began with, so that dropout draws the
    same mask. What the forward pass assigns (seeds, moving averages, metrics) is assigned once. In graph, eager and
    jitted code.

    Args:
        layer_or_function: a Keras layer or model, whose variables are then those of the result; or a function of
            tensors, in any structure, that calls layers and operations.

    Returns:
        For a layer a `Remat`, which is a layer, saved and loaded as others; in inference it calls the layer as it is.
        For a function a function, to be called inside a layer or a loss.

    Raises:
        TypeError: If the argument is neither a layer nor a function.

    References:
        Chen, Xu, Zhang, Guestrin, "Training Deep Nets with Sublinear Memory Cost", 2016 (arXiv:1604.06174).
    """
    if isinstance(layer_or_function, keras.layers.Layer):
        return Remat(layer_or_function)
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


@keras.saving.register_keras_serializable("keras_mp")
class Remat(keras.layers.Wrapper):
    """A layer whose inside is recomputed in the backward pass; `keras_mp.lean.remat` makes it.

    Args:
        **arguments: arguments of `keras.layers.Layer`; the name and the dtype are the layer's by default.

    Raises:
        ValueError: no layer.
    """

    def __init__(self, layer: keras.layers.Layer, **arguments: Any) -> None:
        if isinstance(layer, keras.layers.Layer):
            arguments = {"name": f"{layer.name}_remat", "dtype": layer.dtype_policy} | arguments
        super().__init__(layer, **arguments)
        self.supports_masking = True
        # The layer casts its inputs by its own rule.
        self._convert_input_args = False
        self._allow_non_tensor_positional_args = True

    def build(self, *shapes: Any, **more_shapes: Any) -> None:
        """Leaves building to the first call, which knows all arguments."""

    def call(self, inputs: Any, *args: Any, training: bool | None = None, **kwargs: Any) -> Any:
        if not may_be_differentiated(training):
            return self.layer(inputs, *args, **kwargs)
        if not self.layer.built:
            compute_output_spec(self.layer, inputs, *args, **kwargs)
        results, losses = recomputed_call(self.layer, [self.layer], self.layer.variables, (inputs, *args), kwargs)
        for loss in losses:
            self.add_loss(loss)
        return results

    def compute_output_spec(self, *args: Any, training: bool | None = None, **kwargs: Any) -> Any:
        spec = self.layer(*args, **kwargs)
        return keras.tree.map_structure(lambda x: keras.KerasTensor(x.shape, x.dtype), spec)

    def compute_output_shape(self, *args: Any, **kwargs: Any) -> Any:
        return self.layer.compute_output_shape(*args, **kwargs)

    def compute_mask(self, inputs: Any, previous_mask: Any) -> Any:
        if not self.layer.supports_masking:
            return keras.tree.map_structure(lambda _: None, inputs)
        return self.layer.compute_mask(inputs, previous_mask)


class _UnknownVariables(Exception):
    """Variables were used that are no arguments of the recomputed function."""


class _Scope(keras.StatelessScope):
    """Variables as they were when the forward pass began; what is assigned is noted, not done."""

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
        layers: the layers that the function calls, and that may add losses.
        variables: the variables that the function is known to use; others that it uses are added to the list.

    Returns:
        The results, and the losses that layers added.
    """
    arguments, scopes = _Arguments(args, kwargs), _Scopes.current()
    while True:
        call = _PureCall(function, layers, tuple(variables), arguments, scopes)
        inputs = [scopes.value_of(variable) for variable in variables] + arguments.tensors()
        try:
            outputs = engine.recompute(call)(*map(backend.as_tensor, inputs))
        except _UnknownVariables as unknown:
            # What is computed from a variable that is no argument would be no part of the gradient, or not be the same
            # again. Nothing has been assigned: begin anew with them as arguments.
            variables += unknown.args[0]
        else:
            return call.unpacked(list(outputs))


class _Arguments:
    """The arguments of a call, of which tensors anywhere in them can be replaced."""

    def __init__(self, args: Any, kwargs: Any) -> None:
        self._structure = (args, kwargs)
        self._leaves = keras.tree.flatten(self._structure)
        self._places = [index for index, leaf in enumerate(self._leaves) if keras.ops.is_tensor(leaf)]
        self._masks = [get_keras_mask(self._leaves[place]) for place in self._places]

    def tensors(self) -> list[Any]:
        """The tensors, and behind them the masks that Keras has attached to some."""
        return [self._leaves[place] for place in self._places] + [mask for mask in self._masks if mask is not None]

    def with_tensors(self, tensors: list[Any]) -> Any:
        """`(args, kwargs)` with others in the place of `tensors()`."""
        remaining = iter(tensors)
        leaves = list(self._leaves)
        for place in self._places:
            leaves[place] = next(remaining)
        for place, mask in zip(self._places, self._masks, strict=True):
            if mask is not None:
                set_keras_mask(leaves[place], next(remaining))
        return keras.tree.pack_sequence_as(self._structure, leaves)


class _Scopes(NamedTuple):
    """The scopes of Keras that a call is made in.

    Attributes:
        stateless: the scope that holds the values of variables; None where there is none.
        autocast: the scope in which variables are cast; None where there is none.
        call_context: the context in which layers find whether they train.
    """

    stateless: Any
    autocast: Any
    call_context: Any

    @classmethod
    def current(cls) -> _Scopes:
        """The scopes of now, with a copy of the call context, because layers that are called later change it."""
        return cls(
            get_stateless_scope(), get_autocast_scope(), copy.copy(global_state.get_global_attribute(_CALL_CONTEXT))
        )

    def value_of(self, variable: Any) -> Any:
        value = None if self.stateless is None else self.stateless.get_current_value(variable)
        # Private, because the public value is cast inside an autocast scope.
        return variable._value if value is None else value

    @contextmanager
    def entered(self, variables: tuple[Any, ...], values: Any) -> Iterator[_Scope]:
        """A scope within these, in which variables have the given values."""
        with _Scope(variables, values, self.stateless) as scope, _entered(self.autocast):
            with _call_context(self.call_context):
                yield scope


class _PureCall:
    """A call as a function from tensors to tensors, which assigns nothing; it notes the structure of its outputs."""

    def __init__(
        self,
        function: Callable[..., Any],
        layers: Sequence[keras.layers.Layer],
        variables: tuple[Any, ...],
        arguments: _Arguments,
        scopes: _Scopes,
    ) -> None:
        self._function, self._layers, self._variables = function, layers, variables
        self._arguments, self._scopes = arguments, scopes

    def __call__(self, *inputs: Any) -> tuple[Any, ...]:
        """Calls the function.

        Args:
            *inputs: the values of the variables, then the tensors of the arguments.

        Returns:
            The results, the masks that some of them have, the new values of the assigned variables, the losses.

        Raises:
            _UnknownVariables: the function uses variables that are not among those it was said to use.
        """
        count = len(self._variables)
        args, kwargs = self._arguments.with_tensors(list(inputs[count:]))
        with self._scopes.entered(self._variables, inputs[:count]) as scope:
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
        """Attaches the masks to the results of a call, assigns the new values, and returns (results, losses)."""
        results = [outputs.pop(0) for _ in self._has_mask]
        for result, has_mask in zip(results, self._has_mask, strict=True):
            if has_mask:
                set_keras_mask(result, outputs.pop(0))
        for variable in self._assigned:
            variable.assign(outputs.pop(0))
        return keras.tree.pack_sequence_as(self._results, results), outputs


def _entered(autocast: Any) -> Any:
    return nullcontext() if autocast is None else AutocastScope(autocast.dtype)


@contextmanager
def _call_context(context: Any) -> Iterator[None]:
    """Layers find in it whether they train."""
    before = global_state.get_global_attribute(_CALL_CONTEXT)
    global_state.set_global_attribute(_CALL_CONTEXT, context)
    try:
        yield
    finally:
        global_state.set_global_attribute(_CALL_CONTEXT, before)
