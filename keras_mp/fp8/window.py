"""The window of a convolution: how far it reaches beyond the input, forward and for the gradient of the input."""

from __future__ import annotations

from typing import Any, NamedTuple

import keras

Padding = tuple[Any, Any]


class Window(NamedTuple):
    """A convolution's window, by spatial axis, for inputs with the channels last.

    Attributes:
        sizes: of the kernel.
        strides: likewise.
        dilations: of the kernel.
        same: whether the input is padded so that a stride of 1 keeps its size ("same", as Keras pads); or not at all.
    """

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    same: bool

    @property
    def reaches(self) -> tuple[int, ...]:
        """How many places beyond its first the kernel covers."""
        return tuple((size - 1) * dilation for size, dilation in zip(self.sizes, self.dilations, strict=True))

    def padding(self, lengths: tuple[Any, ...]) -> list[Padding]:
        """Zeros before and after an input of these lengths; tensors where a length is one and the zeros depend on it.

        Source: TensorFlow, "Notes on padding combination options", for "same".
        """
        result = []
        for length, reach, stride in zip(lengths, self.reaches, self.strides, strict=True):
            total = 0
            if self.same:
                total = reach
                if stride > 1:
                    total = _at_least_0((-(-length // stride) - 1) * stride + reach + 1 - length)
            result.append((total // 2, total - total // 2))
        return result

    def results(self, lengths: tuple[Any, ...]) -> list[Any]:
        """Lengths of the result."""
        padded = zip(lengths, self.padding(lengths), self.reaches, self.strides, strict=True)
        return [(length + sum(padding) - reach - 1) // stride + 1 for length, padding, reach, stride in padded]

    def gradient_padding(self, lengths: tuple[Any, ...]) -> list[Padding]:
        """Zeros around the gradient of the result, between whose elements `strides - 1` zeros lie already.

        Of the convolution with the kernel turned round, whose result has the lengths of the input. The last elements
        of an input are outside of every window where a stride does not fit.
        """
        paddings = []
        places = zip(lengths, self.padding(lengths), self.results(lengths), self.reaches, self.strides, strict=True)
        for length, (before, after), result, reach, stride in places:
            left_over = 0 if stride == 1 else length + before + after - (result - 1) * stride - reach - 1
            paddings.append((reach - before, reach - after + left_over))
        return paddings


def _at_least_0(number: Any) -> Any:
    return max(number, 0) if isinstance(number, int) else keras.ops.maximum(number, 0)
