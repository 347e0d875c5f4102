"""What is advised for one chip, as data."""

from __future__ import annotations

from dataclasses import dataclass

from keras_mp.advice.figures import Figures
from keras_mp.advice.measures import Measures
from keras_mp.xla.estimate import Roofline

COMPILED, FROM_SHAPES = "compiled", "shapes alone"


@dataclass(frozen=True)
class ChipAdvice:
    """Whether a chip holds a training step, and under which measures; a row of the report.

    Args:
        target: the chip as it was asked for, such as "rtx4090x4".
        title: its name as people write it, with the number of chips.
        devices: how many share the step.
        capacity: memory of one device, in bytes, of a GPU as its driver reports it.
        fits: whether it holds the step under `measures`; None where this is not known.
        measures: the cheapest set that fits; where none does, the one that comes nearest; None where nothing was
            compiled.
        figures: of one device under these measures; from shapes alone, temporary memory is 0.
        roofline: what the chip's rates allow, an estimate, of one micro-batch; None where nothing was compiled.
        time: of an update, all of its micro-batches, predicted, in seconds; None where nothing was compiled for this
            chip itself.
        how: "compiled", "shapes alone", or how else the figures were found.
        reason: where it does not fit, what takes the memory; where this is not known, why.
        code: the lines that apply the measures, runnable where `build` is.
        compiles: how many sets of measures were compiled for this chip.
        shared: of these, how many were compiled for another chip of the report already.
        notes: what to know of the measures.
    """

    target: str
    title: str
    devices: int
    capacity: int
    fits: bool | None
    measures: Measures | None
    figures: Figures
    roofline: Roofline | None
    how: str
    reason: str = ""
    code: tuple[str, ...] = ()
    compiles: int = 0
    shared: int = 0
    notes: tuple[str, ...] = ()
    time: float | None = None

    @property
    def missing(self) -> int:
        """Bytes by which the step is larger than the memory; 0 where it fits, or where this is not known."""
        return max(0, self.figures.peak - self.capacity) if self.fits is False else 0

    @property
    def verdict(self) -> str:
        """In a word: "fits", "does not fit" or "not known"."""
        return {True: "fits", False: "does not fit", None: "not known"}[self.fits]
