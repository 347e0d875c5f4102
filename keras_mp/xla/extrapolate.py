"""A step of a deep model, from steps with few of its blocks: equal blocks cost equally."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from operator import attrgetter
from typing import Any

import keras
import numpy as np

from keras_mp.backend.common.lowered import Lowered
from keras_mp.conversion.in_precision import precision_of
from keras_mp.lean.blocks import Block, find_blocks, structure_of
from keras_mp.lean.remat import Remat
from keras_mp.parallel.plan import Plan
from keras_mp.rebuild import layers_below, layers_by_path
from keras_mp.system.whole_number import whole_number
from keras_mp.xla.collectives import Collective
from keras_mp.xla.compile_report import CompileReport
from keras_mp.xla.compiled_step import ScaledBlocks
from keras_mp.xla.estimate import Roofline
from keras_mp.xla.inspect import report_of, target_and_plan
from keras_mp.xla.lower import build_without_values, lower_step
from keras_mp.xla.matmuls import Matmul
from keras_mp.xla.memory import Memory
from keras_mp.xla.pass_over import CannotPassOver, passing_over
from keras_mp.xla.step_time import StepTime

BLOCKS = (4, 8)
_ADDITIVE = ("count", "bytes", "wire", "covered")  # of a collective
ALL_LAYERS = "all layers"


def inspect_by_blocks(
    model: keras.Model | Callable[[], keras.Model],
    batch: Any,
    target: str = "host",
    *,
    blocks: tuple[int, int] = BLOCKS,
    training: bool = True,
    flags: dict[str, Any] | None = None,
    strategy: str | Plan | None = None,
    chips: int | None = None,
) -> CompileReport:
    """Compiles a step with few blocks of a deep model, and with more, and gives the line through both at its depth.

    Of each group of equal blocks that `keras_mp.lean.blocks.find_blocks` finds, all but the first few return their
    input while the step is traced, and their weights are left out. The first compilation has `blocks[0]` of every
    group; then each group by itself has `blocks[1]`, and the growth of all groups is added up. A group of `blocks[1]`
    blocks or fewer is compiled whole. The model is left as it was, but its metrics and losses are built, as by
    `inspect`.

    Args:
        model, batch, target, training, flags, strategy, chips: as for `keras_mp.inspect`.
        blocks: how many blocks of a group are compiled, the second larger than the first. On TPUs not fewer than 4:
            with 2 the compiler fetches weights further ahead, and needs more memory than with 4.

    Returns:
        The report at full depth, whose `extrapolated` says from how many blocks. Weights and slots are exact. The
        compiler's figures of memory are on the line; temporary memory that falls from few blocks to more is taken as it
        is. Products are those of a block, repeated. The arrays listed, and the layers that write float32, are those
        of the most blocks compiled. Where no group is deep enough, or none can be passed over, the report of `inspect`.

    Raises:
        ValueError: blocks are not two rising numbers; and what `keras_mp.inspect` raises.
    """
    chip, plan = target_and_plan(target, strategy, chips)
    if not isinstance(model, keras.Model) and callable(model):
        model = build_without_values(model)

    def compiled(lowered: Lowered) -> CompileReport:
        return report_of(lowered, chip, precision_of(model), training=training, flags=flags, plan=plan)

    try:
        steps = lower_by_blocks(model, batch, training=training, platform=chip.platform, plan=plan, blocks=blocks)
    except CannotPassOver as error:
        lowered = lower_step(model, batch, training=training, platform=chip.platform, plan=plan)
        whole = compiled(lowered)
        return dataclasses.replace(whole, notes=(*whole.notes, f"Compiled with all blocks: {error}."))
    return steps.at_depth([compiled(lowered) for lowered in steps.lowered])


def lower_by_blocks(
    model: keras.Model,
    batch: Any,
    *,
    training: bool = True,
    platform: str,
    plan: Plan | None = None,
    blocks: tuple[int, int] = BLOCKS,
    deeper_than: int = 0,
) -> StepsByBlocks:
    """Lowers the steps with few of a model's blocks whose figures give those at its depth.

    Args:
        model, batch, training, platform, plan: as for `keras_mp.xla.lower.lower_step`.
        blocks: as for `inspect_by_blocks`.
        deeper_than: groups of so many blocks or fewer are left whole.

    Raises:
        CannotPassOver: If no group is deep enough, or a block cannot be passed over.
        ValueError: If blocks are not two rising numbers; and as `lower_step` does.
    """
    few, many = _checked(blocks)
    least = max(many, deeper_than)
    groups = [group for group in groups_of(model) if len(group) > least]
    if not groups:
        raise CannotPassOver(f"no group has more than {least} equal blocks")

    def lowered(deeper: Any) -> Lowered:
        with passing_over(model, groups, [many if group is deeper else few for group in groups]):
            return lower_step(model, batch, training=training, platform=platform, plan=plan)

    steps = tuple(lowered(deeper) for deeper in (None, *groups))
    paths = {id(layer): path for path, layer in layers_by_path(model).items()}
    renamed = [[_names(block, group[few // 2], paths) for block in group[few:]] for group in groups]
    scaled = tuple(ScaledBlocks(group[0].path, len(group), (few, many)) for group in groups)
    return StepsByBlocks(steps, scaled, tuple(name for names in renamed for name in names))


def _names(block: Block, like: Block, paths: dict[int, str]) -> dict[str, str]:
    """For each layer in a block, by its path, the path of the layer in its place in another."""
    inside = [[part for layer in one.layers for part in (layer, *_below(layer))] for one in (like, block)]
    pairs = zip(*inside, strict=True)
    return {paths.get(id(old), old.name): paths.get(id(new), new.name) for old, new in pairs}


def _below(layer: keras.Operation) -> list[keras.Layer]:
    return list(layers_below(layer)) if isinstance(layer, keras.layers.Layer) else []


@dataclasses.dataclass(frozen=True)
class StepsByBlocks:
    """Steps of a deep model with few of its blocks.

    Args:
        lowered: first the step with few blocks of every group; then for each group one with more of it.
        scaled: the groups.
        repeated: for each block that was left out, which layer of a block that computes each of its layers is like.
    """

    lowered: tuple[Lowered, ...]
    scaled: tuple[ScaledBlocks, ...]
    repeated: tuple[dict[str, str], ...]

    def at_depth(self, reports: Sequence[CompileReport]) -> CompileReport:
        """The report of the step with all blocks, from those of `lowered`, in their order."""
        base, *grown = reports
        most = grown[-1]
        along = _Along(base, grown, tuple(group.times for group in self.scaled))
        products = [*base.matmuls, *_repeated(base.matmuls, self.repeated)]
        names = "; ".join(f"{group} like {group.first!r}" for group in self.scaled)
        note = (
            f"Extrapolated from {names}: memory, time and collectives are on the line through what was compiled. "
            "Casts, arrays and sums in 16 bits are listed as compiled."
        )
        sent, time = _collectives(along), most.link_time
        wire, covered = (sum(getattr(collective, name) for collective in sent) for name in ("wire", "covered"))
        return dataclasses.replace(
            most,
            matmuls=tuple(products),
            memory=_memory(along),
            roofline=_roofline(along),
            time=_time(along),
            collectives=sent,
            link_time=time and dataclasses.replace(time, wire=wire, seconds=wire / time.rate, covered=covered),
            notes=(*most.notes, note),
            advice=tuple(advice for advice in most.advice if advice.seconds or advice.at_most),
            seconds=sum(report.seconds for report in reports),
            extrapolated=self.scaled,
            refused=next((report.refused for report in reports if report.refused), ""),
        )


def groups_of(model: keras.Model) -> list[tuple[Block, ...]]:
    """The blocks of a model, and layers that are recomputed and in which none is found."""
    groups = find_blocks(model)
    inside = {id(layer) for group in groups for block in group for layer in block.layers}
    alike: dict[Any, list[Block]] = defaultdict(list)
    for path, layer in layers_by_path(model).items():
        if isinstance(layer, Remat) and inside.isdisjoint(map(id, [layer, *layers_below(layer)])):
            size = sum(math.prod(weight.shape) * np.dtype(weight.dtype).itemsize for weight in layer.weights)
            structure = structure_of(layer)
            alike[structure].append(Block(path, "layer", (layer,), size, structure))
    return groups + [tuple(blocks) for blocks in alike.values()]


def line(start: float, ends: Sequence[float], times: Sequence[Fraction]) -> float:
    """A figure at full depth, on the line through what was compiled.

    Args:
        start: with few blocks of all groups.
        ends: for each group, with many of it.
        times: for each group, how often the growth from few to many is added.
    """
    return float(start + sum(n * (Fraction(end) - Fraction(start)) for n, end in zip(times, ends, strict=True)))


def rising(start: float, ends: Sequence[float], times: Sequence[Fraction]) -> float:
    """The same of a figure that more blocks do not make smaller: where it falls, the largest that was compiled."""
    return max(start, *ends, line(start, [max(start, end) for end in ends], times))


@dataclasses.dataclass(frozen=True)
class _Along:
    """The reports that a line goes through: with few blocks, and for each group with many."""

    base: CompileReport
    grown: Sequence[CompileReport]
    times: Sequence[Fraction]

    def __call__(self, way: Callable[..., float], value: Callable[[CompileReport], float]) -> float:
        return way(value(self.base), [value(report) for report in self.grown], self.times)

    @property
    def reports(self) -> list[CompileReport]:
        return [self.base, *self.grown]


def _memory(along: _Along) -> Memory:
    def on(way: Callable[..., float], *names: str) -> dict[str, Any]:
        return {name: round(along(way, attrgetter(f"memory.{name}"))) for name in names}

    exact = on(line, "parameters", "optimizer", "other", "arguments", "outputs", "aliased")
    compilers = on(rising, "temporary", "activations", "code")
    whole = exact["arguments"] + exact["outputs"] - exact["aliased"] + compilers["temporary"]
    peak = max(whole, on(line, "peak")["peak"])
    return dataclasses.replace(along.grown[-1].memory, **exact, **compilers, peak=peak)


def _roofline(along: _Along) -> Roofline | None:
    if any(report.roofline is None for report in along.reports):
        return None
    compute, memory, cycles = (along(line, attrgetter(f"roofline.{name}")) for name in ("compute", "memory", "cycles"))
    return Roofline(max(compute, memory), compute, memory, round(cycles))


def _time(along: _Along) -> StepTime | None:
    if any(report.time is None for report in along.reports):
        return None
    return StepTime(*(along(line, attrgetter(f"time.{part.name}")) for part in dataclasses.fields(StepTime)))


def _collectives(along: _Along) -> tuple[Collective, ...]:
    """Those of all layers together, by kind, dtype and number of devices."""
    alike = {_sort(collective): collective for report in along.reports for collective in report.collectives}

    def total(sort: tuple[str, str, int], name: str) -> int:
        def of(report: CompileReport) -> int:
            return sum(getattr(collective, name) for collective in report.collectives if _sort(collective) == sort)

        return round(along(line, of))

    sums: dict[tuple[str, str, int], Any] = {sort: {name: total(sort, name) for name in _ADDITIVE} for sort in alike}
    extrapolated = [
        dataclasses.replace(collective, layer=ALL_LAYERS, **sums[sort]) for sort, collective in alike.items()
    ]
    return tuple(sorted(extrapolated, key=lambda collective: -collective.wire))


def _sort(collective: Collective) -> tuple[str, str, int]:
    return collective.kind, collective.dtype, collective.group


def _repeated(products: Sequence[Matmul], blocks: Sequence[dict[str, str]]) -> Iterator[Matmul]:
    """The products of the blocks that were left out: those of one that computes, under their names."""
    for names in blocks:
        for product in products:
            if product.layer in names:
                yield dataclasses.replace(product, layer=names[product.layer])


def _checked(blocks: tuple[int, int]) -> tuple[int, int]:
    few, many = (whole_number("blocks", count) for count in blocks)
    if few >= many:
        raise ValueError(f"blocks must be two rising numbers, such as {BLOCKS}, got {blocks!r}")
    return few, many
