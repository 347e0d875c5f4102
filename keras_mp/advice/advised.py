"""Which chips hold the training of a model, as data."""

from __future__ import annotations

from dataclasses import dataclass

from keras_mp.advice.chip_advice import ChipAdvice


@dataclass(frozen=True)
class Advised:
    """Which chips hold the training of a model, and what makes it fit.

    Args:
        model: its name.
        backend: "tensorflow" or "jax".
        parameters: number of its weights' elements.
        batch: shape and dtype of each array of the batch, which is that of all devices and micro-batches.
        rows: a `ChipAdvice` for each chip, in the order of the targets.
        compiles: how many steps were compiled, or taken from what was kept.
        kept: how many of these were taken from what an earlier call compiled.
        seconds: that the whole took.
        notes: what to know about the figures.
        versions: of the packages that compiled.
    """

    model: str
    backend: str
    parameters: int
    batch: tuple[str, ...]
    rows: tuple[ChipAdvice, ...]
    compiles: int
    kept: int
    seconds: float
    notes: tuple[str, ...]
    versions: dict[str, str]

    def __getitem__(self, target: str) -> ChipAdvice:
        """The row of a target, by the name that it was asked for."""
        for row in self.rows:
            if row.target == target:
                return row
        raise KeyError(f"no row {target!r}: there are {', '.join(row.target for row in self.rows)}")
