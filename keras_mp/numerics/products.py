"""Counts the floating-point operations of the products that Keras's operations make, as they are called."""

from __future__ import annotations

import functools
import inspect
import math
import string
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np

from keras_mp import backend
from keras_mp.backend.common.keras_patches import patched
from keras_mp.precision.flops import convolution_flops, dot_flops

Note = Callable[[int, Any], None]
Shape = tuple[int, ...]


@contextmanager
def noted_products(note: Note) -> Iterator[None]:
    """Notes each matrix product and each convolution of Keras's operations within a `with` block.

    Args:
        note: `note(flops, result)`, called after each; a multiply-add is two operations. Sizes that are not known
            while the step is traced count as 1.
    """
    # An operation that calls another, as attention does, is noted once.
    depth = [0]
    makes = {name: _noting(flops, note, depth) for name, flops in _FLOPS.items()}
    if keras.backend.backend() == "jax":
        makes["core.custom_gradient"] = _without_gradient(depth)
    with patched({f"keras.src.backend.{name}": make for name, make in makes.items()}):
        yield


def _without_gradient(depth: list[int]) -> Callable[[Any], Any]:
    """JAX traces a function's own gradient beside it, whose products are not those of the forward pass."""

    def make(custom_gradient: Callable[..., Any]) -> Callable[..., Any]:
        def decorate(function: Callable[..., Any]) -> Any:
            @functools.wraps(function)
            def call(*args: Any, **kwargs: Any) -> Any:
                result, gradient = function(*args, **kwargs)

                @functools.wraps(gradient)
                def silent(*upstream: Any) -> Any:
                    depth[0] += 1
                    try:
                        return gradient(*upstream)
                    finally:
                        depth[0] -= 1

                return result, silent

            return custom_gradient(call)

        return decorate

    return make


def _noting(flops: Callable[..., int], note: Note, depth: list[int]) -> Callable[[Any], Any]:
    def make(operation: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(operation)

        @functools.wraps(operation)
        def call(*args: Any, **kwargs: Any) -> Any:
            depth[0] += 1
            try:
                result = operation(*args, **kwargs)
            finally:
                depth[0] -= 1
            if depth[0] == 0 and not backend.in_gradient():
                given = signature.bind(*args, **kwargs)
                given.apply_defaults()
                try:
                    count = flops(_shape(result), *given.args, **given.kwargs)
                except (IndexError, KeyError, TypeError, ValueError):
                    count = 0  # an operand without a shape, as a Python list: counting does not fail a step
                note(count, result)
            return result

        return call

    return make


def _shape(x: Any) -> Shape:
    return tuple(1 if size is None else int(size) for size in getattr(x, "shape", ()))


def _matmul(result: Shape, left: Any, right: Any) -> int:
    return dot_flops(result, _shape(left)[-1:])


def _dot(result: Shape, left: Any, right: Any) -> int:
    return dot_flops(result, _shape(left)[-1:]) if _shape(left) and _shape(right) else 0


def _vdot(result: Shape, left: Any, right: Any) -> int:
    return dot_flops((), _shape(left))


def _tensordot(result: Shape, left: Any, right: Any, axes: Any) -> int:
    shape = _shape(left)
    if isinstance(axes, int):
        return dot_flops(result, shape[len(shape) - axes :])
    summed = [axes[0]] if isinstance(axes[0], int) else axes[0]
    return dot_flops(result, [shape[axis] for axis in summed])


def _einsum(result: Shape, equation: str, *operands: Any, **options: Any) -> int:
    """Two operands at a time, in the order that costs least, as both frameworks take them."""
    shapes = [_shape(operand) for operand in operands]
    terms, wanted = _explicit(equation, shapes)
    sizes: dict[str, int] = {}
    for term, shape in zip(terms, shapes, strict=True):
        for label, size in zip(term, shape, strict=True):
            sizes[label] = max(size, sizes.get(label, 1))  # broadcast axes are 1 in one of them
    sized = [np.broadcast_to(np.float32(0), [sizes[label] for label in term]) for term in terms]
    order, _ = np.einsum_path(f"{','.join(terms)}->{wanted}", *sized, optimize="optimal")
    total, left = 0, [set(term) for term in terms]
    for places in order[1:]:
        taken = [left.pop(place) for place in sorted(places, reverse=True)]
        total += 2 * math.prod(sizes[label] for label in set().union(*taken)) if len(taken) > 1 else 0
        left.append(set().union(*taken) & set(wanted).union(*left))
    return total


def _explicit(equation: str, shapes: Sequence[Shape]) -> tuple[list[str], str]:
    """The labels of each operand and of the result; the axes of an ellipsis have labels too."""
    operands, arrow, wanted = equation.replace(" ", "").partition("->")
    terms = operands.split(",")
    if not arrow:
        labels = "".join(terms).replace(".", "")
        wanted = "..." + "".join(sorted(label for label in labels if labels.count(label) == 1))
    spare = "".join(label for label in string.ascii_letters if label not in equation)
    axes = [len(shape) - len(term.replace("...", "")) for term, shape in zip(terms, shapes, strict=True)]
    most = max(axes)
    terms = [term.replace("...", spare[most - count : most]) for term, count in zip(terms, axes, strict=True)]
    return terms, wanted.replace("...", spare[:most])


def _attention(result: Shape, query: Any, key: Any, *rest: Any) -> int:
    """The scores of (batch, rows, heads, features) and (batch, columns, key heads, features), and their product."""
    batch, rows, heads, features = _shape(query)
    return 2 * dot_flops((batch, heads, rows, _shape(key)[1]), (features,))


def _conv(result: Shape, inputs: Any, kernel: Any, *options: Any) -> int:
    shape = _shape(kernel)
    return _convolution(result, _shape(inputs), shape[:-2], shape[-2], *options)


def _depthwise_conv(result: Shape, inputs: Any, kernel: Any, *options: Any) -> int:
    return _convolution(result, _shape(inputs), _shape(kernel)[:-2], 1, *options)


def _separable_conv(result: Shape, inputs: Any, depthwise: Any, pointwise: Any, *options: Any) -> int:
    (batch, _), positions = _split(result, options[2])
    features = math.prod(_shape(depthwise)[-2:])
    between = (batch, features, *positions) if _channels_first(options[2]) else (batch, *positions, features)
    return _depthwise_conv(between, inputs, depthwise, *options) + dot_flops(result, (features,))


def _conv_transpose(result: Shape, inputs: Any, kernel: Any, strides: Any, padding: str, *options: Any) -> int:
    """The products of the convolution whose gradient it is, from the result to the inputs."""
    shape = _shape(kernel)
    _, data_format, dilation = options
    return _convolution(_shape(inputs), result, shape[:-2], shape[-2], strides, padding, data_format, dilation)


def _convolution(
    result: Shape,
    inputs: Shape,
    kernel: Shape,
    kernel_inputs: int,
    strides: Any,
    padding: str,
    data_format: Any,
    dilation: Any,
) -> int:
    kept, outputs = _split(result, data_format)
    _, sizes = _split(inputs, data_format)
    windows = []
    for axis, (size, taps, output) in enumerate(zip(sizes, kernel, outputs, strict=True)):
        stride = strides if isinstance(strides, int) else strides[axis]
        holes = dilation if isinstance(dilation, int) else dilation[axis]
        before = max(0, (output - 1) * stride + (taps - 1) * holes + 1 - size) // 2 if padding == "same" else 0
        windows.append((size, taps, output, stride, before, 1, holes))
    return convolution_flops(kept, kernel_inputs, windows)


def _split(shape: Shape, data_format: str | None) -> tuple[tuple[int, int], Shape]:
    """Batch and features; and the spatial sizes."""
    if _channels_first(data_format):
        return (shape[0], shape[1]), shape[2:]
    return (shape[0], shape[-1]), shape[1:-1]


def _channels_first(data_format: str | None) -> bool:
    return (data_format or keras.config.image_data_format()) == "channels_first"


_FLOPS: dict[str, Callable[..., int]] = {
    "numpy.matmul": _matmul,
    "numpy.dot": _dot,
    "numpy.inner": _dot,
    "numpy.vdot": _vdot,
    "numpy.tensordot": _tensordot,
    "numpy.einsum": _einsum,
    "nn.conv": _conv,
    "nn.depthwise_conv": _depthwise_conv,
    "nn.separable_conv": _separable_conv,
    "nn.conv_transpose": _conv_transpose,
    "nn.dot_product_attention": _attention,
}
