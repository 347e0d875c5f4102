"""Values as JSON has them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np


def plain_values(value: Any) -> Any:
    """Converts a value, and all that is in it, into what JSON can hold.

    Dataclasses and named tuples become dicts, other sequences lists, paths strings, NumPy's numbers Python's, and
    numbers that are not finite the strings "inf", "-inf" and "nan".

    Raises:
        TypeError: there is a value of another type in it.
    """
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Path):
        return str(value)
    if dataclasses.is_dataclass(value):
        return {field.name: plain_values(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return {name: plain_values(getattr(value, name)) for name in value._fields}
    if isinstance(value, Mapping):
        return {str(key): plain_values(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain_values(item) for item in value]
    raise TypeError(f"value={value!r} of type {type(value).__name__} has no form in JSON")
