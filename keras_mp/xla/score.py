"""How far published training steps were from their predicted time, by the generation of the chip."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple


class Spread(NamedTuple):
    """Published runs on chips of a generation: how many, and the published time divided by the predicted one."""

    runs: int
    least: float
    most: float


# From benchmarks/predictions.json; `python benchmarks/predictions.py` prints these lines.
SPREADS: Mapping[str, Spread] = MappingProxyType(
    {
        "8": Spread(13, 1.03, 1.74),
        "9": Spread(2, 0.75, 0.8),
    }
)
