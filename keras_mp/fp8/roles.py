"""The three operands of an FP8 layer's products, and the format of each."""

from __future__ import annotations

import dataclasses
from typing import Any

from keras_mp.precision.formats import E4M3, E5M2, FLOAT8_FORMATS, Format, format_named

ROLES = ("input", "kernel", "gradient")


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
