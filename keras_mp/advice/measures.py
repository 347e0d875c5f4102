"""Sets of measures that save memory, in order of what they cost the user."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Measures:
    """What is changed of a training step so that it takes less memory.

    Args:
        precision: the policy that the model is built under: "float32", "mixed_float16" or "mixed_bfloat16".
        lean: whether `keras_mp.make_lean` exchanges its layers.
        micro_batches: into how many parts a device's rows of a batch are divided; their gradients are accumulated.
        remat: whether its blocks are recomputed in the backward pass.
        strategy: how several devices share the step: "data" or "fully_sharded"; "" on one.
    """

    precision: str
    lean: bool = False
    micro_batches: int = 1
    remat: bool = False
    strategy: str = ""

    @property
    def words(self) -> str:
        """The measures as a reader calls them, the precision first."""
        named = [self.precision]
        named += ["lean"] if self.lean else []
        named += ["remat"] if self.remat else []
        if self.micro_batches > 1:
            named.append(f"{self.micro_batches} micro-batches")
        if self.strategy:
            named.append({"data": "data parallel", "fully_sharded": "fully sharded"}[self.strategy])
        return ", ".join(named)


@dataclass(frozen=True)
class Possible:
    """The measures that a model, a batch and a backend allow.

    Args:
        precision: the policy.
        rows: of one device's part of a batch.
        lean: whether some layer has a lean form.
        remat: whether the model has blocks.
    """

    precision: str
    rows: int
    lean: bool
    remat: bool


# Sets over which the memory of a step falls, each at the cost of the one before it.
Stage = tuple[Measures, ...]


def stages(possible: Possible, strategy: str = "") -> list[Stage]:
    """Lists all sets of measures of a strategy in order of what they cost, the cheapest first.

    A lean model computes the same at the same speed, and costs a line. Accumulation costs the speed of small products.
    Remat costs a third more operations. Each comes with those before it but accumulation, without which remat is tried
    first.

    Args:
        possible: what can be taken.
        strategy: how several devices share the step.

    Returns:
        Stages: one set, or the same set with more and more micro-batches.
    """
    forms = [Measures(possible.precision, strategy=strategy)]
    if possible.lean:
        forms.append(Measures(possible.precision, lean=True, strategy=strategy))
    numbers = parts(possible.rows)
    ladder: list[Stage] = [(form,) for form in forms]
    ladder.append(tuple(_divided(forms[-1], number) for number in numbers))
    if possible.remat:
        remat = Measures(possible.precision, lean=possible.lean, remat=True, strategy=strategy)
        ladder += [(remat,), tuple(_divided(remat, number) for number in numbers)]
    return [stage for stage in ladder if stage]


def parts(rows: int) -> list[int]:
    """The numbers of micro-batches that rows can be divided into: powers of two that divide them, and the rows."""
    numbers = [2**power for power in range(1, rows.bit_length()) if rows % 2**power == 0]
    return numbers if not rows > 1 or rows in numbers else [*numbers, rows]


def _divided(measures: Measures, micro_batches: int) -> Measures:
    return Measures(measures.precision, measures.lean, micro_batches, measures.remat, measures.strategy)
