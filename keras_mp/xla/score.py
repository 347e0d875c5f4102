"""How far published training steps were from their predicted time, by the generation of the chip."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from keras_mp.precision.chips import Chip
from keras_mp.xla.efficiency import generation_of


class Spread(NamedTuple):
    """Published runs on chips of a generation: how many, and the published time divided by the predicted one."""

    runs: int
    least: float
    most: float


# From benchmarks/predictions.json; `python benchmarks/predictions.py` prints these lines.
SPREADS: Mapping[str, Spread] = MappingProxyType(
    {
        "10": Spread(2, 1.15, 1.24),
        "8": Spread(19, 0.55, 1.46),
        "9": Spread(2, 0.78, 0.83),
        "v6e": Spread(1, 0.7, 0.7),
    }
)


def score(chip: Chip) -> str:
    """How far published runs on chips of this generation were from their predicted time, in a sentence."""
    spread = SPREADS.get(generation_of(chip))
    if spread is None:
        return "No published run on a chip of this generation was compared with its prediction."
    runs = f"{spread.runs} published runs" if spread.runs > 1 else "One published run"
    return f"{runs} on chips of this generation took {spread.least:.2f} to {spread.most:.2f} of the predicted time."
