"""Builds a Keras optimizer whose slots are float32 or stored in fewer bits, and that sums no gradients of its own."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_mp import backend
from keras_mp.optimizer.gradients import at_least_float32
from keras_mp.optimizer.state_slot import SLOTS, STATE_DTYPE, STATE_MEMORY, STORED_AS, StateSlot, encode
from keras_mp.rebuild.optimizers import leaves
from keras_mp.rebuild.walk import widen

engine = backend.engine_of(__package__)


def build_inner(
    optimizer: keras.optimizers.Optimizer,
    variables: list[keras.Variable],
    state_dtype: str,
    state_memory: str,
) -> None:
    """Builds an optimizer without its own sums of gradients."""
    # The weights come first: they may be rounded with words of their own.
    numbers = itertools.count(len(variables))
    with ExitStack() as stack:
        entered = set()

        def enter(leaf: keras.optimizers.Optimizer) -> None:
            if id(leaf) not in entered:
                entered.add(id(leaf))
                stack.enter_context(_creating(leaf, state_dtype, state_memory, numbers))

        for leaf in leaves(optimizer):
            enter(leaf)
        stack.enter_context(_telling_of_leaves(optimizer, enter))
        optimizer.build(variables)
    for saved in (optimizer, *leaves(optimizer)) if state_dtype != "float32" else ():
        # Past Keras's tracking of attributes. Not a function within, which a copy of the optimizer would share.
        object.__setattr__(saved, "load_own_variables", partial(_load, saved))


@contextmanager
def _telling_of_leaves(optimizer: keras.optimizers.Optimizer, enter: Callable[[Any], None]) -> Iterator[None]:
    """Tells of the optimizers that a MultiOptimizer's function returns."""
    # Private: Keras asks the function again for no variable, and it may give a new optimizer each time.
    choose = vars(optimizer).get("_optimizer_map")

    def choosing(variable: keras.Variable) -> keras.optimizers.Optimizer:
        leaf = choose(variable)
        if isinstance(leaf, keras.optimizers.Optimizer):
            enter(leaf)
        return leaf

    with nullcontext() if choose is None else _replaced(optimizer, "_optimizer_map", choosing):
        yield


# Which slots of an optimizer are stored in fewer bits, and how they are made when Keras builds it.

SMALLEST = 4096
"""A slot of fewer values stays float32: there is little to save, and biases and norms are small."""

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
def _creating(
    optimizer: keras.optimizers.Optimizer, state_dtype: str, state_memory: str, numbers: Iterator[int]
) -> Iterator[None]:
    """Scope in which an optimizer makes `StateSlot`s, and no sums.

    Args:
        optimizer: an optimizer that is not built, and holds slots itself.
        numbers: the indices of slots, each of which is used once.
    """
    as_keras_does = (state_dtype, state_memory) == ("float32", "device")
    slots: dict[int, list[StateSlot]] = {}
    add_variable, original = optimizer.add_variable, optimizer.add_variable_from_reference

    def add_wide(shape: Any, initializer: Any = "zeros", dtype: Any = None, **other: Any) -> keras.Variable:
        return add_variable(shape, initializer, dtype if dtype is None else at_least_float32(dtype), **other)

    def add(reference_variable: Any, name: str | None = None, initializer: Any = "zeros") -> Any:
        if as_keras_does or not is_small(optimizer, name or "", reference_variable):
            return original(reference_variable, name=name, initializer=initializer)
        holds_root = state_dtype != "float32" and _is_listed(_SQUARES, optimizer, name or "")
        make = _slot_maker(add_variable, state_dtype, next(numbers), holds_root, state_memory == "host")
        with _replaced(optimizer, "add_variable", make):
            slot = original(reference_variable, name=name, initializer=initializer)
        slots.setdefault(id(reference_variable), []).append(slot)
        return slot

    replaced = {"gradient_accumulation_steps": None, "add_variable": add_wide, "add_variable_from_reference": add}
    with ExitStack() as stack:
        for name, value in replaced.items():
            stack.enter_context(_replaced(optimizer, name, value))
        yield
    stored = {id(variable) for made in slots.values() for slot in made for variable in slot.variables}
    for variable in optimizer.variables:
        if id(variable) not in stored:
            widen(variable)  # what Keras makes otherwise, in the dtype of the first weight: Nadam's product of factors
    if as_keras_does:
        return
    by_place = [slots.get(id(variable), []) for variable in optimizer._trainable_variables]
    # Past Keras's tracking of attributes: the variables are tracked already.
    object.__setattr__(optimizer, SLOTS, tuple(map(tuple, by_place)))
    object.__setattr__(optimizer, STATE_DTYPE, state_dtype)
    object.__setattr__(optimizer, STATE_MEMORY, state_memory)


def slots_of(optimizer: keras.optimizers.Optimizer, variable: Any) -> tuple[StateSlot, ...]:
    """Returns the slots of a weight that have fewer bits."""
    by_place = getattr(optimizer, SLOTS, ())
    return by_place[optimizer._get_variable_index(variable)] if by_place else ()


def is_small(optimizer: keras.optimizers.Optimizer, slot: str, weight: Any) -> bool:
    """Tells whether a slot, by name, has fewer bits."""
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
    add_variable: Callable[..., keras.Variable], state_dtype: str, index: int, holds_root: bool, on_host: bool
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
        if on_host:
            engine.keep_on_host(values)
        scale = None
        if state_dtype == "float8":
            rows = (*shape[:-1], 1)
            if layout is not None:  # that of the weight, the last axis whole
                layout = keras.distribution.TensorLayout([*layout.axes[:-1], None], layout.device_mesh)
            scale = add_variable(rows, stored(1, "float32"), "float32", name=f"{name}_scale", layout=layout, **other)
        return StateSlot(values, scale, state_dtype, holds_root, index, on_host)

    return add


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replaces an attribute of an object for a while."""
    nothing = object()
    before = vars(owner).get(name, nothing)
    vars(owner)[name] = value
    try:
        yield
    finally:
        if before is nothing:
            del vars(owner)[name]
        else:
            vars(owner)[name] = before


# Optimizer states of 8 bits in Keras's files. HDF5 has no such floats: h5py writes and reads them as opaque bytes.

_SIZES = {"bfloat16": 2, "float8_e4m3fn": 1}


def with_dtypes(store: Mapping[str, Any], variables: Sequence[keras.Variable]) -> dict[str, Any]:
    """Gives a file's arrays the dtypes they were written with.

    Args:
        store: arrays by the number of their variable.

    Raises:
        ValueError: If the file was written with another state_dtype: its numbers would be read as others, such as
            Adam's second moment as its square root.
    """
    by_number = {str(number): variable for number, variable in enumerate(variables)}
    # Keras's store is no mapping that can be iterated over.
    return {number: _with_dtype(np.asarray(store[number]), by_number.get(number)) for number in list(store.keys())}


def _load(optimizer: keras.optimizers.Optimizer, store: Mapping[str, Any]) -> None:
    type(optimizer).load_own_variables(optimizer, with_dtypes(store, optimizer.variables))


def _with_dtype(array: np.ndarray, variable: keras.Variable | None) -> np.ndarray:
    if variable is None:
        return array
    dtype = keras.backend.standardize_dtype(variable.dtype)
    size = _SIZES.get(dtype)
    if (array.dtype.itemsize if array.dtype.kind == "V" else None) != size:
        held = {1: "8 bits", 2: "bfloat16"}.get(array.dtype.itemsize, array.dtype.name)
        raise ValueError(
            f"the file holds optimizer variable {variable.path!r} in {held}, and this optimizer stores it in {dtype}: "
            "load the file with the state_dtype that it was saved with. A TrainingCheckpoint goes on in any state_dtype"
        )
    if size is None or array.dtype.name == dtype:
        return array
    return array.view(dtype)
