"""INT8: the scaling recipe, the three matrix products of a layer, and the product with its gradients."""

from __future__ import annotations

import dataclasses
import math
import zlib
from typing import Any, ClassVar

import keras

from keras_mp import backend
from keras_mp.fp8.quantized_dot import (
    first_order,
    first_order_operands,
    join,
    quantized_dot,
    sum_gradients,
    summed_axes,
)
from keras_mp.fp8.scaling_recipe import (
    AMAX_RULES,
    HYBRID,
    ROLES,
    Quantized,
    Recipe,
    RoleFormats,
    check_role,
    next_step,
    over_parts,
    scaling,
)
from keras_mp.loss_scaling.stochastic_rounding import random_bits
from keras_mp.precision.formats import scale_to
from keras_mp.system.whole_number import whole_number

# The scaling recipe of INT8 products: delayed, static and current scales, and gradients rounded stochastically.

TOP = 127
"""The largest integer; -128 is left out, so that the range is symmetric."""

MOST_TERMS = (2**31 - 1) // TOP**2
"""So many products of two integers are sure to have a sum within INT32."""

SCALES = ("delayed", "static", "current")
KERNEL_GRADIENTS = ("compute", "int8")

_FLOAT32_MAGNITUDE, _FLOAT32_INFINITY = 0x7FFFFFFF, 0x7F800000


@keras.saving.register_keras_serializable("keras_mp")
@dataclasses.dataclass(frozen=True, repr=False)
class Int8Scaling(Recipe):
    """INT8 instead of FP8: forward product and input gradient are INT8 products with INT32 sums.

        scale = min(127 / (2^margin . amax), 2^126)         1 where amax is 0, infinite or NaN
        x8    = round(clip(x . scale, -127, 127))           inputs and kernel: to the nearest, ties to even
        g8    = floor(clip(g . scale, -127, 127) + u)       gradients: stochastically, 0 < u < 1

        y             = float32(x8 . w8) / (sx sw)          rounded to the result's dtype
        gradient of x = float32(g8 . w8^T) / (sg sw)
        gradient of w = x^T . g                             in the compute dtype with float32 sums: "compute"
                      = float32(x8^T . g8) / (sx sg)        "int8"

    u = (k + 1/2) / 2^16, where k are the 16 high bits of a hash of seed, layer, step and the element's place in the
    whole tensor: a run that goes on after a restart rounds as one that was not stopped, and shards as the whole. Calls
    of one layer in one step, micro-batches of one update and replicas share the words. The layer counts by its path: of
    a model that is built a second time in one process, Keras numbers the layers on, unless they and the model have
    names.

    The amax is by `scales`:

        "delayed"   the largest of the amax_history_length steps before ("max"), or that of the last step
                    ("most_recent"); in the first step that of the tensor itself, as in `DelayedScaling`
        "static"    in the first calibration_steps steps the largest so far, this step's included; then fixed
        "current"   of each row of the inputs and of each column of the kernel, from the tensors themselves. As in
                    `RowwiseScaling`, each product has copies of its own, along the axes that it sums over

    Integers have no NaN: where a tensor holds an infinity or a NaN, the products of its integers are multiplied by NaN,
    the whole product with a scale a tensor, and the row or column with "current". So loss scaling sees an overflow.

    A product that sums over more than 133,144 terms can exceed INT32. Where the number is known when the program is
    traced, such a product has operands of the compute dtype; where it is not (on TensorFlow, the batch size), a
    kernel gradient of more rows is NaN.

    Static scales of gradients are for losses that are not scaled: a loss scale that grows after the calibration
    saturates the gradients.

    Formula: Jacob et al., "Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-Only
    Inference", 2018 (arXiv:1712.05877), symmetric; the kernel gradient in 16 bits as in Google's Qwix and torchao's
    INT8 training.

    Args:
        scales: "delayed", "static" or "current".
        kernel_gradient: "compute" or "int8".
        margin: how many powers of two the known amax stays below 127, with "delayed" and "static".
        amax_history_length: of "delayed", 1 or more.
        amax_compute: of "delayed", "max" or "most_recent".
        calibration_steps: of "static", 1 or more.
        seed: of the stochastic rounding.

    Raises:
        ValueError: an argument is none of these.
    """

    scales: str = "delayed"
    kernel_gradient: str = "compute"
    margin: int = 0
    amax_history_length: int = 16
    amax_compute: str = "max"
    calibration_steps: int = 16
    seed: int = 0
    # Of the base, which FP8 recipes choose.
    format: RoleFormats = dataclasses.field(init=False, default=HYBRID)
    power_of_two: bool = dataclasses.field(init=False, default=False)
    counts_steps: ClassVar[bool] = True
    operands: ClassVar[str] = "INT8"

    def __post_init__(self) -> None:
        for name, least in (("margin", 0), ("amax_history_length", 1), ("calibration_steps", 1), ("seed", 0)):
            object.__setattr__(self, name, whole_number(name, getattr(self, name), least))
        for name, known in (
            ("scales", SCALES),
            ("kernel_gradient", KERNEL_GRADIENTS),
            ("amax_compute", AMAX_RULES),
        ):
            if getattr(self, name) not in known:
                listed = " or ".join(map(repr, known))
                raise ValueError(f"{name}={getattr(self, name)!r} is unknown: use {listed}")
        object.__setattr__(self, "per_row", self.scales == "current")

    @property
    def is_static(self) -> bool:
        return self.scales == "static"

    @property
    def history_length(self) -> int:
        # A static amax stands in the second place: the first is added up where calls meet in one slot.
        return {"delayed": self.amax_history_length, "static": 2, "current": 0}[self.scales]

    def get_config(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.init}

    def quantize(
        self, x: Any, role: str, axes: tuple[int, ...] | None = None, history: Any = None, variable: int = 0
    ) -> Quantized:
        """Scales a tensor into INT8.

        Args:
            x: floats of any shape.
            role: "input", "kernel" or "gradient"; the last is rounded stochastically.
            axes: those that the product sums over; with "current" the scale is one for all along them.
            history: float32 of shape (history_length + 1,), of the role; None for a first step.
            variable: tells tensors apart that are rounded in one step.

        Returns:
            int8 values and the float32 scale, which is NaN where x, or the row of it, is not finite.

        Raises:
            ValueError: there is no such role.
        """
        check_role(role)
        now = magnitude(x, ((-1,) if axes is None else axes) if self.per_row else None)
        scale = scale_to(TOP * 2.0 ** (0 if self.per_row else -self.margin), self._amax(x, now, history))
        scaled = keras.ops.clip(keras.ops.cast(x, "float32") * scale, -TOP, TOP)
        if role == "gradient":
            step = keras.ops.zeros(()) if history is None else history[-1]
            bits = random_bits(keras.ops.shape(x), self.seed, keras.ops.cast(step, "int32"), variable)
            rounded = keras.ops.floor(scaled + _fraction(bits))
        else:
            rounded = keras.ops.round(scaled)
        scale = keras.ops.where(keras.ops.isfinite(now), scale, float("nan"))
        return Quantized(keras.ops.cast(rounded, "int8"), scale)

    def next_history(self, history: Any, amaxes: list[Any]) -> Any:
        """The history after a step.

        Args:
            history: float32 of shape (3, history_length + 1).
            amaxes: float32 of shape (), by role; of no use with "current".

        Returns:
            float32 of that shape.
        """
        known, steps = history[:, :-1], history[:, -1:]
        following = next_step(steps)
        if self.per_row:
            return following
        now = keras.ops.stack([keras.ops.where(keras.ops.isfinite(amax), amax, 0.0) for amax in amaxes])[:, None]
        if self.is_static:
            calibrating = steps < self.calibration_steps
            fixed = keras.ops.where(calibrating, keras.ops.maximum(known[:, 1:], now), known[:, 1:])
            return keras.ops.concatenate([keras.ops.zeros_like(fixed), fixed, following], axis=1)
        return keras.ops.concatenate([now, known[:, :-1], following], axis=1)

    def _amax(self, x: Any, now: Any, history: Any) -> Any:
        """The magnitude to scale by."""
        if history is None or self.per_row:
            return now

        def just_in_time() -> Any:
            # As in DelayedScaling: the barrier keeps a compiler from computing this in every step.
            return _finite(magnitude(backend.barrier([x], [])[0]))

        if self.is_static:
            known = history[1]
            calibrating = keras.ops.logical_or(history[-1] < self.calibration_steps, known <= 0)
            return keras.ops.cond(calibrating, lambda: keras.ops.maximum(known, just_in_time()), lambda: known)
        known = keras.ops.max(history[:-1]) if self.amax_compute == "max" else history[0]
        return keras.ops.cond(known > 0, lambda: known, just_in_time)


def magnitude(x: Any, axes: tuple[int, ...] | None = None) -> Any:
    """The largest magnitude of a tensor, or along some axes, which then stay with length 1: float32.

    Infinite where the tensor is not finite, on all platforms: a compiler's maximum of floats may leave NaNs out, and so
    their bits say where they are. The maximum itself is of floats, because a compiler for TPUs finds that in the kernel
    that also rounds the tensor, and a maximum of integers in one of its own.
    """
    x = keras.ops.cast(x, "float32")
    is_finite = keras.ops.bitwise_and(backend.bitcast(x, "int32"), _FLOAT32_MAGNITUDE) < _FLOAT32_INFINITY
    magnitudes = keras.ops.where(is_finite, keras.ops.abs(x), float("inf"))
    return over_parts(keras.ops.max(magnitudes, axis=axes, keepdims=axes is not None, initial=0), axes)


def _finite(amax: Any) -> Any:
    return keras.ops.where(keras.ops.isfinite(amax), amax, keras.ops.zeros_like(amax))


def _fraction(bits: Any) -> Any:
    """Of each word a number between 0 and 1 whose mean is 1/2: added to less than 128, it leaves an integer's floor."""
    high = keras.ops.right_shift(bits, keras.ops.convert_to_tensor(16, "uint32"))
    return keras.ops.cast(keras.ops.cast(high, "int32"), "float32") * 2.0**-16 + 2.0**-17


# The three matrix products of an INT8 layer.


FORWARD, TO_INPUTS, TO_KERNEL = range(3)


class MatrixProducts:
    """Matrix products of inputs and a kernel.

    Args:
        equations: of the product, of the gradient of the inputs, and of that of the kernel.
        inputs: their shape.
        kernel: the shape of the whole.
        dtypes: of the result, and of the two gradients.
        recipe: the scaling recipe.
        path: names the products in the compiled program.
        apart: whether the compiler may not fuse what follows into the product.

    Attributes:
        integer: those of the three whose operands are INT8.
    """

    def __init__(
        self,
        equations: tuple[str, str, str],
        inputs: tuple[Any, ...],
        kernel: tuple[Any, ...],
        dtypes: tuple[str, str, str],
        recipe: Int8Scaling,
        path: str,
        apart: bool,
    ):
        self._equations, self._dtypes, self._path, self._apart = equations, dtypes, path, apart
        terms = equations[0].split("->")[0].split(",")
        sizes = dict(zip("".join(terms), (*inputs, *kernel), strict=True))
        wanted = range(3 if recipe.kernel_gradient == "int8" else 2)
        self.integer = {product for product in wanted if _fits(equations[product], sizes)}

    def summed_axes(self, product: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The axes that a product sums over."""
        return summed_axes(self._equations[product])

    def forward(self, x: Quantized, w: Quantized) -> Any:
        """The result."""
        equation, dtype = self._equations[0], self._dtypes[0]
        return quantized_dot(equation, x, w, dtype, "forward", path=self._path, precise=False, apart=self._apart)

    def to_inputs(self, g: Quantized, w: Quantized) -> Any:
        """The gradient of the inputs."""
        return self._gradient(self._equations[1], g, w, self._dtypes[1], "input_gradient")

    def to_kernel(self, x: Quantized, g: Quantized) -> Any:
        """The gradient of the kernel."""
        equation = self._equations[2]
        if TO_KERNEL in self.integer:
            equation, x = _summed_last(equation, _nan_past_int32(equation, x))
        return self._gradient(equation, x, g, self._dtypes[2], "kernel_gradient")

    def _gradient(self, equation: str, left: Quantized, right: Quantized, dtype: str, role: str) -> Any:
        return quantized_dot(equation, left, right, dtype, role, path=self._path, precise=False, apart=False)


def _fits(equation: str, sizes: dict[str, Any]) -> bool:
    """Whether a product sums over few enough terms, or over a number that is not known yet."""
    left, right = equation.split("->")[0].split(",")
    summed = [sizes[label] for label in left if label in right]
    return not all(isinstance(size, int) for size in summed) or math.prod(summed) <= MOST_TERMS


def _summed_last(equation: str, left: Quantized) -> tuple[str, Quantized]:
    """The same product with the axes that it sums over last in its left operand, and in memory.

    A TPU v5e multiplies integers that it adds up along the rows of both operands no faster than bfloat16.
    """
    labels, rest = equation.split(",", 1)
    summed = summed_axes(equation)[0]
    order = [axis for axis in range(len(labels)) if axis not in summed] + list(summed)
    if order == list(range(len(labels))):
        return equation, left
    scale = left.scale if len(left.scale.shape) == 0 else keras.ops.transpose(left.scale, order)
    values = backend.row_major(keras.ops.transpose(backend.row_major(left.values), order))
    return f"{''.join(labels[axis] for axis in order)},{rest}", Quantized(values, scale)


def _nan_past_int32(equation: str, left: Quantized) -> Quantized:
    """Gives an operand the scale NaN where a product of it sums over too many terms, once their number is known."""
    axes = summed_axes(equation)[0]
    if all(isinstance(left.values.shape[axis], int) for axis in axes):
        return left
    sizes = [keras.ops.cast(keras.ops.shape(left.values)[axis], "float32") for axis in axes]
    return Quantized(left.values, keras.ops.where(math.prod(sizes) <= MOST_TERMS, left.scale, float("nan")))


# The product of an INT8 layer and its gradients.


def int8_product(
    inputs: Any, kernel: Any, histories: list[Any], recipe: Int8Scaling, products: MatrixProducts, path: str, part: Any
) -> Any:
    """Multiplies inputs by a kernel as `Int8Scaling` says; the gradients as well.

    Args:
        inputs: floats.
        kernel: floats.
        histories: one history, or none.
        recipe: the scaling recipe.
        products: how the two are multiplied.
        path: of the layer: gradients of two layers of one shape are rounded independently.
        part: how the whole kernel is made of what the devices have; None where `kernel` is whole.

    Returns:
        The product. The gradient of the history is the next history.
    """
    compute_dtype = keras.backend.standardize_dtype(inputs.dtype)
    variable = zlib.crc32(path.encode())

    @backend.custom_gradient
    def multiply(inputs: Any, kernel: Any, *histories: Any) -> Any:
        inputs, kernel = first_order_operands([inputs, kernel], path)
        scope = backend.gradient_scope()
        history = histories[0] if histories else None
        made: dict[tuple[str, int], Quantized] = {}
        amaxes = [magnitude(x) for x in (inputs, kernel)] if histories and not recipe.per_row else []

        def operand(role: str, x: Any, product: int, place: int) -> Quantized:
            own = part if role == "kernel" else None
            axes = products.summed_axes(product)[place] if recipe.per_row else None
            if product not in products.integer:
                return join(Quantized(keras.ops.cast(x, compute_dtype), keras.ops.ones(())), own)
            key = role, product if recipe.per_row else -1
            if key not in made:
                known = None if history is None else history[ROLES.index(role)]
                with scaling(own):
                    made[key] = join(recipe.quantize(x, role, axes, known, variable), own, axes)
            return made[key]

        def gradient(g: Any) -> Any:
            (g,) = first_order_operands([g], path)
            with scope():
                following = []
                if histories:
                    following = [recipe.next_history(history, [*amaxes, magnitude(g)] if amaxes else [])]
                g_for_inputs, g_for_kernel = operand("gradient", g, TO_INPUTS, 0), operand("gradient", g, TO_KERNEL, 1)
                own = products.to_kernel(x_for_kernel, g_for_kernel)
                gradients = [products.to_inputs(g_for_inputs, w_for_inputs), sum_gradients(own, part)]
                return *first_order(gradients, g, [x_for_kernel, w_for_inputs], path), *following

        x, w = operand("input", inputs, FORWARD, 0), operand("kernel", kernel, FORWARD, 1)
        x_for_kernel, w_for_inputs = operand("input", inputs, TO_KERNEL, 0), operand("kernel", kernel, TO_INPUTS, 1)
        return products.forward(x, w), gradient

    return multiply(inputs, kernel, *histories)
