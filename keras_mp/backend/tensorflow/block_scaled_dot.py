"""Matrix products of operands whose blocks have scales."""

from collections.abc import Callable
from typing import Any


def block_scaled_dot(
    left: Any,
    left_exponents: Any,
    right: Any,
    right_exponents: Any,
    dtype: str,
    *,
    name: str,
    emulate: Callable[..., Any],
) -> Any:
    """Multiplies the rows of two matrices in an MX format.

    TensorFlow has neither the product nor the type of the scales: they are emulated.

    Args:
        left: FP8 of shape (m, k).
        left_exponents: uint8 of shape (m, k / 32), the scales as E8M0.
        right: FP8 of shape (n, k).
        right_exponents: uint8 of shape (n, k / 32).
        dtype: of the result.
        name: of the operation in the compiled program, as of `scaled_dot`.
        emulate: computes the same from the four.

    Returns:
        A tensor of shape (m, n).
    """
    del dtype, name
    return emulate(left, left_exponents, right, right_exponents)
