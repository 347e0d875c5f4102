"""Banks of matrices that do not train, such as those of experts, stored as integers of 8 or 4 bits in groups."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops

from keras_mp import backend
from keras_mp.rebuild.walk import notes_of

BITS = {"int8": 8, "int4": 4}
# The rows that share a scale and a zero point, as Keras has it for int4.
GROUP = 128
_KEPT = "quantized banks"


class QuantizedBank(NamedTuple):
    """A bank as integers: tensors, or variables of a layer.

    weight = (code - zero of its group) . scale of its group
    """

    codes: Any  # int8, shape `(matrices, rows, columns)`; of int4 two columns a byte
    scale: Any  # float32, shape `(matrices, groups of rows, columns)`
    zero: Any  # int8, the shape of scale

    @property
    def is_int4(self) -> bool:
        """Whether two columns are in a byte."""
        return self.codes.shape[-1] != self.scale.shape[-1]

    def floats(self, dtype: str) -> Any:
        """The weights, each rounded once to a dtype; the matrices of a part of the bank, or one without that axis."""
        rows, columns = self.codes.shape[-2], self.scale.shape[-1]
        codes = ops.convert_to_tensor(self.codes)
        if self.is_int4:
            codes = keras.quantizers.unpack_int4(codes, columns, axis=-1)
        zero, scale = (
            ops.repeat(ops.cast(x, "float32"), min(GROUP, rows), axis=-2)[..., :rows, :]
            for x in (self.zero, self.scale)
        )
        return ops.cast((ops.cast(codes, "float32") - zero) * scale, dtype)


def quantized_banks(layer: Any) -> dict[str, QuantizedBank]:
    """Finds a layer's banks of integers, by its attributes."""
    notes = notes_of(layer)
    return {} if notes is None else notes.kept.get(_KEPT, {})


def quantize_bank(layer: Any, name: str, mode: str) -> None:
    """Stores a treated layer's bank as integers, in place.

    No compiled function holds it yet. The attribute of the name is a variable of shape `(matrices, rows, columns)`.
    """
    variable, bits = getattr(layer, name), BITS[mode]
    matrices, rows, columns = variable.shape
    values: Any = (None, None, None)
    if variable._value is not None:  # private: a model that is built from shapes alone has none
        limits = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
        parts = [
            keras.quantizers.abs_max_quantize_grouped_with_zero_point(
                one, block_size=GROUP, value_range=limits, to_numpy=True
            )
            for one in backend.to_numpy(variable).astype("float32")
        ]
        values = [np.stack(list(map(ops.convert_to_numpy, some))) for some in zip(*parts, strict=True)]
        if bits == 4:
            values[0] = ops.convert_to_numpy(keras.quantizers.pack_int4(values[0], axis=-1)[0])
    layer._tracker.unlock()  # private, and as Keras's layers do it where they are quantized
    with layer._open_name_scope():
        scale, zero = (
            layer.add_weight(
                shape=(matrices, math.ceil(rows / GROUP), columns),
                initializer="zeros",
                dtype=dtype,
                trainable=False,
                autocast=False,
                name=f"{variable.name}_{part}",
            )
            for part, dtype in (("scale", "float32"), ("zero", "int8"))
        )
    layer._tracker.lock()
    variable.trainable = False
    _store(variable, "int8", (matrices, rows, -(-columns * bits // 8)), values[0])
    if values[0] is not None:
        scale.assign(values[1])
        zero.assign(values[2])
    notes_of(layer).kept.setdefault(_KEPT, {})[name] = QuantizedBank(variable, scale, zero)  # type: ignore[union-attr]


def dequantize_bank(layer: Any, name: str) -> None:
    """Makes a bank of integers float32 again, in place."""
    bank = notes_of(layer).kept[_KEPT].pop(name)  # type: ignore[union-attr]
    value = None if bank.codes._value is None else ops.convert_to_numpy(bank.floats("float32"))
    matrices, rows, _ = bank.codes.shape
    _store(bank.codes, "float32", (matrices, rows, bank.scale.shape[-1]), value)
    bank.codes.trainable = layer.trainable
    for variable in (bank.scale, bank.zero):
        layer._untrack_variable(variable)


def _store(variable: keras.Variable, dtype: str, shape: tuple[int, ...], value: Any) -> None:
    # Private, as Keras has no way to change a variable's dtype, and its place among the layer's weights is to stay.
    variable._dtype, variable._shape = dtype, shape
    if value is not None:
        variable._initialize(ops.convert_to_tensor(value))
    elif dtype == "int8":
        variable._initializer = keras.initializers.Zeros()  # it is asked where such a variable is read
