"""The measures that save memory, one entry each, and sets of them in order of what they change."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from keras_mp.lowering import Change, Source
from keras_mp.reporting import remedies

PLAIN, SAME, TIME, OTHER = "no measure", "computes the same", "costs time", "trains another way"
KINDS = (PLAIN, SAME, TIME, OTHER)
"""What a set of measures changes, the least first."""


@dataclass(frozen=True)
class Measure:
    """One way in which a training step takes less memory.

    Args:
        name: the name that reports call it by.
        kind: `SAME`, `TIME` or `OTHER`.
        code: the line of a program that takes it.
        change: the function of the kit that takes it.
        options: the arguments of that function, but for the number of micro-batches.
        helps: the name in `Outline.helped` by which a model has something that it makes smaller; "" where that is told
            by the sizes of the weights and the optimizer's slots.
        note: a sentence on what to know of it.
        includes: other measures, which the line takes, too.
        policy: the policy that the model is built under instead of the chip's policy; "" where that stays.
        divides: whether it is taken more than once, with more and more micro-batches.
        undivided: whether it rules out micro-batches.
        libtpu: the version of libtpu from which it compiles for TPUs; empty where every version does.
    """

    name: str
    kind: str
    code: str
    change: str
    options: Mapping[str, Any] = field(default_factory=dict)
    helps: str = ""
    note: str = ""
    includes: tuple[str, ...] = ()
    policy: str = ""
    divides: bool = False
    undivided: bool = False
    libtpu: tuple[int, ...] = ()


FLOAT8, BFLOAT16 = "float8", "bfloat16"
_IN_8_BITS = {"state_dtype": FLOAT8}
MEASURES = (
    Measure("frozen in 16 bits", SAME, remedies.NARROW_FROZEN, "narrow_frozen"),
    Measure("lean", SAME, remedies.LEAN, "make_lean", helps="make_lean"),
    Measure(
        "remat",
        TIME,
        remedies.RECOMPUTE,
        "make_lean",
        {"remat": True},
        helps="remat",
        note="Remat computes the forward pass of each block again: about a third more operations.",
        includes=("lean",),
    ),
    Measure(
        f"{FLOAT8} states",
        OTHER,
        remedies.STATES.format(dtype=FLOAT8),
        "change_optimizer",
        _IN_8_BITS,
        note=f"The optimizer's states are rounded to {FLOAT8} after each step, stochastically: the training "
        "differs slightly from one with float32 states.",
    ),
    Measure(
        f"{BFLOAT16} weights",
        OTHER,
        remedies.STATES.format(dtype=FLOAT8),
        "change_optimizer",
        _IN_8_BITS,
        note="Weights are bfloat16, with no float32 copy, and each update is rounded stochastically: updates are "
        "noisier than in float32, and some trainings converge worse.",
        includes=(f"{FLOAT8} states",),
        policy=BFLOAT16,
    ),
    Measure(
        "gradients released",
        OTHER,
        remedies.RELEASED.format(dtype=FLOAT8),
        "change_optimizer",
        _IN_8_BITS | {"release_gradients": True},
        helps="release_gradients",
        note="Each weight is updated as soon as its own gradient is computed: a gradient that is not finite leaves its "
        "own weight unchanged, and the others are updated.",
        includes=(f"{FLOAT8} states", f"{BFLOAT16} weights"),
        undivided=True,
    ),
    Measure(
        "states on the host",
        OTHER,
        remedies.ON_HOST.format(dtype=FLOAT8),
        "change_optimizer",
        _IN_8_BITS | {"state_memory": "host", "release_gradients": True},
        note="The optimizer's states lie in the host's memory, and cross to the device and back in each step. Nobody "
        "has run this on a GPU or a TPU here.",
        includes=(f"{FLOAT8} states", f"{BFLOAT16} weights", "gradients released"),
        undivided=True,
        libtpu=(0, 0, 52),  # that of jax 0.10 lays out 8-bit arrays otherwise on the host, and refuses the copy
    ),
    Measure("micro-batches", TIME, remedies.MICRO_BATCHES, "change_optimizer", divides=True),
)
"""All measures, those of a kind in the order in which they are tried: each comes with those of its kind before it."""

_STRATEGIES = {"": PLAIN, "data": PLAIN, "fully_sharded": TIME, "tensor": TIME}


@dataclass(frozen=True)
class Measures:
    """Changes of a training step that save memory.

    Args:
        precision: the policy that pays on the chip: "float32", "mixed_float16" or "mixed_bfloat16".
        names: the names of the measures that are taken, but for micro-batches.
        micro_batches: the number of parts into which a device's rows of a batch are divided; their gradients are
            accumulated.
        strategy: the way in which several devices share the step: "data", "fully_sharded" or "tensor"; "" on one.
    """

    precision: str
    names: tuple[str, ...] = ()
    micro_batches: int = 1
    strategy: str = ""

    @property
    def taken(self) -> list[Measure]:
        """The entries, in the order in which they are applied."""
        return [one for one in MEASURES if (self.micro_batches > 1 if one.divides else one.name in self.names)]

    @property
    def applied(self) -> list[Measure]:
        """The measures whose lines of code a program needs."""
        included = {name for one in self.taken for name in one.includes}
        return [one for one in self.taken if one.name not in included]

    @property
    def changes(self) -> tuple[Change, ...]:
        """The measures as changes of the model, in the order in which they are made."""
        steps = {"accumulate": self.micro_batches}
        return tuple(Change(one.change, steps if one.divides else one.options) for one in self.applied)

    @property
    def policy(self) -> str:
        """The policy under which the model is built."""
        return next((one.policy for one in self.taken if one.policy), self.precision)

    @property
    def kind(self) -> str:
        """The gravest kind of change among the measures, one of `KINDS`."""
        return max((_STRATEGIES[self.strategy], *(one.kind for one in self.taken)), key=KINDS.index)

    @property
    def words(self) -> str:
        """The measures as a reader calls them, the policy first."""
        words = [self.policy, *(one.name for one in self.taken if one.kind != OTHER and not one.divides)]
        words += [f"{self.micro_batches} micro-batches"] if self.micro_batches > 1 else []
        words += [one.name for one in self.taken if one.kind == OTHER and not one.policy]
        if self.strategy:
            words.append({"data": "data parallel"}.get(self.strategy, self.strategy.replace("_", " ")))
        return ", ".join(words)

    @property
    def state(self) -> Measures:
        """The measures that decide which weights and slots there are: on one device, without micro-batches."""
        return Measures(self.precision, tuple(one.name for one in self.taken if not one.helps and not one.divides))

    def plus(self, measure: Measure) -> Measures:
        """These measures and one more."""
        return self.with_names((*self.names, measure.name))

    def with_names(self, names: Sequence[str]) -> Measures:
        """The same with other measures."""
        return replace(self, names=tuple(one.name for one in MEASURES if one.name in names))


# Sets over which the memory of a step falls, each at the cost of the one before it.
Stage = tuple[Measures, ...]
# Whether a measure makes anything smaller, beside those that are taken already.
Helps = Callable[[Measures, Measure], bool]


def ladders(
    precision: str, strategies: Sequence[str], rows: Callable[[str], int], helps: Helps
) -> Iterator[list[Stage]]:
    """Yields the stages of all strategies, least change first.

    Every strategy comes with what trains in the same way first, and then with what trains in another. Where weights and
    states alone are larger than the memory, shapes say so of all sets before, and none of them is compiled.

    Args:
        precision: the policy that pays on the chip.
        strategies: the ways in which several devices can share the step, the simplest first; `[""]` on one.
        rows: the rows of one device's part of a batch, by the strategy.
        helps: a function that is called as late as possible: to know the answer, the model is built.
    """
    base = Measures(precision)
    others: list[Measure | None] = [None, *(one for one in MEASURES if one.kind == OTHER)]
    for other in others:
        if other is not None:
            if not helps(base, other):
                continue
            base = base.plus(other)
        for strategy in strategies:
            yield stages(replace(base, strategy=strategy), rows(strategy), helps)


def stages(base: Measures, rows: int, helps: Helps) -> list[Stage]:
    """Lists a strategy's sets of measures, least cost first.

    Each measure comes with those before it but micro-batches, without which the next is tried first.

    Args:
        base: the strategy, and what is taken besides.
        rows: the rows of one device's part of a batch.
        helps: a function, as for `ladders`.

    Returns:
        Stages: one set, or the same set with more and more micro-batches.
    """
    numbers = [] if any(one.undivided for one in base.taken) else parts(rows)
    form = base
    ladder: list[Stage] = [(base,)]
    for measure in (one for one in MEASURES if one.kind == SAME):
        if helps(form, measure):
            form = form.plus(measure)
            ladder.append((form,))
    ladder.append(_divided(form, numbers))
    for measure in (one for one in MEASURES if one.kind == TIME and not one.divides):
        if helps(form, measure):
            form = form.plus(measure)
            ladder += [(form,), _divided(form, numbers)]
    return [stage for stage in ladder if stage]


def parts(rows: int) -> list[int]:
    """Numbers of micro-batches that rows divide into: powers of two."""
    numbers = [2**power for power in range(1, rows.bit_length()) if rows % 2**power == 0]
    return numbers if not rows > 1 or rows in numbers else [*numbers, rows]


def _divided(measures: Measures, numbers: Sequence[int]) -> Stage:
    return tuple(replace(measures, micro_batches=number) for number in numbers)


def lines(measures: Measures, source: Source, devices: int, rows: int) -> tuple[str, ...]:
    """Writes the measures as code, from the policy to `fit`.

    Args:
        devices: the number of devices that share the step.
        rows: the rows of the whole batch.
    """
    changes = measures.policy != source.precision
    before, within = [], []
    if source.is_function:
        if changes:
            before.append(remedies.POLICY.format(precision=measures.policy))
        within.append(f"model = {source.text}")
    else:
        within += [f"model = {source.text}"] if source.text else []
        within += [remedies.PRECISION_OF_MODEL.format(precision=measures.policy)] if changes else []
    within += [measure.code.format(steps=measures.micro_batches) for measure in measures.applied]
    within.append(f"model.fit(x, y, batch_size={rows // measures.micro_batches})")
    if measures.strategy:
        before.append(remedies.DEVICES.format(strategy=measures.strategy, devices=devices))
        within = [f"    {line}" for line in within]
    return (*before, *within)
