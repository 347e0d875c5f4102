"""Recipes: which format each operand of a matrix product takes, and how it is scaled into it."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import keras

from keras_mp import backend
from keras_mp.fp8 import formats
from keras_mp.fp8.formats import E4M3, E5M2, Float8Format, format_named

ROLES = ("input", "kernel", "gradient")

# The largest power of two whose reciprocal is a normal float32: a smaller one would be flushed to zero.
MAX_SCALE = 2.0**126

# Sign and exponent of a float32.
_EXPONENT_BITS = -1 << 23


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

    input: Float8Format = E4M3
    kernel: Float8Format = E4M3
    gradient: Float8Format = E5M2

    def __post_init__(self) -> None:
        for role in ROLES:
            object.__setattr__(self, role, format_named(getattr(self, role)))
        wide = [role for role in ROLES if getattr(self, role) == E5M2]
        if len(wide) > 1:
            raise ValueError(
                f"format gives E5M2 to {' and '.join(wide)}, whose product would be E5M2 times E5M2, which no GPU "
                "computes: give E5M2 to one role at most, as HYBRID does to the gradient"
            )


HYBRID = RoleFormats(input=E4M3, kernel=E4M3, gradient=E5M2)
"""E4M3 forward, E5M2 for gradients, whose range is wider (Micikevicius et al. 2022, arXiv:2209.05433, section 3)."""


class Quantized(NamedTuple):
    """An FP8 tensor and its scale.

    Attributes:
        values: x . scale, rounded to FP8.
        scale: float32, of shape ().
    """

    values: Any
    scale: Any


class Recipe:
    """What a recipe must answer.

    A recipe is a value: two that are equal do the same, and it is saved with the layer.
    """

    def quantize(self, x: Any, role: str) -> Quantized:
        """Scales a tensor into the format of its role.

        Args:
            x: floats of any shape.
            role: "input", "kernel" or "gradient".

        Returns:
            The FP8 tensor and its scale.

        Raises:
            ValueError: there is no such role.
        """
        raise NotImplementedError

    def get_config(self) -> dict[str, Any]:
        """The arguments that make an equal recipe, as Keras saves them."""
        raise NotImplementedError

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Recipe:
        """The recipe of a config."""
        return cls(**config)


@keras.saving.register_keras_serializable("keras_mp")
@dataclasses.dataclass(frozen=True)
class CurrentScaling(Recipe):
    """A scale per tensor, from the tensor itself. There is no state.

        amax  = max |x|
        scale = min(max of the format / amax, 2^126)        1 where amax is 0, infinite or NaN
        scale = 2^floor(log2 scale)                         with power_of_two
        x8    = cast(x . scale)                             x = x8 / scale

    The scale is float32 and finite. Where x holds an infinity or a NaN it is 1, and x8 holds a NaN or an infinity
    there.

    Formula: Micikevicius et al., "FP8 Formats for Deep Learning", 2022 (arXiv:2209.05433), section 3.

    Args:
        format: the formats by role: `HYBRID` or "hybrid"; one format, such as `E4M3` or "E4M3", for all; a
            `RoleFormats`; or a dict from role to format.
        power_of_two: whether scales are rounded down to a power of two, so that scaling itself rounds nothing.

    Raises:
        ValueError: unknown format or role, or two roles in E5M2.
    """

    format: RoleFormats = HYBRID
    power_of_two: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "format", _role_formats(self.format))
        if not isinstance(self.power_of_two, bool):
            raise ValueError(f"power_of_two={self.power_of_two!r} must be True or False")

    def format_of(self, role: str) -> Float8Format:
        """The format of a role."""
        if role not in ROLES:
            raise ValueError(f"role={role!r} is not one of {', '.join(map(repr, ROLES))}")
        return getattr(self.format, role)

    def quantize(self, x: Any, role: str) -> Quantized:
        format = self.format_of(role)
        # Of an empty batch, too.
        amax = keras.ops.cast(keras.ops.max(keras.ops.abs(x), initial=0), "float32")
        scale = keras.ops.minimum(format.max / amax, MAX_SCALE)
        if self.power_of_two:
            scale = backend.bitcast(keras.ops.bitwise_and(backend.bitcast(scale, "int32"), _EXPONENT_BITS), "float32")
        usable = keras.ops.logical_and(amax > 0, keras.ops.isfinite(amax))
        scale = keras.ops.where(usable, scale, keras.ops.ones_like(scale))
        return Quantized(formats.quantize(x, format, scale), scale)

    def get_config(self) -> dict[str, Any]:
        by_role = {role: getattr(self.format, role).name for role in ROLES}
        return {"format": by_role, "power_of_two": self.power_of_two}


def _role_formats(format: Any) -> RoleFormats:
    if isinstance(format, RoleFormats):
        return format
    if isinstance(format, dict):
        unknown = [role for role in format if role not in ROLES]
        if unknown:
            raise ValueError(f"format has the role {unknown[0]!r}, which is not one of {', '.join(map(repr, ROLES))}")
        return RoleFormats(**format)
    if isinstance(format, str) and format.lower() == "hybrid":
        return HYBRID
    if isinstance(format, Float8Format) or (isinstance(format, str) and format.upper() in formats.FORMATS):
        each = format_named(format)
        return RoleFormats(each, each, each)
    raise ValueError(f"format={format!r} is unknown: use 'hybrid', 'E4M3', or a format for each role")


RECIPES: dict[str, type[Recipe]] = {"current": CurrentScaling}


def get_recipe(recipe: Any = None) -> Recipe:
    """Finds a recipe.

    Args:
        recipe: a recipe, its name ("current"), its serialized config, or None for `CurrentScaling()`.

    Returns:
        The recipe.

    Raises:
        ValueError: it is none of these.
    """
    if recipe is None:
        return CurrentScaling()
    if isinstance(recipe, dict):
        recipe = keras.saving.deserialize_keras_object(recipe)
    if isinstance(recipe, Recipe):
        return recipe
    if isinstance(recipe, str) and recipe in RECIPES:
        return RECIPES[recipe]()
    known = ", ".join(repr(name) for name in RECIPES)
    raise ValueError(
        f"recipe={recipe!r} is unknown: use {known}, or a recipe such as CurrentScaling(power_of_two=True)"
    )
