"""Which slots of an optimizer are stored in fewer bits, and how they are made when Keras builds it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import keras
from keras import ops

from keras_mp.loss_scaling.gradients import at_least_float32
from keras_mp.loss_scaling.state_formats import STORED_AS, encode
from keras_mp.loss_scaling.state_slot import StateSlot
from keras_mp.rebuild import widen

SMALLEST = 4096
"""A slot of fewer values stays float32: there is little to save, and biases and norms are small."""

_SLOTS, _STATE_DTYPE = "_keras_mp_state_slots", "_keras_mp_state_dtype"

# What must stay float32: averaged weights, and what a weight is computed from alone. A weight is otherwise rounded by
# the update, here to 3 bits. RMSprop's are listed where they are made.
_EXACT = {"Optimizer": {"average"}, "Ftrl": {"linear"}, "ScheduleFreeAdamW": {"momentum"}}

# Means and sums of squares. E4M3 spans 2**17.8, their roots half as much in powers of two as they do.
_SQUARES = {
    "Adam": {"velocity", "velocity_hat"},
    "Nadam": {"velocity"},
    "Lamb": {"velocity"},
    "RMSprop": {"velocity"},
    "Adagrad": {"accumulator"},
    "Adadelta": {"accumulated_grad", "accumulated_delta_var"},
    "Ftrl": {"accumulator"},
    "Muon": {"velocity"},
    "Adafactor": {"velocity"},
    "ScheduleFreeAdamW": {"velocity"},
}


@contextmanager
def creating(optimizer: keras.optimizers.Optimizer, state_dtype: str, numbers: Iterator[int]) -> Iterator[None]:
    """A scope in which an optimizer makes its slots as `StateSlot`s, and the others in float32 at least.

    Args:
        optimizer: one that is not built, and holds slots itself.
        state_dtype: "float8", "bfloat16" or "float32".
        numbers: the indices of slots, each of which is used once.
    """
    slots: dict[int, list[StateSlot]] = {}
    add_variable, original = optimizer.add_variable, optimizer.add_variable_from_reference

    def add_wide(shape: Any, initializer: Any = "zeros", dtype: Any = None, **other: Any) -> keras.Variable:
        return add_variable(shape, initializer, dtype if dtype is None else at_least_float32(dtype), **other)

    def add(reference_variable: Any, name: str | None = None, initializer: Any = "zeros") -> Any:
        if state_dtype == "float32" or not is_small(optimizer, name or "", reference_variable):
            return original(reference_variable, name=name, initializer=initializer)
        holds_root = _is_listed(_SQUARES, optimizer, name or "")
        make = _slot_maker(add_variable, state_dtype, next(numbers), holds_root)
        with _replaced(optimizer, "add_variable", make):
            slot = original(reference_variable, name=name, initializer=initializer)
        slots.setdefault(id(reference_variable), []).append(slot)
        return slot

    with _replaced(optimizer, "add_variable", add_wide), _replaced(optimizer, "add_variable_from_reference", add):
        yield
    stored = {id(variable) for made in slots.values() for slot in made for variable in slot.variables}
    for variable in optimizer.variables:
        if id(variable) not in stored:
            widen(variable)  # what Keras makes otherwise, in the dtype of the first weight: Nadam's product of factors
    if state_dtype == "float32":
        return
    by_place = [slots.get(id(variable), []) for variable in optimizer._trainable_variables]
    # Past Keras's tracking of attributes: the variables are tracked already.
    object.__setattr__(optimizer, _SLOTS, tuple(map(tuple, by_place)))
    object.__setattr__(optimizer, _STATE_DTYPE, state_dtype)


def state_dtype_of(optimizer: keras.optimizers.Optimizer) -> str:
    """Returns what the slots of a built optimizer are stored in."""
    return getattr(optimizer, _STATE_DTYPE, "float32")


def slots_of(optimizer: keras.optimizers.Optimizer, variable: Any) -> tuple[StateSlot, ...]:
    """Returns the slots of a weight that are stored in fewer bits; none of an optimizer without such slots."""
    by_place = getattr(optimizer, _SLOTS, ())
    return by_place[optimizer._get_variable_index(variable)] if by_place else ()


def has_slots(optimizer: keras.optimizers.Optimizer) -> bool:
    """Tells whether an optimizer was built with slots in fewer bits."""
    return hasattr(optimizer, _SLOTS)


def is_small(optimizer: keras.optimizers.Optimizer, slot: str, weight: Any) -> bool:
    """Tells whether a slot is stored in fewer bits.

    Args:
        optimizer: whose slot it is.
        slot: what the optimizer calls it, such as "momentum".
        weight: the variable that it belongs to.
    """
    shape = tuple(weight.shape)
    if len(shape) < 2 or math.prod(shape) < SMALLEST or shape[-1] < 2:
        return False
    if keras.backend.standardize_dtype(weight.dtype) not in ("float32", "bfloat16"):
        return False
    if getattr(optimizer, "centered", False) and slot in ("velocity", "average_gradient"):
        return False  # RMSprop divides by the root of a difference of the two, which rounding would make negative
    return not _is_listed(_EXACT, optimizer, slot)


def _is_listed(table: dict[str, set[str]], optimizer: keras.optimizers.Optimizer, slot: str) -> bool:
    return any(slot in table.get(base.__name__, ()) for base in type(optimizer).__mro__)


def _slot_maker(
    add_variable: Callable[..., keras.Variable], state_dtype: str, index: int, holds_root: bool
) -> Callable[..., StateSlot]:
    """Returns what makes a slot in place of Keras's `add_variable`."""

    def add(shape: Any, initializer: Any, dtype: Any, name: str, layout: Any = None, **other: Any) -> StateSlot:
        del dtype
        initial = keras.initializers.get(initializer)

        def stored(place: int, dtype: str) -> Callable[..., Any]:
            def initialize(_: Any, **unused: Any) -> Any:
                value = initial(tuple(shape), dtype="float32")
                encoded = encode(ops.sqrt(value) if holds_root else value, state_dtype)
                return ops.cast(encoded[place], dtype)

            return initialize

        values_dtype = STORED_AS[state_dtype]
        values = add_variable(shape, stored(0, values_dtype), values_dtype, name=name, layout=layout, **other)
        scale = None
        if state_dtype == "float8":
            rows = (*shape[:-1], 1)
            scale = add_variable(
                rows, stored(1, "float32"), "float32", name=f"{name}_scale", layout=_of_rows(layout), **other
            )
        return StateSlot(values, scale, state_dtype, holds_root, index)

    return add


def _of_rows(layout: Any) -> Any:
    """The layout of a weight's scales: the weight's, with the last axis whole."""
    if layout is None:
        return None
    return keras.distribution.TensorLayout([*layout.axes[:-1], None], layout.device_mesh)


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Gives an object a method of its own for a while."""
    before = vars(owner).get(name)
    vars(owner)[name] = value
    try:
        yield
    finally:
        if before is None:
            del vars(owner)[name]
        else:
            vars(owner)[name] = before
