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
        "v5e": Spread(1, 0.7, 0.7),
    }
)


def scored_as(chip: Chip) -> str:
    """The key in `SPREADS`: a GPU's generation, and a TPU by itself, whose generations share constants."""
    return chip.name if chip.vendor == "google" else generation_of(chip)


def score(chip: Chip) -> str:
    """How far published runs on chips of this generation were from their predicted time, in a sentence."""
    spread = SPREADS.get(scored_as(chip))
    if spread is None:
        return "No published run on a chip of this generation was compared with its prediction."
    if spread.runs == 1:
        return f"One published run on a chip of this generation took {spread.least:.2f} of the predicted time."
    took = f"{spread.least:.2f} to {spread.most:.2f}"
    return f"{spread.runs} published runs on chips of this generation took {took} of the predicted time."
