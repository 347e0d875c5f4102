"""A product with operands in few bits, and its gradients."""

from __future__ import annotations

import math
import string
import zlib
from collections.abc import Sequence
from typing import Any

import keras

from keras_mp import backend
from keras_mp.fp8.block_scaled import as_matrix, block_dot, quantize_matrix, quantize_tiles, rows_of_tiles
from keras_mp.fp8.quantize import (
    Quantized,
    gather_parts,
    known_magnitude,
    known_of,
    next_history,
    quantize,
    rounding_bits,
)
from keras_mp.fp8.scaling import PRODUCTS, ROLES, Pair, Scaling, Scalings, get_scalings, problem
from keras_mp.precision.formats import INT8
from keras_mp.stability.accumulate import last_axis

engine = backend.engine_of(__package__)

MOST_TERMS = (2**31 - 1) // 127**2
"""So many products of two integers of INT8 are sure to have a sum within INT32."""


def matmul(
    inputs: Any,
    kernel: Any,
    scaling: Scalings | Scaling | str | None = None,
    *,
    equation: str = "",
    dtype: str = "",
    path: str = "",
    history: Any = None,
    part: Any = None,
) -> Any:
    """Multiplies inputs by a kernel in 8 or 4 bits.

    Both gradients are such products, too.

        x8, sx = quantize(x)        w8, sw = quantize(w)        g8, sg = quantize(gradient of y)
        y             = (x8 . w8) / (sx sw)
        gradient of x = (g8 . w8^T) / (sg sw)
        gradient of w = (x8^T . g8) / (sx sg)

    How each is quantized is a `Scaling`, of each operand in each product. Operands that are scaled alike are quantized
    once; those with a scale a row or a block once for each product, along the axes that it sums over. A product without
    scalings has operands in the dtype of the inputs.

    Each `.` has float32 sums, of INT8 INT32's, and is divided by the two scales once, in float32, before it is rounded
    to the result's dtype; a bias comes after that. Only codes and scales are kept for the backward pass. The forward
    product of FP8 lets a GPU add up with the fewer bits of its fast accumulation, the gradients do not, as Transformer
    Engine's default recipe has it. Where the product of two scales overflows float32, the result is zero.

    A product of INT8 that sums over more than 133,144 terms can exceed INT32. Where the number is known when the
    program is traced, such a product has operands in 16 bits; where it is not (on TensorFlow, the batch size), a kernel
    gradient of more rows is NaN.

    On hardware without FP8 the compiler widens the operands: the sums are of the same products.

    Args:
        inputs: floats of shape (..., features), or as the equation says; any batch size, unknown or zero as well.
        kernel: floats of shape (features, units), or as the equation says. Given in float32, it is rounded once.
        scaling: a `Scalings`, a `Scaling` for all operands, or the name of one of the kit's; "current" by default.
        equation: the equation of an einsum, such as "abc,cde->abde": each label stands in two of its three terms. By
            default the last axis of the inputs is multiplied with the first of the kernel.
        dtype: the dtype of the result; by default that of the inputs.
        path: a name for the products in the compiled program: `path/keras_mp.forward`, `path/keras_mp.input_gradient`,
            `path/keras_mp.kernel_gradient`. On JAX the name scopes around the call take its place.
        history: the amaxes of the updates before, float32 of shape (3, scaling.columns), by role: the newest first, and
            in a last column the number of updates, where it is counted. Without it each call is a first one. Its
            gradient is no gradient, but the history of the next update.
        part: the way in which the whole kernel is made of what the devices have, from
            `keras_mp.fp8.quantize.read_kernel`; None where `kernel` is whole. Its gradient is then this device's part
            of the sum over all.

    Returns:
        A tensor of shape (..., units), or as the equation says. The gradients have the dtypes of inputs and kernel.

    Raises:
        TypeError: If inputs or kernel are no floats.
        ValueError: If the scaling is unknown, the equation is no matrix product, or the history has another shape.
    """
    scalings = get_scalings(scaling)
    inputs, kernel = backend.as_tensor(inputs), backend.as_tensor(kernel)
    input_dtype, kernel_dtype = _float_dtype("inputs", inputs), _float_dtype("kernel", kernel)
    rank = len(inputs.shape)
    equation = explicit(equation, rank) if equation else last_axis(rank)
    whole = tuple(kernel.shape) if part is None else part.shape
    products = _Products(equation, scalings, (*inputs.shape, *whole), input_dtype, path, part)
    histories = [] if history is None else [_checked(history, scalings)]

    @backend.custom_gradient
    def multiply(inputs: Any, kernel: Any, *histories: Any) -> Any:
        inputs, kernel = first_order_operands([inputs, kernel], path)
        scope = backend.gradient_scope()
        history = histories[0] if histories else None
        operand = products.operands(inputs, kernel, history)
        x, w = operand("input", inputs, "forward"), operand("kernel", kernel, "forward")
        x_kept, w_kept = operand("input", inputs, "kernel_gradient"), operand("kernel", kernel, "input_gradient")
        amaxes = []
        if histories:
            amaxes = [_observed("input", inputs, scalings, history), _observed("kernel", kernel, scalings, history)]

        def gradient(g: Any) -> Any:
            (g,) = first_order_operands([g], path)
            with scope():
                g_by_row, g_by_column = (operand("gradient", g, f"{role}_gradient") for role in ("input", "kernel"))
                following = []
                if histories:
                    known = [*amaxes, _observed("gradient", g, scalings, history)]
                    following = [next_history(history, scalings, known)]
                own = products.dot("kernel_gradient", x_kept, g_by_column, kernel_dtype)
                to_x = products.dot("input_gradient", g_by_row, w_kept, input_dtype)
                own = own if part is None else part.of_sum(own)
                # Kept are the 8-bit operands alone: their derivatives with respect to what was rounded are 0 or, as JAX
                # has them, themselves rounded to 8 bits without a scale.
                kept = [g, *(x.scale for x in (x_kept, w_kept) if isinstance(x, Quantized))]
                return *engine.refuse_derivatives(_message(path), [to_x, own], kept), *following

        return products.dot("forward", x, w, dtype or input_dtype), gradient

    return multiply(inputs, kernel, *histories)


class _Products:
    """The three products of one call.

    The equation is the forward product's, without an ellipsis; the shape is that of inputs and then of the kernel.
    Operands without a scaling are in the compute dtype.
    """

    def __init__(
        self, equation: str, scalings: Scalings, shape: Sequence[Any], compute_dtype: str, path: str, part: Any
    ):
        operands, result = equation.split("->")
        left, right = operands.split(",")
        self._labels = left + right
        self._sizes = dict(zip(self._labels, shape, strict=True))
        self._equations = {
            "forward": equation,
            "input_gradient": f"{result},{right}->{left}",
            "kernel_gradient": f"{left},{result}->{right}",
        }
        self._pairs: dict[str, Pair] = {product: getattr(scalings, product) for product in PRODUCTS}
        for product, pair in self._pairs.items():
            if pair and pair[0].format == INT8 and not self._fits(product):
                self._pairs[product] = None
        self._scalings, self._compute_dtype, self._path, self._part = scalings, compute_dtype, path, part
        # libtpu 0.0.42 runs out of stack where it fuses a product that splits features into heads with attention's own.
        self._splits = len(right) - len(set(right) & set(left)) > 1
        # Of a kernel in tiles, whose codes both directions read: its axes as the forward product's matrix has them.
        self._tile_axes = summed_axes(equation)[1]
        self._tile_labels = [[right[axis] for axis in self._tile_axes]]
        self._tile_labels.append([label for label in right if label not in self._tile_labels[0]])

    def operands(self, inputs: Any, kernel: Any, history: Any) -> Any:
        """Makes a function that quantizes what is scaled alike once."""
        made: dict[Any, Any] = {}
        shape = (*keras.ops.shape(inputs), *keras.ops.shape(kernel))
        self._sizes = dict(zip(self._labels, shape, strict=True))  # on TensorFlow tensors, where a size is not known

        def operand(role: str, x: Any, product: str) -> Any:
            place = PRODUCTS[product].index(role)
            pair = self._pairs[product]
            scaling = pair[place] if pair else None
            part = self._part if role == "kernel" else None
            axes = self._axes(product)[place]
            along = axes if scaling and scaling.granularity in ("row", "block") else None
            key = role, scaling, along
            if key not in made:
                known = known_of(history, role, self._scalings)
                made[key] = self._quantized(x, scaling, axes, along, known, part)
            return made[key]

        return operand

    def dot(self, product: str, left: Any, right: Any, dtype: str) -> Any:
        """One product of two operands, divided by their scales."""
        equation, pair = self._equations[product], self._pairs[product]
        name = f"{self._path}/keras_mp.{product}"
        apart = self._splits and product == "forward"
        if pair and pair[0].in_blocks:
            # Those of the left operand's rows, then of the right one's.
            labels_of_left, labels_of_right = equation.split("->")[0].split(",")
            result = equation.split("->")[1]
            summed, kept = self._tile_labels
            across = self._reads_tiles_across(product)
            rows = [label for label in labels_of_left if label in result]
            rows += summed if across else [label for label in labels_of_right if label in result]
            if pair[1].granularity == "tile":
                # Of the kernel's matrix, the axis that is summed forward stands first or last.
                first = list(self._tile_axes) == list(range(len(summed)))
                of_kernel = kept if product == "forward" else summed
                count = math.prod(self._sizes[label] for label in of_kernel)
                right = rows_of_tiles(right, int(first != (product == "forward")), count)
            out = block_dot(left, right, dtype, name, apart)
            out = keras.ops.reshape(out, [self._sizes[label] for label in rows])
            return _in_order(out, rows, equation)
        if pair and pair[0].format == INT8 and product == "kernel_gradient":
            equation, left = _summed_last(equation, _nan_past_int32(equation, left))
        precise = pair is not None and pair[0].format != INT8 and product != "forward"
        return quantized_dot(equation, left, right, dtype, name, precise=precise, apart=apart)

    def _quantized(self, x: Any, scaling: Scaling | None, axes: Any, along: Any, known: Any, part: Any) -> Any:
        if scaling is None:
            return gather_parts(Quantized(keras.ops.cast(x, self._compute_dtype), keras.ops.ones(())), part)
        variable = zlib.crc32(self._path.encode())
        if not scaling.in_blocks:
            return gather_parts(quantize(x, scaling, along, known, variable, part), part, along)
        bits = rounding_bits(keras.ops.shape(x), scaling, known, variable)
        if scaling.granularity == "tile":
            return quantize_tiles(as_matrix(x, self._tile_axes)[0], scaling)
        matrix, axis = as_matrix(x, axes)
        return quantize_matrix(matrix, scaling, axis, None if bits is None else as_matrix(bits, axes)[0])

    def _axes(self, product: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Axes that a product sums over, in pairs."""
        equation = self._equations[product]
        axes = summed_axes(equation)
        if not self._reads_tiles_across(product):
            return axes
        left, right = equation.split("->")[0].split(",")
        summed = self._tile_labels[1]
        return tuple(map(left.index, summed)), tuple(map(right.index, summed))

    def _reads_tiles_across(self, product: str) -> bool:
        """Whether it reads tiles across the direction of forward."""
        pair = self._pairs[product]
        return product == "input_gradient" and pair is not None and pair[1].granularity == "tile"

    def _fits(self, product: str) -> bool:
        """Whether a sum fits INT32, or may fit."""
        left, right = self._equations[product].split("->")[0].split(",")
        summed = [self._sizes[label] for label in left if label in right]
        return not all(isinstance(size, int) for size in summed) or math.prod(summed) <= MOST_TERMS


def _observed(role: str, x: Any, scalings: Scalings, history: Any) -> Any:
    """Amax of a role's tensor in this update, or 0."""
    keeping = [scaling for scaling in scalings.of(role) if scaling.kept]
    known = known_of(history, role, scalings)
    return known_magnitude(x, keeping[0], known) if keeping and known else keras.ops.zeros(())


def quantized_dot(
    equation: str, left: Quantized, right: Quantized, dtype: str, name: str, *, precise: bool, apart: bool
) -> Any:
    """An einsum of two quantized tensors, divided by their scales.

    The scales have the shape (), or one for each row.
    """
    operands, _ = equation.split("->")
    left_labels, right_labels = operands.split(",")
    axes = summed_axes(equation)
    kept = [
        [label for axis, label in enumerate(labels) if axis not in summed]
        for labels, summed in zip((left_labels, right_labels), axes, strict=True)
    ]

    by_row = len(left.scale.shape) > 0
    factor, sums_dtype = (keras.ops.ones(()), "float32") if by_row else (1.0 / (left.scale * right.scale), dtype)
    out = engine.scaled_dot(
        left.values, right.values, (list(axes[0]), list(axes[1])), factor, sums_dtype,
        precise=precise, apart=apart, name=name,
    )  # fmt: skip
    if by_row:
        rows = keras.ops.squeeze(1.0 / left.scale, axes[0])
        columns = keras.ops.squeeze(1.0 / right.scale, axes[1])
        out = out * keras.ops.expand_dims(rows, [len(kept[0]) + i for i in range(len(kept[1]))])
        out = keras.ops.cast(out * columns, dtype)
    return _in_order(out, kept[0] + kept[1], equation)


def _in_order(out: Any, labels: Sequence[str], equation: str) -> Any:
    """Transposes a product to the result of an equation."""
    result = equation.split("->")[1]
    return out if list(labels) == list(result) else keras.ops.transpose(out, [labels.index(label) for label in result])


def _summed_last(equation: str, left: Quantized) -> tuple[str, Quantized]:
    """Moves the summed axes of the left operand behind.

    A TPU v5e multiplies integers that it adds up along the rows of both operands no faster than bfloat16.
    """
    labels, rest = equation.split(",", 1)
    summed = summed_axes(equation)[0]
    order = [axis for axis in range(len(labels)) if axis not in summed] + list(summed)
    if order == list(range(len(labels))):
        return equation, left
    scale = left.scale if len(left.scale.shape) == 0 else keras.ops.transpose(left.scale, order)
    values = engine.row_major(keras.ops.transpose(engine.row_major(left.values), order))
    return f"{''.join(labels[axis] for axis in order)},{rest}", Quantized(values, scale)


def _nan_past_int32(equation: str, left: Quantized) -> Quantized:
    """Gives an operand a NaN scale past INT32."""
    axes = summed_axes(equation)[0]
    if all(isinstance(left.values.shape[axis], int) for axis in axes):
        return left
    sizes = [keras.ops.cast(keras.ops.shape(left.values)[axis], "float32") for axis in axes]
    return Quantized(left.values, keras.ops.where(math.prod(sizes) <= MOST_TERMS, left.scale, float("nan")))


def _checked(history: Any, scalings: Scalings) -> Any:
    wanted = (len(ROLES), scalings.columns)
    if not wanted[1] or tuple(history.shape) != wanted:
        raise ValueError(
            f"history has the shape {tuple(history.shape)}, and {scalings} "
            + (f"needs {wanted}" if wanted[1] else "keeps none: leave it out")
        )
    return backend.as_tensor(history)


def _float_dtype(name: str, x: Any) -> str:
    """Dtype of a tensor of floats; else a TypeError."""
    dtype = keras.backend.standardize_dtype(x.dtype)
    if not keras.backend.is_float_dtype(dtype):
        raise TypeError(f"{name} must be floats, got {dtype}: cast them, as with keras.ops.cast(x, 'bfloat16')")
    return dtype


def first_order_operands(operands: Sequence[Any], path: str) -> list[Any]:
    """Returns operands that refuse second derivatives, too.

    What is found here is found before JAX says that it cannot differentiate a product of blocks, and names no layer.
    """
    if backend.in_forward_mode(operands):
        raise NotImplementedError(_message(path))
    return engine.refuse_derivatives(_message(path), operands, [])


def _message(path: str) -> str:
    return (
        f"{f'the layer {path!r}' if path else 'a product'} computes in 8 bits, and has only first derivatives, in "
        "reverse mode. For a gradient penalty, a Hessian, jvp or jacfwd call keras_mp.revert(model, 'convert'), or "
        "leave the layer out with keras_mp.convert(model, select=...)"
    )


def explicit(equation: str, rank: int) -> str:
    """Writes the ellipsis of an equation out.

    Raises:
        ValueError: it is no matrix product, or not of an input of that rank.
    """
    wrong = problem(equation)
    if wrong:
        raise ValueError(f"FP8 computes matrix products of an input and a kernel, but {wrong}")
    equation = equation.replace(" ", "")
    named = equation.partition(",")[0].replace("...", "")
    missing = rank - len(named)
    if missing < 0 or (missing and "..." not in equation):
        raise ValueError(f"equation={equation!r} takes inputs of {len(named)} axes, got {rank}")
    fresh = [label for label in string.ascii_letters if label not in equation]
    return equation.replace("...", "".join(fresh[:missing]))


def summed_axes(equation: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Axes that a product sums over, left and right, paired."""
    left, right = equation.split("->")[0].split(",")
    summed = [label for label in left if label in right]
    return tuple(left.index(label) for label in summed), tuple(right.index(label) for label in summed)
