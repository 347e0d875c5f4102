"""What an optimizer reads as float32 and is stored in fewer bits: its slots in 8 or 16, and bfloat16 weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
from keras import ops

from keras_mp import backend
from keras_mp.optimizer.stochastic_rounding import random_bits, round_to_bfloat16, round_to_float8

engine = backend.engine_of(__package__)

# How an optimizer's state is stored: in E4M3 with a float32 scale a row, or in bfloat16.
#
# ```
# scale  = max |x| of a row / 448         float32; a row runs along the last axis
# stored = round(x / scale)               E4M3; the largest of a row is exact, a row of zeros stays one
# read   = stored * scale
# ```
#
# A value below 2**-9 of its row's scale, which is 1 / 229,376 of the row's largest, is stored as 0 or as that bound:
# as a mean right, in each single step not. A square root, by which steps are divided, is stored as the bound. Scales by
# rows and not by blocks: a row lies within a TPU's tiles.

# Attributes of an optimizer that is built: which of its slots are stored in fewer bits, and how.
SLOTS, STATE_DTYPE, STATE_MEMORY = "_keras_mp_state_slots", "_keras_mp_state_dtype", "_keras_mp_state_memory"
STORED_AS = {"float32": "float32", "bfloat16": "bfloat16", "float8": "float8_e4m3fn"}

_LARGEST_E4M3 = 448.0  # Micikevicius et al. 2022, table 1
_SMALLEST_E4M3 = 2.0**-9  # the smallest subnormal
_SMALLEST_SCALE = 2.0**-126  # the smallest normal float32: a quotient by less may be infinite


def encode(x: Any, state_dtype: str, bits: Any = None, is_root: bool = False) -> tuple[Any, Any]:
    """Makes what is stored of a float32 tensor.

    Args:
        x: a float32 tensor of two axes or more.
        state_dtype: "float8", "bfloat16" or "float32", in which x stays as it is.
        bits: a uint32 tensor of its shape, for stochastic rounding; None for rounding to nearest.
        is_root: whether steps are divided by x. In E4M3 none of its values but zeros then becomes zero: the first
            moment may keep the smallest value where its root did not, and the step be hundreds of times too large.

    Returns:
        (values, scale): the values in E4M3 and a float32 scale for each row, of shape (..., 1); else the scale is None.
    """
    if state_dtype == "float32":
        return x, None
    if state_dtype == "bfloat16":
        return (ops.cast(x, "bfloat16") if bits is None else round_to_bfloat16(x, bits)), None
    scale = ops.maximum(ops.max(ops.abs(x), axis=-1, keepdims=True) / _LARGEST_E4M3, _SMALLEST_SCALE)
    scaled = x / scale
    if is_root:
        scaled = ops.where(x > 0, ops.maximum(scaled, _SMALLEST_E4M3), scaled)
    return (ops.cast(scaled, "float8_e4m3fn") if bits is None else round_to_float8(scaled, bits)), scale


def decode(values: Any, scale: Any = None) -> Any:
    """Reads the result of `encode` as float32."""
    values = ops.cast(values, "float32")
    return values if scale is None else values * scale


# A slot of an optimizer that reads as float32, and is stored in 8 or 16 bits.


class StateSlot:
    """Slot that an optimizer uses as a float32 variable.

    Within `updating` it holds the float32 value, so that a step computes with unrounded moments, and is rounded once,
    at its end. Outside, each assignment rounds to nearest.

    Args:
        values: the Keras variable in E4M3, bfloat16 or float32, of the slot's shape.
        scale: the float32 variable of shape (..., 1) with a scale for each row; None but in E4M3.
        state_dtype: "float8", "bfloat16" or "float32".
        holds_root: whether the square root is stored, of a slot that is never negative: its range is half as wide.
        index: a number that tells the slot's random bits from those of the optimizer's other slots.
        on_host: Whether the values lie in the host's memory, and are on the device within `updating` alone.
    """

    dtype = "float32"

    def __init__(
        self,
        values: keras.Variable,
        scale: keras.Variable | None,
        state_dtype: str,
        holds_root: bool,
        index: int,
        on_host: bool = False,
    ) -> None:
        self.values, self.scale, self.holds_root, self.index = values, scale, holds_root, index
        self.state_dtype, self.on_host = state_dtype, on_host
        self._fetched: Any = None
        self._is_open, self._working = False, None

    @property
    def variables(self) -> list[keras.Variable]:
        """Lists what is stored: values, and scales if any."""
        return [self.values] if self.scale is None else [self.values, self.scale]

    @property
    def shape(self) -> tuple[int, ...]:
        """Its dimensions, those of the weight."""
        return tuple(self.values.shape)

    @property
    def ndim(self) -> int:
        """The number of its dimensions."""
        return len(self.shape)

    @property
    def name(self) -> str:
        """The name of the stored values."""
        return self.values.name

    @property
    def path(self) -> str:
        """The path of the stored values."""
        return self.values.path

    @property
    def value(self) -> Any:
        """The float32 tensor."""
        if self._working is not None:
            return self._working
        read = decode(self._stored_values(), None if self.scale is None else self.scale.value)
        read = ops.square(read) if self.holds_root else read
        if self._is_open:
            self._working = read
        return read

    def numpy(self) -> Any:
        """The float32 array."""
        return ops.convert_to_numpy(self.value)

    def assign(self, value: Any) -> None:
        """Sets the slot to a tensor of its shape."""
        value = ops.cast(value, "float32")
        if self._is_open:
            self._working, self._is_changed = value, True
        else:
            self._store(value, None)

    def assign_add(self, value: Any) -> None:
        """Adds a tensor of its shape."""
        self.assign(ops.add(self.value, value))

    def assign_sub(self, value: Any) -> None:
        """Subtracts a tensor of its shape."""
        self.assign(ops.subtract(self.value, value))

    def scatter_add(self, slices: Any) -> None:
        """Adds to some rows; TensorFlow's optimizers call it."""
        self.assign_add(backend.dense(slices))

    def scatter_sub(self, slices: Any) -> None:
        """Subtracts from some rows."""
        self.assign_sub(backend.dense(slices))

    def scatter_update(self, slices: Any) -> None:
        """Sets some rows."""
        self.assign(ops.scatter_update(self.value, ops.expand_dims(slices.indices, -1), slices.values))

    def _stored_values(self) -> Any:
        if self._fetched is not None:
            return self._fetched
        return engine.fetched(self.values.value, []) if self.on_host else backend.as_tensor(self.values)

    def _open(self, after: Any) -> None:
        self._is_open, self._is_changed, self._working = True, False, None
        if self.on_host:
            self._fetched = engine.fetched(self.values.value, after)

    def _close(self) -> None:
        self._is_open, self._working, self._fetched = False, None, None

    def _round(self, seed: int, step: Any, finite: Any) -> list[Any]:
        """Stores a changed slot; returns a value on the host."""
        if not self._is_changed:
            return []
        values = self._store(self._working, random_bits(self.shape, seed, step, self.index), finite)
        return [values[(slice(0, 1),) * self.ndim]] if self.on_host else []

    def _store(self, value: Any, bits: Any, finite: Any = None) -> Any:
        root = ops.sqrt(ops.maximum(value, 0.0)) if self.holds_root else value
        values, scale = encode(root, self.state_dtype, bits, self.holds_root)
        values = where_finite(finite, values, None if finite is None else self._stored_values())
        self.values.assign(engine.stored(values) if self.on_host else values)
        if self.scale is not None:
            self.scale.assign(where_finite(finite, scale, self.scale))
        return values

    def __jax_array__(self) -> Any:
        return self.value

    def __tf_tensor__(self, dtype: Any = None, name: str | None = None) -> Any:
        return self.value if dtype is None else ops.cast(self.value, dtype.name)

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return self.numpy().astype(dtype or "float32")

    # Arithmetic is that of a Keras variable, which computes with `value`.
    __getitem__, __neg__, __abs__ = keras.Variable.__getitem__, keras.Variable.__neg__, keras.Variable.__abs__
    __add__, __radd__ = keras.Variable.__add__, keras.Variable.__radd__
    __sub__, __rsub__ = keras.Variable.__sub__, keras.Variable.__rsub__
    __mul__, __rmul__ = keras.Variable.__mul__, keras.Variable.__rmul__
    __truediv__, __rtruediv__ = keras.Variable.__truediv__, keras.Variable.__rtruediv__
    __pow__ = keras.Variable.__pow__


def where_finite(finite: Any, value: Any, variable: Any) -> Any:
    """Returns a value where `finite` or None, else the variable's."""
    if finite is None:
        return value
    dtype = keras.backend.standardize_dtype(variable.dtype)
    # TensorFlow cannot choose between values in 8 bits; float32 holds them exactly.
    wide = "float32" if dtype.startswith("float8") else dtype
    old, new = (ops.cast(backend.as_tensor(tensor), wide) for tensor in (variable, value))
    return ops.cast(ops.where(finite, new, old), dtype)


@contextmanager
def updating(
    slots: Sequence[StateSlot], seed: int, step: Any, finite: Any = None, written: list[Any] | None = None
) -> Iterator[None]:
    """Scope in which a weight's slots are float32, then rounded.

    Args:
        step: The count of updates, an integer tensor of shape ().
        finite: a boolean tensor of shape (); where it is false, the slots stay as they were. None is true.
        written: a list with values of the slots that were written to the host's memory last, which becomes that of
            these. Slots there are fetched when `finite` and these values are there.
    """
    after = [] if finite is None else [finite, *(written or [])]
    for slot in slots:
        slot._open(after)
    try:
        yield
        ends = [end for slot in slots for end in slot._round(seed, step, finite)]
        if ends and written is not None:
            written[:] = ends
    finally:
        for slot in slots:
            slot._close()


# A bfloat16 weight whose update is computed in float32 and rounded once, so that small updates are not lost.


class WideWeight(StateSlot):
    """Bfloat16 weight that an optimizer uses as a float32 one.

    Other attributes are those of the Keras variable.

    Args:
        values: the thing that is read and assigned to: the variable, or on TensorFlow the replica's own.
    """

    def __init__(self, variable: keras.Variable, values: Any = None, index: int = 0) -> None:
        super().__init__(variable if values is None else values, None, "bfloat16", False, index)
        self.variable = variable

    @property
    def path(self) -> str:
        """The path of the variable."""
        return str(self.variable.path)

    def __getattr__(self, name: str) -> Any:
        if name == "variable":
            raise AttributeError(name)
        return getattr(self.variable, name)


class Unconstrained:
    """Weight whose constraint its update applies, and Keras must not."""

    constraint = None

    def __init__(self, variable: keras.Variable) -> None:
        self.variable = variable
