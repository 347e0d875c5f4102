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
        "10": Spread(5, 1.15, 2.44),
        "8": Spread(40, 0.55, 1.58),
        "9": Spread(14, 0.78, 1.86),
        "a10": Spread(3, 1.22, 1.58),
        "a100": Spread(15, 0.55, 1.46),
        "a100-40gb": Spread(7, 1.01, 1.21),
        "a100-40gb-pcie": Spread(3, 0.92, 1.49),
        "b200": Spread(5, 1.15, 2.44),
        "gh200": Spread(3, 1.46, 1.85),
        "h100": Spread(5, 0.78, 1.76),
        "h100-pcie": Spread(3, 1.26, 1.63),
        "h200": Spread(3, 1.38, 1.86),
        "rtx3090": Spread(3, 0.81, 1.04),
        "rtx4090": Spread(3, 0.92, 1.01),
        "rtx6000ada": Spread(3, 1.24, 1.58),
        "rtxa6000": Spread(3, 1.06, 1.2),
        "v5e": Spread(1, 0.7, 0.7),
    }
)
# Of these the runs whose source compiles its step, as the kit does.
COMPILED: Mapping[str, Spread] = MappingProxyType(
    {
        "10": Spread(2, 1.15, 1.24),
        "8": Spread(5, 1.02, 1.18),
        "9": Spread(2, 0.78, 0.83),
        "a100-40gb": Spread(5, 1.02, 1.18),
        "b200": Spread(2, 1.15, 1.24),
        "h100": Spread(2, 0.78, 0.83),
        "v5e": Spread(1, 0.7, 0.7),
    }
)


def scored_as(chip: Chip) -> tuple[str, ...]:
    """The keys in `SPREADS`: the chip's own, and a GPU's generation; TPUs of several generations share constants."""
    return (chip.name,) if chip.vendor == "google" else (chip.name, generation_of(chip))


def score(chip: Chip) -> str:
    """How far published runs on this chip, or else its generation, were from their predicted time, in a sentence."""
    key = next((key for key in scored_as(chip) if key in SPREADS), None)
    if key is None:
        return "No published run on a chip of this generation was compared with its prediction."
    spread, compiled = SPREADS[key], COMPILED.get(key)
    which = "this chip" if key == chip.name else "chips of this generation"
    runs = f"{spread.runs} published runs" if spread.runs > 1 else "One published run"
    those = ""
    if compiled and compiled.runs < spread.runs:
        those = f"; those whose source compiles its step ({compiled.runs}) took {_range(compiled)}"
    return f"{runs} on {which} took {_range(spread)} of the predicted time{those}."


def _range(spread: Spread) -> str:
    return f"{spread.least:.2f} to {spread.most:.2f}" if spread.runs > 1 else f"{spread.least:.2f}"
