"""A compile report on the terminal."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from rich.console import Group
from rich.text import Text

from keras_mp.precision.chips import CHIPS
from keras_mp.reporting.table import ColumnTable
from keras_mp.reporting.text import byte_size, listed
from keras_mp.xla.collectives import Collective
from keras_mp.xla.matmuls import NOT_COMPILED, Matmul
from keras_mp.xla.memory import Memory
from keras_mp.xla.step_time import score
from keras_mp.xla.suggestions import Advice

if TYPE_CHECKING:
    from keras_mp.xla.compile_report import CompileReport

_ROWS = 40
_LAYER = 32  # characters of a product's sizes
_PACKED = {"int4": "int4, two to a byte"}
UNALIGNED = "unaligned sizes"


def render(report: CompileReport) -> Group:
    """The report for rich."""
    parts: list = [Text(headline(report), style="bold"), _matmuls(report)]
    parts += [sensitive(report, 10)] if report.sensitive else []
    parts += [precision(report, 4, 5)] if report.casts or not report.refused else []
    parts += [_memory(report), *map(Text, filter(None, [room(report)]))]
    parts += [_collectives(report)] if report.collectives else []
    parts += [largest(report)] if report.memory.largest else []
    parts += [compared(report)] if report.compared else []
    parts += [Text(f"Note: {note}") for note in report.notes]
    # The verdict, last: a terminal shows the end.
    parts += [*map(Text, report.asked_and_compiled), Text(speed(report)), _advice(report)]
    return Group(*parts)


def headline(report: CompileReport) -> str:
    """What was compiled, for what, by what."""
    step = "training step" if report.training else "inference step"
    batch = ", ".join(report.batch)
    where = f"{report.devices} devices of {report.title}, {report.layout}" if report.layout else report.title
    return f"{report.model}: a {step} on {batch} in {report.precision}, lowered by {report.backend}, for {where}"


def _matmuls(report: CompileReport) -> ColumnTable:
    groups: dict[tuple, list[Matmul]] = defaultdict(list)
    for matmul in report.matmuls:
        key = (matmul.role, matmul.kind, matmul.sizes, matmul.asked, matmul.compiled, matmul.kernel, matmul.note)
        groups[key].append(matmul)
    table = ColumnTable(
        f"Dots and convolutions: {scaled(report.flops)}FLOP a step",
        ("layer", "role", "rows x sum x columns", "asked", "compiled", "summed in", "kernel", "share", UNALIGNED),
        narrow=("layer", "role", "asked", "compiled", "share"),
        right=("share",),
    )
    ordered = sorted(groups.values(), key=lambda group: -sum(matmul.flops for matmul in group))
    for group in ordered[:_ROWS]:
        first = group[0]
        table.add_row(
            first.layer if len(group) == 1 else f"{first.layer} and {len(group) - 1} more",
            first.role,
            sizes(first),
            short(first.asked),
            compiled_as(first),
            first.accumulation,
            first.kernel,
            f"{sum(matmul.flops for matmul in group) / max(1, report.flops):.1%}",
            unaligned(first),
        )
    if len(ordered) > _ROWS:
        table.caption = f"and {len(ordered) - _ROWS} more kinds: to_json() and to_html() have all"
    return table


def unaligned(matmul: Matmul) -> str:
    """The sizes that are no multiple of 8, of 16, or of 128, each under the smallest that it misses."""
    missed = []
    seen: set[int] = set()
    for multiple in (8, 16, 128):
        sizes = [size for size in dict.fromkeys(matmul.off(multiple)) if size not in seen]
        seen.update(sizes)
        if sizes:
            missed.append(f"{listed([*map(str, sizes)], _LAYER, 'sizes')} not divisible by {multiple}")
    return "; ".join(missed)


def sensitive(report: CompileReport, most: int | None = None) -> ColumnTable:
    """Exponentials and sums in 16 bits, at most so many."""
    names = ("layer", "what", "asked", "compiled", "values")
    table = ColumnTable("Exponentials and sums asked for in 16 bits", names, names, ("values",))
    for entry in report.sensitive[:most]:
        table.add_row(entry.layer, entry.kind, entry.dtype, entry.compiled or "-", scaled(entry.elements))
    if len(table.rows) < len(report.sensitive):
        table.caption = f"and {len(report.sensitive) - len(table.rows)} more"
    return table


def precision(report: CompileReport, casts: int | None = None, layers: int | None = None) -> ColumnTable:
    """Casts, and float32 arrays written: so many kinds, and so many layers."""
    names = ("what", "count", "size")
    table = ColumnTable("Casts, and float32 arrays written", names, names, names[1:])
    for cast in report.casts[:casts]:
        table.add_row(f"casts from {cast.source} to {cast.target}, asked for", str(cast.count), byte_size(cast.bytes))
    count, size = report.cast_kernels
    if not report.refused:
        table.add_row("kernels that only cast and move, compiled", str(count), byte_size(size))
    for work in report.float32_work[:layers]:
        table.add_row(f"float32 arrays written by {work.layer}", "", byte_size(work.bytes))
    return table


def _memory(report: CompileReport) -> ColumnTable:
    names = ("what", "size")
    table = ColumnTable("Memory of one device" if report.layout else "Memory", names, names, ("size",))
    for what, size in memory_rows(report):
        table.add_row(what, byte_size(size))
    return table


def room(report: CompileReport) -> str:
    """Whether the step fits in the memory of the chip, and what is left or missing, a sentence; "" if not known."""
    memory = report.memory
    if not memory.capacity:
        return ""
    gap = byte_size(abs(memory.capacity - memory.peak))
    verdict = f"the step fits, and {gap} are left" if memory.fits else f"the step does not fit: {gap} are missing"
    chip = CHIPS.get(report.target)
    title = report.title
    if chip is not None and chip.devices > 1:
        title = f"A device of {title} ({chip.devices} devices a chip)"
    left = " for a program" if report.refused else ""
    return f"{title} has {byte_size(memory.capacity)}{left}: {verdict}."


def memory_rows(report: CompileReport) -> list[tuple[str, int]]:
    """What takes memory, in bytes."""
    memory = report.memory
    return [
        ("weights", memory.parameters),
        *((f"of them in {_PACKED.get(dtype, dtype)}", size) for dtype, size in memory.integers.items()),
        (optimizer_title(memory), memory.optimizer),
        ("metrics and batch", memory.other),
        ("temporary (compiler)", memory.temporary),
        ("of it kept for the backward pass (estimate)", memory.activations),
        ("peak (compiler)", memory.peak),
        # TPUs keep it there; `advise` ends their compiler before it is made, and says so.
        *(
            [("of it the program", memory.code)]
            if report.target in CHIPS and CHIPS[report.target].vendor == "google"
            else []
        ),
    ]


def optimizer_title(memory: Memory) -> str:
    """What a report calls the optimizer's variables: with their dtype where that is not float32."""
    dtype = memory.optimizer_dtype
    return "optimizer" if dtype == "float32" else f"optimizer, {dtype}"


def _collectives(report: CompileReport) -> ColumnTable:
    groups: dict[tuple[str, str, int], list[Collective]] = defaultdict(list)
    for collective in report.collectives:
        groups[collective.kind, collective.dtype, collective.group].append(collective)
    names = ("kind", "dtype", "devices", "arrays", "whole", "on the wire", "beside products", "layers")
    table = ColumnTable(
        "Collectives a step, bytes of one device", names, ("kind", "dtype", "on the wire", "layers"), right=names[2:7]
    )
    for (kind, dtype, group), sent in groups.items():
        table.add_row(
            kind,
            dtype,
            str(group or "-"),
            str(sum(collective.count for collective in sent)),
            byte_size(sum(collective.bytes for collective in sent)),
            byte_size(sum(collective.wire for collective in sent)),
            share_of(sum(collective.covered for collective in sent), sum(collective.wire for collective in sent)),
            _layers([collective.layer for collective in sent]),
        )
    return table


def share_of(part: int, whole: int) -> str:
    """How much of some bytes others are, in percent."""
    return f"{part / max(1, whole):.0%}"


def _layers(layers: list[str]) -> str:
    """The first of them, which sends the most, and how many others."""
    return layers[0] if len(layers) == 1 else f"{layers[0]} and {len(layers) - 1} more"


def largest(report: CompileReport) -> ColumnTable:
    """The largest arrays when memory is fullest."""
    title = "The largest arrays when memory is fullest (estimate, from the order of kernels)"
    names = ("layer", "what", "array", "size")
    table = ColumnTable(title, names, names, ("size",))
    for buffer in report.memory.largest:
        table.add_row(buffer.layer, buffer.what, f"{buffer.dtype}{list(buffer.shape)}", byte_size(buffer.bytes))
    return table


def compared(report: CompileReport) -> ColumnTable:
    """The step in all precisions that it was compiled in."""
    names = ("16- or 8-bit share", "temporary", "peak", "fits", "bound, ms (estimate)", "cycles (estimate)")
    narrow = ("precision", "temporary", "peak", "bound, ms (estimate)")
    table = ColumnTable("In other precisions", ("precision", *names), narrow, right=names)
    for name, other in {report.precision: report, **report.compared}.items():
        low = sum(share for dtype, share in other.shares.items() if "float32" not in dtype and dtype != "none")
        table.add_row(
            name,
            f"{low:.1%}",
            byte_size(other.memory.temporary),
            byte_size(other.memory.peak),
            "yes" if other.memory.fits else "no",
            f"{other.roofline.seconds * 1e3:.3g}" if other.roofline else "-",
            scaled(other.roofline.cycles) if other.roofline and other.roofline.cycles else "-",
        )
    return table


def speed(report: CompileReport) -> str:
    """The estimates of time, in a sentence or two."""
    return " ".join(filter(None, (_time(report), _speed(report), _link_time(report))))


def _time(report: CompileReport) -> str:
    time = report.time
    if time is None:
        return ""
    sent = f", collectives beside which nothing runs {time.uncovered * 1e3:.3g} ms" if report.devices > 1 else ""
    return (
        f"Predicted time of a step: {time.seconds * 1e3:.3g} ms (products {time.products * 1e3:.3g} ms, other kernels "
        f"{time.other * 1e3:.3g} ms{sent}). {score(CHIPS[report.target])}"
    )


def _speed(report: CompileReport) -> str:
    if report.refused:
        return f"No estimate of time: the compiler refuses the step ({report.refused})."
    if report.roofline is None and report.layout == "tensor":
        return "No estimate of the products' time: the compiler divides them over the devices."
    if report.roofline is None:
        return "No estimate of time: the rates of this machine are not known."
    roofline = report.roofline
    cycles = f"; the compiler's own estimate is {scaled(roofline.cycles)}cycles" if roofline.cycles else ""
    return (
        f"Estimate, from the chip's peak rates: a step takes no less than {roofline.seconds * 1e3:.3g} ms, bound by "
        f"{roofline.bound} (products {roofline.compute * 1e3:.3g} ms, memory {roofline.memory * 1e3:.3g} ms){cycles}."
    )


def _link_time(report: CompileReport) -> str:
    time = report.link_time
    if time is None:
        return ""
    return (
        f"Estimate, from the rate of the chip's links: a device sends {byte_size(time.wire)} on a ring, in "
        f"{time.seconds * 1e3:.3g} ms at {time.rate / 1e9:.4g} GB/s of {time.link}. Products run beside collectives "
        f"that send {share_of(time.covered, time.wire)} of that."
    )


def _advice(report: CompileReport) -> Group:
    if not report.advice:
        return Group(Text("Advice: nothing to change."))
    lines = []
    for number, advice in enumerate(report.advice, 1):
        lines += [Text(f"Advice {number}: {worded(advice)}"), Text(f"    {advice.code}", style="bold")]
    return Group(*lines)


def worded(advice: Advice) -> str:
    """What is the matter, and what mending it gains."""
    gain = f" Gains up to {advice.seconds * 1e3:.2g} ms a step (estimate)." if advice.seconds > 0 else ""
    return advice.text + gain


def sizes(matmul: Matmul) -> str:
    """The sizes of a product, and how often a step runs it."""
    return " x ".join(map(str, matmul.sizes)) + (f" ({matmul.repeats} times)" if matmul.repeats > 1 else "")


def compiled_as(matmul: Matmul) -> str:
    """What a product was compiled to, and what became of it."""
    if matmul.note == NOT_COMPILED:
        return NOT_COMPILED
    return short(matmul.compiled) + (f" ({matmul.note})" if matmul.note else "")


def short(dtypes: tuple[str, ...]) -> str:
    """Writes operand dtypes in little room."""
    names = {"bfloat16": "bf16", "float16": "f16", "float32": "f32", "float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2"}
    return " x ".join(dict.fromkeys(names.get(dtype, dtype) for dtype in dtypes)) or "none"


def scaled(number: float) -> str:
    """Writes a number with three digits and a prefix: 1.23 G."""
    for prefix, factor in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= factor:
            return f"{number / factor:.3g} {prefix}"
    return f"{number:.3g} "
