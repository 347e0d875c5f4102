"""What the compiler, or the shapes alone, say of a step under a set of measures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from keras_mp.xla.memory import Buffer


@dataclass(frozen=True)
class Figures:
    """A step under a set of measures, of one device, in bytes and operations.

    Args:
        weights: with those that do not train.
        optimizer: its slots, accumulated gradients among them.
        other: metrics and the batch.
        activations: of the temporary memory what the forward pass keeps for the backward pass, an estimate.
        temporary: all that is needed between the arguments and the results, by the compiler.
        peak: of the whole step.
        flops: of the products, by the dtype of the rate that they run at.
        moved: bytes that kernels read and write.
        largest: the largest arrays when memory is fullest, an estimate.
        seconds: that the compiler took, now or when the result that was kept was made.
        notes: how it was compiled, where not as usual.
    """

    weights: int
    optimizer: int
    other: int
    activations: int
    temporary: int
    peak: int
    flops: Mapping[str, float]
    moved: float
    largest: tuple[Buffer, ...]
    seconds: float
    notes: tuple[str, ...] = ()

    @property
    def state(self) -> int:
        """What lasts from step to step, and the batch."""
        return self.weights + self.optimizer + self.other

    def pressure(self, capacity: int) -> float:
        """What is needed beside the state, by the room for it; 1 or below where the step fits."""
        room = capacity - self.state
        return (self.peak - self.state) / room if room > 0 else float("inf")


@dataclass(frozen=True)
class Roofline:
    """The least time of a step at a chip's rates, in seconds. An estimate: no kernel reaches them.

    Args:
        compute: all products at the peak rate of their dtype.
        memory: what kernels read and write at the memory's bandwidth.
    """

    compute: float
    memory: float

    @property
    def seconds(self) -> float:
        """The larger of the two."""
        return max(self.compute, self.memory)

    @property
    def bound(self) -> str:
        """What limits the step: "compute" or "bandwidth"."""
        return "compute" if self.compute >= self.memory else "bandwidth"
