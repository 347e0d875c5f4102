"""One chip's search: what it has learned so far, and its row in the end."""

from __future__ import annotations

from dataclasses import dataclass, field

from keras_mp.advice.figures import Figures
from keras_mp.advice.measures import Measures
from keras_mp.advice.place import Place

# XLA for GPUs saves memory where a step comes near to what the chip has: only well below this share is the result for
# one chip that for another. It saves a fifth at most; what needs more than this times the room does not fit at all.
UNCONSTRAINED = 0.7
OUT_OF_REACH = 2.0
# Extrapolated figures do not contain what it saves: by them, temporary memory of GPT-2 XL with LoRA on an H100 was 1.27
# times what it is.
DOUBTED = 1.3


@dataclass
class Known:
    """A compiled step of a family: for which of its chips, under which measures.

    Args:
        place: the chip.
        measures: what was compiled.
        figures: the result.
    """

    place: Place
    measures: Measures
    figures: Figures

    def holds_for(self, place: Place) -> bool:
        """Whether the result is that of another chip of the family, too, as far as fitting goes."""
        if place.chip.name == self.place.chip.name:
            return True
        if self.figures.peak <= UNCONSTRAINED * min(place.capacity, self.place.capacity):
            return True
        larger = self.place.capacity > place.capacity
        return larger and self.figures.pressure(place.capacity) > OUT_OF_REACH


@dataclass
class Asked:
    """A chip, and what its search has asked for.

    Args:
        place: the chip.
        tried: the figures of each set of measures that was compiled.
        origins: for which chip it was.
        failure: why the search was given up; "" where it ended by itself.
    """

    place: Place
    tried: dict[Measures, Figures] = field(default_factory=dict)
    origins: dict[Measures, Place] = field(default_factory=dict)
    failure: str = ""
    best: Measures | None = None

    @property
    def nearest(self) -> Measures | None:
        """The set that fits, or the one that needs the least."""
        if self.best is not None or not self.tried:
            return self.best
        return min(self.tried, key=lambda measures: self.tried[measures].peak)


def is_doubted(figures: Figures, place: Place) -> bool:
    """Whether figures are extrapolated and miss by so little that the step may fit a GPU."""
    extrapolated = place.platform == "cuda" and bool(figures.extrapolated)
    return extrapolated and 1 < figures.pressure(place.capacity) <= DOUBTED
