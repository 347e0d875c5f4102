"""A slot of an optimizer that reads as float32, and is stored in 8 or 16 bits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
from keras import ops

from keras_mp import backend
from keras_mp.loss_scaling.state_formats import decode, encode
from keras_mp.loss_scaling.stochastic_rounding import random_bits


class StateSlot:
    """What an optimizer reads and assigns as it does a float32 variable.

    Within `updating` it holds the float32 value, so that a step computes with unrounded moments, and is rounded once,
    at its end. Outside, each assignment rounds to nearest.

    Attributes:
        values: the Keras variable in E4M3 or bfloat16, of the slot's shape.
        scale: the float32 variable of shape (..., 1) with a scale for each row; None in bfloat16.
        holds_root: whether the square root is stored, of a slot that is never negative: its range is half as wide.
        index: tells the slot's random bits from those of the optimizer's other slots.

    Args:
        values, scale, holds_root, index: these.
        state_dtype: "float8" or "bfloat16".
    """

    dtype = "float32"

    def __init__(
        self, values: keras.Variable, scale: keras.Variable | None, state_dtype: str, holds_root: bool, index: int
    ) -> None:
        self.values, self.scale, self.holds_root, self.index = values, scale, holds_root, index
        self.state_dtype = state_dtype
        self._is_open, self._working = False, None

    @property
    def variables(self) -> list[keras.Variable]:
        """What is stored: the values, and the scales if there are some."""
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
        read = decode(self.values.value, None if self.scale is None else self.scale.value)
        read = ops.square(read) if self.holds_root else read
        if self._is_open:
            self._working = read
        return read

    def numpy(self) -> Any:
        """The float32 array."""
        return ops.convert_to_numpy(self.value)

    def assign(self, value: Any) -> None:
        """Sets the slot.

        Args:
            value: a tensor of its shape.
        """
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

    def _open(self) -> None:
        self._is_open, self._is_changed, self._working = True, False, None

    def _close(self) -> None:
        self._is_open, self._working = False, None

    def _round(self, seed: int, step: Any) -> None:
        if self._is_changed:
            self._store(self._working, random_bits(self.shape, seed, step, self.index))

    def _store(self, value: Any, bits: Any) -> None:
        root = ops.sqrt(ops.maximum(value, 0.0)) if self.holds_root else value
        values, scale = encode(root, self.state_dtype, bits, self.holds_root)
        self.values.assign(values)
        if self.scale is not None:
            self.scale.assign(scale)

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


@contextmanager
def updating(slots: Sequence[StateSlot], seed: int, step: Any) -> Iterator[None]:
    """A scope in which slots hold float32; those that were assigned to are rounded stochastically at its end.

    Args:
        slots: of one weight.
        seed: of the random bits.
        step: the count of updates, an integer tensor of shape ().
    """
    for slot in slots:
        slot._open()
    try:
        yield
        for slot in slots:
            slot._round(seed, step)
    finally:
        for slot in slots:
            slot._close()
