"""What scaling recipes are made of: roles of operands and their formats, magnitudes, counts of steps, the base."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, NamedTuple

import keras

from keras_mp.precision import formats
from keras_mp.precision.formats import E4M3, E5M2, FLOAT8_FORMATS, Format, format_named
from keras_mp.system.packages import package_of

# The three operands of an FP8 layer's products, and the format of each.

ROLES = ("input", "kernel", "gradient")
AMAX_RULES = ("max", "most_recent")


@dataclasses.dataclass(frozen=True)
class RoleFormats:
    """The format of each role.

    Args:
        input: of what the layer is given.
        kernel: of its weights.
        gradient: of the gradient that comes back to it.

    Raises:
        ValueError: two roles have E5M2. Each role meets each other in one of the three products, and no GPU multiplies
            E5M2 with E5M2 (NVIDIA, cuBLAS documentation, cublasLtMatmul, supported FP8 types).
    """

    input: Format = E4M3
    kernel: Format = E4M3
    gradient: Format = E5M2

    def __post_init__(self) -> None:
        for role in ROLES:
            object.__setattr__(self, role, format_named(getattr(self, role), FLOAT8_FORMATS))
        wide = [role for role in ROLES if getattr(self, role) == E5M2]
        if len(wide) > 1:
            raise ValueError(
                f"format gives E5M2 to {' and '.join(wide)}, whose product would be E5M2 times E5M2, which no GPU "
                "computes: give E5M2 to one role at most, as HYBRID does to the gradient"
            )


HYBRID = RoleFormats(input=E4M3, kernel=E4M3, gradient=E5M2)
"""E4M3 forward, E5M2 for gradients, whose range is wider (Micikevicius et al. 2022, arXiv:2209.05433, section 3)."""


def check_role(role: str) -> None:
    """Raises a ValueError unless there is such a role."""
    if role not in ROLES:
        raise ValueError(f"role={role!r} is not one of {', '.join(map(repr, ROLES))}")


def role_formats(format: Any) -> RoleFormats:
    """Reads the `format` of a scaling recipe.

    Args:
        format: a `RoleFormats`, a dict from role to format, "hybrid", or one format for all.

    Returns:
        The format of each role.

    Raises:
        ValueError: it is none of these.
    """
    if isinstance(format, RoleFormats):
        return format
    if isinstance(format, dict):
        unknown = [role for role in format if role not in ROLES]
        if unknown:
            raise ValueError(f"format has the role {unknown[0]!r}, which is not one of {', '.join(map(repr, ROLES))}")
        return RoleFormats(**format)
    if isinstance(format, str) and format.lower() == "hybrid":
        return HYBRID
    if isinstance(format, Format) or (isinstance(format, str) and format.upper() in FLOAT8_FORMATS):
        everywhere = format_named(format, FLOAT8_FORMATS)
        return RoleFormats(everywhere, everywhere, everywhere)
    raise ValueError(f"format={format!r} is unknown: use 'hybrid', 'E4M3', or a format for each role")


# The largest magnitude of a tensor, also of one of which each device quantizes a part.

_scaled: list[Any] = []


@contextmanager
def scaling(part: Any) -> Iterator[None]:
    """Within it a scaling recipe quantizes a part of a tensor."""
    _scaled.append(part)
    try:
        yield
    finally:
        _scaled.pop()


def over_parts(amax: Any, axes: tuple[int, ...] | None = None) -> Any:
    """The largest magnitude of a whole tensor, from that of the part that is being quantized.

    Args:
        amax: float32, the largest magnitude along some axes.
        axes: these; None for all.
    """
    part = _scaled[-1] if _scaled else None
    return amax if part is None or not lies_in(part, axes) else part.largest(amax)


def amax_of(x: Any) -> Any:
    """The largest magnitude of a tensor, float32 of shape (); 0 where it is not finite, or the tensor is empty."""
    # Of float32 values, as they are scaled: so one pass can do both.
    amax = over_parts(keras.ops.max(keras.ops.abs(keras.ops.cast(x, "float32")), initial=0))
    return keras.ops.where(keras.ops.isfinite(amax), amax, keras.ops.zeros_like(amax))


def lies_in(part: Any, axes: tuple[int, ...] | None) -> bool:
    """Whether the axis that is split is one of these; None stands for all."""
    return axes is None or part.axis in [axis % len(part.shape) for axis in axes]


# The number of updates that a history counts, in float32.

# Float32 counts each step up to here; what follows counts in the upper half again, so that no two neighbours are equal.
_STEPS = 2.0**24


def next_step(steps: Any) -> Any:
    """Counts one more.

    Args:
        steps: float32 of any shape, whole numbers of 0 or more.

    Returns:
        float32 of the shape: steps + 1, and 2^23 after 2^24 - 1.
    """
    following = steps + 1.0
    return keras.ops.where(following < _STEPS, following, _STEPS / 2)


# The base of scaling recipes: formats by role, and the scale that brings a magnitude to the top of a format.


class Quantized(NamedTuple):
    """An FP8 tensor and its scale.

    Attributes:
        values: x . scale, rounded to FP8.
        scale: float32, of shape (), or of one that broadcasts to that of values.
    """

    values: Any
    scale: Any


class Recipe:
    """The interface of scaling recipes.

    A scaling recipe is a value, a frozen dataclass: two that are equal do the same, and it is saved with the layer.
    One of your own is a subclass, of this class or of one of the kit's, that answers `quantize`; Keras finds it in a
    file by the name that `keras.saving.register_keras_serializable` gives it.

    Attributes:
        format: the format of each role.
        power_of_two: whether scales are rounded down to a power of two.
        history_length: of how many steps before it needs the amaxes; 0 where it keeps none.
        counts_steps: whether it needs the number of updates so far.
        operands: what products multiply, for messages: "FP8" or "INT8".
        per_row: whether a tensor has many scales, which lie along the axes that a product does not sum over. Then each
            product has copies of its own.
    """

    format: RoleFormats
    power_of_two: bool
    per_row: ClassVar[bool] = False
    counts_steps: ClassVar[bool] = False
    operands: ClassVar[str] = "FP8"

    def __post_init__(self) -> None:
        object.__setattr__(self, "format", role_formats(self.format))
        if not isinstance(self.power_of_two, bool):
            raise ValueError(f"power_of_two={self.power_of_two!r} must be True or False")

    def __repr__(self) -> str:
        """The call that makes an equal scaling recipe, without what is the default."""
        different = [field for field in _arguments(self) if getattr(self, field.name) != field.default]
        written = [f"{field.name}={_written(getattr(self, field.name))}" for field in different]
        return f"{type(self).__name__}({', '.join(written)})"

    @property
    def history_length(self) -> int:
        return 0

    @property
    def is_static(self) -> bool:
        """Whether its scales stay as they are after the first steps."""
        return False

    @property
    def takes_parts(self) -> bool:
        """Whether `quantize` scales a part of a tensor as the whole: those of the kit do (`fp8/quantized_dot.py`)."""
        return package_of(type(self).quantize) == "keras_mp"

    def format_of(self, role: str) -> Format:
        """The format of a role."""
        check_role(role)
        return getattr(self.format, role)

    def quantize(self, x: Any, role: str, axes: tuple[int, ...] | None = None, history: Any = None) -> Quantized:
        """Scales a tensor into the format of its role.

        Args:
            x: floats of any shape.
            role: "input", "kernel" or "gradient".
            axes: those that the product sums over, for a scaling recipe with a scale a row.
            history: float32 of shape (history_length,), amaxes of the steps before, the newest first, for a scaling
                recipe that needs them; None for the first step.

        Returns:
            The FP8 tensor and its scale.

        Raises:
            ValueError: there is no such role.
        """
        raise NotImplementedError

    def amax(self, x: Any, history: Any) -> Any:
        """The magnitude of a tensor that goes into the history of its step.

        Args:
            x: floats of any shape.
            history: float32 of shape (3, history_length), as `next_history` takes it.

        Returns:
            float32 of shape (), 0 where x is not finite.
        """
        del history
        return amax_of(x)

    def next_history(self, history: Any, amaxes: list[Any]) -> Any:
        """Puts the amaxes of a step before those of the steps before it, and drops the oldest.

        Args:
            history: float32 of shape (3, history_length), by role, the newest step first; and one column more, the
                number of steps, where these are counted.
            amaxes: float32 of shape (), by role.

        Returns:
            float32 of history's shape.
        """
        return keras.ops.concatenate([keras.ops.stack(amaxes)[:, None], history[:, :-1]], axis=1)

    def get_config(self) -> dict[str, Any]:
        """The arguments that make an equal recipe, as Keras saves them, the formats by their names."""
        by_role = {role: getattr(self.format, role).name for role in ROLES}
        return {field.name: getattr(self, field.name) for field in _arguments(self)} | {"format": by_role}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Recipe:
        """The scaling recipe of a config."""
        return cls(**config)

    def scaled(self, x: Any, role: str, amax: Any, margin: int = 0) -> Quantized:
        """Scales a tensor so that a magnitude comes to the top of the role's format, and rounds it.

        Args:
            x: floats of any shape.
            role: "input", "kernel" or "gradient".
            amax: the magnitude, float32 of shape (), or of one that broadcasts to x's.
            margin: how many powers of two below the top it comes.

        Returns:
            The FP8 tensor and its scale, which is 1 where amax is 0, infinite or NaN, and at most 2^126.

        Raises:
            ValueError: there is no such role.
        """
        format = self.format_of(role)
        scale = formats.scale_to(format.max * 2.0**-margin, amax, self.power_of_two)
        return Quantized(formats.quantize(x, format, scale), scale)


def _written(value: Any) -> str:
    if not isinstance(value, RoleFormats):
        return repr(value)
    names = {role: getattr(value, role).name for role in ROLES}
    return "'hybrid'" if value == HYBRID else repr(names["input"] if len(set(names.values())) == 1 else names)


def _arguments(recipe: Recipe) -> list[dataclasses.Field]:
    return [field for field in dataclasses.fields(recipe) if field.init]  # type: ignore[arg-type]
