"""A step of a deep model, from steps with few of its blocks: equal blocks cost equally."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import Any

import keras
import numpy as np

from keras_mp.lean.blocks import Block, find_blocks, structure_of
from keras_mp.lean.remat import Remat
from keras_mp.parallel.plan import Plan
from keras_mp.rebuild import layers_below, layers_by_path
from keras_mp.system.whole_number import whole_number
from keras_mp.xla.collectives import Collective
from keras_mp.xla.compile_report import CompileReport
from keras_mp.xla.compiled_step import ScaledBlocks
from keras_mp.xla.estimate import Roofline
from keras_mp.xla.inspect import inspect
from keras_mp.xla.lower import build_without_values
from keras_mp.xla.matmuls import Matmul
from keras_mp.xla.memory import Memory
from keras_mp.xla.pass_over import CannotPassOver, passing_over

BLOCKS = (4, 8)
_ADDITIVE = ("count", "bytes")  # of a collective


def inspect_by_blocks(
    model: keras.Model | Callable[[], keras.Model],
    batch: Any,
    target: str = "host",
    *,
    blocks: tuple[int, int] = BLOCKS,
    training: bool = True,
    flags: dict[str, Any] | None = None,
    strategy: str | Plan | None = None,
    chips: int = 4,
) -> CompileReport:
    """Compiles a step with few blocks of a deep model, and with more, and gives the line through both at its depth.

    Of each group of equal blocks that `keras_mp.lean.blocks.find_blocks` finds, all but the first few return their
    input while the step is traced, and their weights are left out. The first compilation has `blocks[0]` of every group; then each
    group by itself has `blocks[1]`, and the growth of all groups is added up. A group of `blocks[1]` blocks or fewer
    is compiled whole. The model is left as it was, except that metrics and losses are built, as by `inspect`.

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
    few, many = _checked(blocks)
    if not isinstance(model, keras.Model) and callable(model):
        model = build_without_values(model)
    arguments = {"training": training, "flags": flags, "strategy": strategy, "chips": chips}

    def compiled(groups: Sequence[tuple[Block, ...]], kept: Sequence[int]) -> CompileReport:
        with passing_over(model, groups, kept):
            return inspect(model, batch, target, **arguments)

    groups = [group for group in _groups(model) if len(group) > many]
    try:
        if not groups:
            raise CannotPassOver(f"no group has more than {many} equal blocks")
        base = compiled(groups, [few] * len(groups))
        grown = [compiled(groups, [many if g is group else few for g in groups]) for group in groups]
    except CannotPassOver as error:
        whole = inspect(model, batch, target, **arguments)
        return dataclasses.replace(whole, notes=(*whole.notes, f"Compiled with all blocks: {error}."))
    scaled = [_Scaled(group, few, many, report) for group, report in zip(groups, grown, strict=True)]
    return _at_depth(model, base, scaled)


def _groups(model: keras.Model) -> list[tuple[Block, ...]]:
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


@dataclasses.dataclass(frozen=True)
class _Scaled:
    """A group of blocks, and the report with `many` of them and `few` of the other groups."""

    group: tuple[Block, ...]
    few: int
    many: int
    report: CompileReport

    @property
    def times(self) -> Fraction:
        """How often the growth from few blocks to many is added to reach all."""
        return Fraction(len(self.group) - self.few, self.many - self.few)


def _at_depth(model: keras.Model, base: CompileReport, scaled: Sequence[_Scaled]) -> CompileReport:
    most = scaled[-1].report
    products = [*base.matmuls, *_repeated(model, base.matmuls, scaled)]
    names = ", ".join(f"{s.few} and {s.many} of {len(s.group)} blocks like {s.group[0].name!r}" for s in scaled)
    note = (
        f"Extrapolated from {names}: memory, time and collectives are on the line through what was compiled. Casts, "
        f"arrays and sums in 16 bits are listed as compiled."
    )
    return dataclasses.replace(
        most,
        matmuls=tuple(products),
        memory=_memory(base, scaled),
        roofline=_roofline(base, scaled),
        collectives=_collectives(base, scaled),
        notes=(*most.notes, note),
        advice=tuple(advice for advice in most.advice if advice.seconds or advice.at_most),
        seconds=base.seconds + sum(s.report.seconds for s in scaled),
        extrapolated=tuple(ScaledBlocks(s.group[0].path, len(s.group), (s.few, s.many)) for s in scaled),
    )


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


def _along(
    way: Callable[[float, Sequence[float], Sequence[Fraction]], float],
    value: Callable[[CompileReport], float],
    base: CompileReport,
    scaled: Sequence[_Scaled],
) -> float:
    return way(value(base), [value(s.report) for s in scaled], [s.times for s in scaled])


def _memory(base: CompileReport, scaled: Sequence[_Scaled]) -> Memory:
    def on(way: Callable[..., float], name: str) -> int:
        return round(_along(way, lambda report: getattr(report.memory, name), base, scaled))

    exact = {name: on(line, name) for name in ("parameters", "optimizer", "other", "arguments", "outputs", "aliased")}
    temporary = on(rising, "temporary")
    whole = exact["arguments"] + exact["outputs"] - exact["aliased"] + temporary
    return dataclasses.replace(
        scaled[-1].report.memory,
        **exact,
        temporary=temporary,
        activations=on(rising, "activations"),
        code=on(rising, "code"),
        peak=max(whole, on(line, "peak")),
    )


def _roofline(base: CompileReport, scaled: Sequence[_Scaled]) -> Roofline | None:
    if any(report.roofline is None for report in (base, *(s.report for s in scaled))):
        return None
    compute, memory, cycles = (
        _along(line, lambda report, name=name: getattr(report.roofline, name), base, scaled)  # type: ignore[misc]
        for name in ("compute", "memory", "cycles")
    )
    return dataclasses.replace(
        base.roofline, seconds=max(compute, memory), compute=compute, memory=memory, cycles=round(cycles)
    )


def _collectives(base: CompileReport, scaled: Sequence[_Scaled]) -> tuple[Collective, ...]:
    """Those of all layers together, by kind and dtype."""
    reports = (base, *(s.report for s in scaled))
    alike = {_sort(collective): collective for report in reports for collective in report.collectives}

    def total(sort: tuple[str, str], name: str) -> int:
        def of(report: CompileReport) -> int:
            return sum(getattr(collective, name) for collective in report.collectives if _sort(collective) == sort)

        return round(_along(line, of, base, scaled))

    extrapolated = [
        dataclasses.replace(collective, **{name: total(sort, name) for name in _ADDITIVE})
        for sort, collective in alike.items()
    ]
    return tuple(sorted(extrapolated, key=lambda collective: -collective.bytes))


def _sort(collective: Collective) -> tuple[str, str]:
    return collective.kind, collective.dtype


def _repeated(model: keras.Model, products: Sequence[Matmul], scaled: Sequence[_Scaled]) -> Iterator[Matmul]:
    """The products of the blocks that were not compiled: those of one in the middle of the few, under their names."""
    paths = {id(layer): path for path, layer in layers_by_path(model).items()}
    for group, few in ((s.group, s.few) for s in scaled):
        for block in group[few:]:
            for layer, like in zip(block.layers, group[few // 2].layers, strict=True):
                old, new = (paths.get(id(part), part.name) for part in (like, layer))
                for product in products:
                    if product.layer == old or product.layer.startswith(f"{old}/"):
                        yield dataclasses.replace(product, layer=new + product.layer[len(old) :])


def _checked(blocks: tuple[int, int]) -> tuple[int, int]:
    few, many = (whole_number("blocks", count) for count in blocks)
    if few >= many:
        raise ValueError(f"blocks must be two rising numbers, such as {BLOCKS}, got {blocks!r}")
    return few, many
