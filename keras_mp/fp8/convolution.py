"""The convolution of an INT8 layer and its gradients."""

from __future__ import annotations

import math
from typing import Any

import keras

from keras_mp import backend
from keras_mp.fp8.int8_product import FORWARD, TO_INPUTS, int8_product
from keras_mp.fp8.int8_scaling import MOST_TERMS, Int8Scaling
from keras_mp.fp8.matmul import float_dtype
from keras_mp.fp8.of_parts import whole_shape
from keras_mp.fp8.scaling_recipe import Quantized
from keras_mp.fp8.window import Padding, Window


def convolution(
    inputs: Any, kernel: Any, recipe: Int8Scaling, window: Window, *, dtype: str, path: str, history: Any, part: Any
) -> Any:
    """Convolves inputs with a kernel in INT8, as `Int8Scaling` says; so is the gradient of the inputs.

    The gradient of the kernel is computed in the inputs' dtype, by Keras's own operation: no compiler makes it faster
    in INT8.

    Args:
        inputs: floats of shape (batch, *lengths, channels); batch and lengths may be unknown.
        kernel: floats of shape (*sizes, channels, filters). Given in float32, it is rounded once.
        recipe: the scaling recipe; one scale a tensor.
        window: of the convolution.
        dtype: of the result.
        path: names the convolutions in the compiled program, as for `keras_mp.fp8.matmul`.
        history: amaxes and the number of steps, as for `keras_mp.fp8.matmul`; None for a first step.
        part: how the whole kernel is made of what the devices have; None where `kernel` is whole.

    Returns:
        A tensor of shape (batch, *lengths, filters). The gradients have the dtypes of inputs and kernel.

    Raises:
        TypeError: inputs or kernel are no floats.
    """
    inputs, kernel = backend.as_tensor(inputs), backend.as_tensor(kernel)
    dtypes = dtype, float_dtype("inputs", inputs), float_dtype("kernel", kernel)
    shape = whole_shape(kernel, part)
    products = _Convolutions(window, _lengths(inputs), shape, dtypes, path)
    return int8_product(inputs, kernel, [] if history is None else [history], recipe, products, path, part)


def most_terms(kernel: tuple[int, ...]) -> int:
    """How many products of integers a convolution or its input gradient adds up at most, by the kernel's shape."""
    return math.prod(kernel[:-2]) * max(kernel[-2:])


class _Convolutions:
    """The three convolutions of one layer: `keras_mp.fp8.int8_product.Products`."""

    integer = {FORWARD, TO_INPUTS}

    def __init__(
        self,
        window: Window,
        lengths: tuple[Any, ...],
        kernel: tuple[int, ...],
        dtypes: tuple[str, str, str],
        path: str,
    ):
        assert most_terms(kernel) <= MOST_TERMS
        self._window, self._lengths, self._kernel, self._dtypes, self._path = window, lengths, kernel, dtypes, path

    def summed_axes(self, product: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        raise NotImplementedError("a convolution has one scale a tensor")

    def forward(self, x: Quantized, w: Quantized) -> Any:
        """The result."""
        padding = self._window.padding(self._lengths)
        values = x.values
        if not _known(padding):
            values = keras.ops.pad(values, [(0, 0), *padding, (0, 0)])
            padding = [(0, 0)] * len(padding)
        return self._convolve(values, x, w, self._dtypes[0], padding, "forward")

    def to_inputs(self, g: Quantized, w: Quantized) -> Any:
        """The gradient of the inputs."""
        window = self._window
        padding = window.gradient_padding(self._lengths)
        if _known(padding):
            return self._convolve(g.values, g, w, self._dtypes[1], padding, "input_gradient")
        # Zeros enough for any length, of which the inputs' part is taken.
        places = list(zip(window.reaches, window.strides, strict=True))
        padding = [(reach, reach + stride - 1) for reach, stride in places]
        padded = self._convolve(g.values, g, w, self._dtypes[1], padding, "input_gradient")
        before = [first for first, _ in window.padding(self._lengths)]
        own = [slice(first, first + length) for first, length in zip(before, self._lengths, strict=True)]
        return padded[(slice(None), *own)]

    def to_kernel(self, x: Quantized, g: Quantized) -> Any:
        """The gradient of the kernel."""
        window = self._window

        def forward(kernel: Any) -> Any:
            padding = "same" if window.same else "valid"
            return keras.ops.conv(x.values, kernel, window.strides, padding, "channels_last", window.dilations)

        like, name = keras.ops.zeros(self._kernel, x.values.dtype), f"{self._path}/keras_mp.kernel_gradient"
        return keras.ops.cast(backend.linear_gradient(forward, like, g.values, name=name), self._dtypes[2])

    def _convolve(
        self, values: Any, left: Quantized, right: Quantized, dtype: str, padding: list[Padding], role: str
    ) -> Any:
        window, backward = self._window, role == "input_gradient"
        ones = (1,) * len(window.strides)
        return backend.scaled_convolution(
            values,
            right.values,
            1.0 / (left.scale * right.scale),
            dtype,
            strides=ones if backward else window.strides,
            padding=padding,
            input_dilations=window.strides if backward else ones,
            kernel_dilations=window.dilations,
            turned=backward,
            name=f"{self._path}/keras_mp.{role}",
        )


def _lengths(inputs: Any) -> tuple[Any, ...]:
    known, actual = inputs.shape[1:-1], keras.ops.shape(inputs)[1:-1]
    return tuple(length if length is not None else own for length, own in zip(known, actual, strict=True))


def _known(padding: list[Padding]) -> bool:
    return all(isinstance(zeros, int) for pair in padding for zeros in pair)
