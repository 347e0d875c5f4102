"""How far published training steps were from their predicted time, by the chip."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from keras_mp.precision.chips import Chip
from keras_mp.xla.efficiency import generation_of


class Spread(NamedTuple):
    """Published runs on a chip or a generation of chips: how many, and their published time by the predicted one."""

    runs: int
    least: float
    most: float


# By chip, and by generation for the chips without a run. From benchmarks/predictions.json;
# `python benchmarks/predictions.py` prints these lines.
SPREADS: Mapping[str, Spread] = MappingProxyType(
    {
    }
)


def scored_as(chip: Chip) -> tuple[str, ...]:
    """The keys in `SPREADS`: the chip's own, and a GPU's generation; TPUs of several generations share constants."""
    return (chip.name,) if chip.vendor == "google" else (chip.name, generation_of(chip))


def score(chip: Chip) -> str:
    """How far published runs on this chip, or else its generation, were from their predicted time, in a sentence."""
    for key in scored_as(chip):
        if key in SPREADS:
            spread = SPREADS[key]
            which = "this chip" if key == chip.name else "chips of this generation"
            if spread.runs == 1:
                return f"One published run on {which} took {spread.least:.2f} of the predicted time."
            took = f"{spread.least:.2f} to {spread.most:.2f}"
            return f"{spread.runs} published runs on {which} took {took} of the predicted time."
    return "No published run on a chip of this generation was compared with its prediction."
