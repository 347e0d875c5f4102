"""Sets of measures that save memory, in order of what they cost the user."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Measures:
    """What is changed of a training step so that it takes less memory.

    Args:
        precision: the policy that the model is built under: "float32", "mixed_float16" or "mixed_bfloat16".
        lean: whether `keras_mp.make_lean` exchanges its layers.
        micro_batches: into how many parts a device's rows of a batch are divided; their gradients are accumulated.
        remat: whether its blocks are recomputed in the backward pass.
        strategy: how several devices share the step: "data" or "fully_sharded"; "" on one.
        state_dtype: what the optimizer's slots are stored in: "float8"; "" where they stay as they are.
    """

    precision: str
    lean: bool = False
    micro_batches: int = 1
    remat: bool = False
    strategy: str = ""
    state_dtype: str = ""

    @property
    def words(self) -> str:
        """The measures as a reader calls them, the precision first."""
        named = [self.precision]
        named += ["lean"] if self.lean else []
        named += ["remat"] if self.remat else []
        if self.micro_batches > 1:
            named.append(f"{self.micro_batches} micro-batches")
        if self.state_dtype:
            named.append(f"{self.state_dtype} states")
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
        states: whether the optimizer has slots that take less in 8 bits.
    """

    precision: str
    rows: int
    lean: bool
    remat: bool
    states: bool = False


# Sets over which the memory of a step falls, each at the cost of the one before it.
Stage = tuple[Measures, ...]


def ladders(possible: Possible, strategies: Sequence[str]) -> list[list[Stage]]:
    """Lists the stages of all strategies, in order of what they cost.

    Every strategy comes with the states as they are first. Then each comes with states in 8 bits: these cost no time,
    and the training is slightly another, so what computes the same is tried before. Where weights and states alone are
    larger than the memory, shapes say so of all sets before, and none of them is compiled.

    Args:
        possible: what can be taken.
        strategies: how several devices can share the step, the simplest first; `[""]` on one.
    """
    dtypes = ["", "float8"] if possible.states else [""]
    return [stages(possible, strategy, dtype) for dtype in dtypes for strategy in strategies]


def stages(possible: Possible, strategy: str = "", state_dtype: str = "") -> list[Stage]:
    """Lists all sets of measures of a strategy in order of what they cost, the cheapest first.

    A lean model computes the same at the same speed, and costs a line. Accumulation costs the speed of small products.
    Remat costs a third more operations. Each comes with those before it but accumulation, without which remat is tried
    first.

    Args:
        possible: what can be taken.
        strategy: how several devices share the step.
        state_dtype: what the optimizer's slots are stored in.

    Returns:
        Stages: one set, or the same set with more and more micro-batches.
    """
    plain = Measures(possible.precision, strategy=strategy, state_dtype=state_dtype)
    forms = [plain, replace(plain, lean=True)] if possible.lean else [plain]
    numbers = parts(possible.rows)
    ladder: list[Stage] = [(form,) for form in forms]
    ladder.append(_divided(forms[-1], numbers))
    if possible.remat:
        remat = replace(forms[-1], remat=True)
        ladder += [(remat,), _divided(remat, numbers)]
    return [stage for stage in ladder if stage]


def parts(rows: int) -> list[int]:
    """The numbers of micro-batches that rows can be divided into: powers of two that divide them, and the rows."""
    numbers = [2**power for power in range(1, rows.bit_length()) if rows % 2**power == 0]
    return numbers if not rows > 1 or rows in numbers else [*numbers, rows]


def _divided(measures: Measures, numbers: Sequence[int]) -> Stage:
    return tuple(replace(measures, micro_batches=number) for number in numbers)
