"""How an optimizer's state is stored: in E4M3 with a float32 scale a row, or in bfloat16.

```
scale  = max |x| of a row / 448         float32; a row runs along the last axis
stored = round(x / scale)               E4M3; the largest of a row is exact, a row of zeros stays one
read   = stored * scale
```

A value below 2**-9 of its row's scale, which is 1 / 229,376 of the row's largest, is stored as 0 or as that bound: as a
mean right, in each single step not. A square root, by which steps are divided, is stored as the bound. Scales by rows
and not by blocks: a row lies within a TPU's tiles.
"""

from __future__ import annotations

from typing import Any

from keras import ops

from keras_mp.loss_scaling.stochastic_rounding import round_to_bfloat16, round_to_float8

STATE_DTYPES = ("float32", "bfloat16", "float8")
STORED_AS = {"bfloat16": "bfloat16", "float8": "float8_e4m3fn"}

_LARGEST_E4M3 = 448.0  # Micikevicius et al. 2022, table 1
_SMALLEST_E4M3 = 2.0**-9  # the smallest subnormal
_SMALLEST_SCALE = 2.0**-126  # the smallest normal float32: a quotient by less may be infinite


def check_state_dtype(state_dtype: Any) -> None:
    """Checks the name of a format.

    Raises:
        ValueError: If it is not one of the three.
    """
    if state_dtype not in STATE_DTYPES:
        choices = ", ".join(repr(name) for name in STATE_DTYPES)
        raise ValueError(f"state_dtype={state_dtype!r} must be one of {choices}")


def encode(x: Any, state_dtype: str, bits: Any = None, is_root: bool = False) -> tuple[Any, Any]:
    """Makes what is stored of a float32 tensor.

    Args:
        x: a float32 tensor of two axes or more.
        state_dtype: "float8" or "bfloat16".
        bits: a uint32 tensor of its shape, for stochastic rounding; None for rounding to nearest.
        is_root: whether steps are divided by x. In E4M3 none of its values but zeros then becomes zero: the first
            moment may keep the smallest value where its root did not, and the step be hundreds of times too large.

    Returns:
        (values, scale): the values in E4M3 and a float32 scale for each row, of shape (..., 1); in bfloat16 the scale
        is None.
    """
    if state_dtype == "bfloat16":
        return (ops.cast(x, "bfloat16") if bits is None else round_to_bfloat16(x, bits)), None
    scale = ops.maximum(ops.max(ops.abs(x), axis=-1, keepdims=True) / _LARGEST_E4M3, _SMALLEST_SCALE)
    scaled = x / scale
    if is_root:
        scaled = ops.where(x > 0, ops.maximum(scaled, _SMALLEST_E4M3), scaled)
    return (ops.cast(scaled, "float8_e4m3fn") if bits is None else round_to_float8(scaled, bits)), scale


def decode(values: Any, scale: Any = None) -> Any:
    """Reads what is stored.

    Args:
        values: what `encode` made of a tensor.
        scale: its scale, None in bfloat16.

    Returns:
        A float32 tensor of the shape of the values.
    """
    values = ops.cast(values, "float32")
    return values if scale is None else values * scale
