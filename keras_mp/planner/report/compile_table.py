"""A compile report on the terminal: the answer, and the tables behind it."""

from __future__ import annotations

import textwrap
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.text import Text

from keras_mp.planner.read.collectives import Collective
from keras_mp.planner.read.matmuls import Matmul
from keras_mp.planner.read.memory import Memory
from keras_mp.planner.report.compilation import Compilation
from keras_mp.planner.report.suggestions import Advice, patterns
from keras_mp.planner.time.step_time import interval_of, score
from keras_mp.precision.chips import CHIPS
from keras_mp.reporting.answer import COLUMNS, INDENT, Sentence
from keras_mp.reporting.table import ColumnTable
from keras_mp.reporting.text import byte_size, listed, pattern_of, shorten_middle, without_numbers

_LAYER = 32  # characters of a layer's name within a sentence
_SEEN = 0.005  # of the peak: what is less is not in the bar
_ARRAYS = 3  # of a batch, in the first line
_PACKED = {"int4": "int4, two to a byte"}
UNALIGNED = "unaligned sizes"


class MemoryBar:
    """A bar of a memory's parts, and its legend.

    Args:
        parts: the size of each part, by name.
        whole: the size of the memory; 0 where it is not known. Where the parts are larger, a line marks its end.
        written: the words of a part in the legend.
    """

    _MARKS = "█▓▒░"

    def __init__(self, parts: dict[str, int], whole: int, written: Sequence[str]) -> None:
        self.parts, self.whole, self.written = parts, whole, written

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = min(options.max_width, COLUMNS) - len(INDENT)
        longest = max(self.whole, sum(self.parts.values()), 1)
        ends, total = [], 0
        for size in self.parts.values():
            total += size
            ends.append(round(width * total / longest))
        bar = ""
        for mark, end in zip(self._MARKS, ends, strict=False):
            bar += mark * (end - len(bar))
        bar = bar.ljust(width, "·")
        limit = round(width * self.whole / longest)
        if 0 < limit < width:
            bar = f"{bar[:limit]}│{bar[limit + 1 :]}"
        yield Text(INDENT + bar)
        legend = [f"{mark} {words}" for mark, words in zip(self._MARKS, self.written, strict=False)]
        legend += ["│ the memory's end"] if 0 < limit < width else ["· free"] if limit else []
        for line in textwrap.wrap("  ".join(legend).replace(" ", "\0").replace("\0\0", "  "), width):
            yield Text(INDENT + line.replace("\0", " "))


def answer(report: Compilation) -> list[Sentence]:
    """Says whether the step fits, and what to change."""
    step = "training step" if report.training else "inference step"
    batch = [*report.batch[:_ARRAYS], *(["..."] if len(report.batch) > _ARRAYS else [])]
    what = f"a {step} on {', '.join(batch)} in {report.precision}, for {place(report)}"
    if report.extrapolated:
        what += f"; memory and times from {report.extrapolated}, all else of the larger number"
    parts = memory_parts(report.memory)
    bar = MemoryBar(parts, report.memory.capacity, [f"{name} {byte_size(size)}" for name, size in parts.items()])
    first, *others = report.asked_and_compiled or ["no product."]
    said = [
        Sentence(shorten_middle(report.model, _LAYER), what),
        Sentence(*room(report), below=bar),
        Sentence("On the host", on_host(report)),
        Sentence("Largest at the peak", _largest(report), rank=5),
        Sentence("Time", _answered_time(report)),
        Sentence("Error", report.error),
        Sentence("Precision", first),
        *(Sentence("Precision", kind, rank=1) for kind in others),
        Sentence("In 16 bits", _in_16_bits(report), rank=2),
        Sentence("Casts", _casts(report), rank=6),
        Sentence("Collectives", _sent(report), rank=1),
        *(Sentence(f"The same step in {name}", _beside(other), rank=4) for name, other in report.compared.items()),
        *(_advised(number, one, rank=min(number, 3) * (number > 1)) for number, one in enumerate(report.advice, 1)),
        *([] if report.advice else [Sentence("Change", "nothing.")]),
        Sentence("Compiled", compiled_with(report), rank=7),
    ]
    return [sentence for sentence in said if sentence.text]


def tables(report: Compilation) -> dict[str, list[RenderableType]]:
    """Tables behind the answer, by name, without empty ones."""
    drawn: dict[str, list[Any]] = {
        "products": [_matmuls(report.matmuls, report.flops), _unaligned(report.matmuls, report.flops)],
        "memory": [_memory(report), largest(report)],
        "time": [*(Sentence("", text) for text in times(report))],
        "casts": [sensitive(report), precision(report)],
        "collectives": [_collectives(report), collective_layers(report)],
        "compared": [compared(report)] if report.compared else [],
        "changes": [_advised(number, advice) for number, advice in enumerate(report.advice, 1)],
        "notes": [Sentence("Note", note) for note in (*report.notes, headline(report), compiled_with(report))],
    }
    kept = {
        name: [one for one in parts if not isinstance(one, ColumnTable) or one.rows] for name, parts in drawn.items()
    }
    return {name: parts for name, parts in kept.items() if parts}


def place(report: Compilation) -> str:
    """The chip, or how several share the step."""
    return f"{report.devices} devices of {report.title}, {report.strategy}" if report.strategy else report.title


def headline(report: Compilation) -> str:
    """What was compiled, for what, by what."""
    step = "training step" if report.training else "inference step"
    batch = ", ".join(report.batch)
    return (
        f"{report.model}: a {step} on {batch} in {report.precision}, lowered by {report.backend}, for {place(report)}"
    )


def compiled_with(report: Compilation) -> str:
    """Names the compilers and their options, in a line."""
    chip = CHIPS.get(report.target)
    others = {"google": ("cuda",), "nvidia": ("libtpu",)}.get(chip.vendor, ()) if chip else ("cuda", "libtpu")
    used = {name: text for name, text in report.versions.items() if not any(other in name for other in others)}
    versions = ", ".join(f"{name} {version}" for name, version in used.items())
    flags = ", ".join(f"{name}={str(value).lower()}" for name, value in report.flags.items())
    return f"lowered by {report.backend}; {versions}" + (f"; {flags}" if flags else "")


def room(report: Compilation) -> tuple[str, str]:
    """Says whether the step fits, and what is left."""
    memory = report.memory
    peak = byte_size(memory.peak)
    if not memory.capacity:
        return "Memory", f"{peak}."
    chip = CHIPS.get(report.target)
    of = "a device's " if chip is not None and chip.devices > 1 else ""
    left = " that the compiler gives a program" if report.refused else ""
    gap = byte_size(abs(memory.capacity - memory.peak))
    verdict, rest = ("Fits", "are left") if memory.fits else ("Does not fit", "are missing")
    return verdict, f"{peak} of {of}{byte_size(memory.capacity)}{left}; {gap} {rest}."


def memory_parts(memory: Memory) -> dict[str, int]:
    """Names what takes memory at the peak."""
    rest = max(0, memory.peak - memory.parameters - memory.optimizer - memory.temporary)
    parts = {
        "weights": memory.parameters,
        optimizer_title(memory): memory.optimizer,
        "temporary": min(memory.temporary, memory.peak),
        "batch and other": rest,
    }
    return {name: size for name, size in parts.items() if size >= _SEEN * memory.peak}


def _largest(report: Compilation) -> str:
    if not report.memory.largest:
        return ""
    first = report.memory.largest[0]
    layer = shorten_middle(first.layer, _LAYER)
    return f"{first.dtype}{list(first.shape)} of {layer}, {byte_size(first.bytes)} (estimate)."


def on_host(report: Compilation) -> str:
    """Bytes of the optimizer on the host, and transfer time."""
    size, chip = report.memory.host, CHIPS.get(report.target)
    if not size:
        return ""
    crossing = f"{byte_size(size)} of the optimizer, read and written in a step"
    link = chip.host_link if chip else None
    if link is None:
        return f"{crossing}."
    each_way = _milliseconds(size / link.bandwidth)
    return f"{crossing}: {each_way} each way at {link.name} (estimate), less as far as it runs beside products."


def _answered_time(report: Compilation) -> str:
    time, roofline = report.time, report.roofline
    if roofline is None:
        return f"not estimated: {_why_no_time(report)}."
    limit = f"{roofline.bound} is the limit, {_milliseconds(roofline.seconds)} or more at the chip's peak rates."
    if time is None:
        return limit
    if time.unscored:
        return f"none is given: {time.unscored}; {limit}"
    _, interval = interval_of(CHIPS[report.target], time)
    least, most = (f"{time.seconds * end * 1e3:.3g}" for end in (interval.least, interval.most))
    return (
        f"expect {least} to {most} ms a step, in nine of ten cases (predicted: {_milliseconds(time.seconds)}; range of "
        f"{interval.runs} published runs); {limit}"
    )


def _why_no_time(report: Compilation) -> str:
    if report.refused:
        return f"the compiler refuses the step ({report.refused})"
    if report.strategy == "tensor":
        return "the compiler divides the products over the devices"
    return "the rates of this machine are not known"


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"


def _in_16_bits(report: Compilation) -> str:
    """Exponentials and sums that are asked for in 16 bits, by kind, and where."""
    layers: dict[str, list[str]] = defaultdict(list)
    for entry in report.sensitive:
        layers[f"{entry.kind} is asked for in {entry.dtype}"].append(entry.layer)
    return "; ".join(f"{kind} by {_where(names)}" for kind, names in layers.items()) + "." if layers else ""


def _where(layers: Sequence[str]) -> str:
    return listed(list(map(repr, patterns(layers))), 2 * _LAYER, "layers")


def _casts(report: Compilation) -> str:
    if report.refused:
        return ""
    count, size = report.cast_kernels
    asked, read = sum(cast.count for cast in report.casts), sum(cast.bytes for cast in report.casts)
    if not asked and not count:
        return ""
    kernels = "1 kernel does" if count == 1 else f"{count} kernels do"
    casts = f"{asked} cast{'s' * (asked != 1)}"
    return f"{kernels} nothing but convert dtypes ({byte_size(size)}); the model asks for {casts} ({byte_size(read)})."


def _sent(report: Compilation) -> str:
    if not report.collectives:
        return ""
    wire, covered = (sum(getattr(sent, name) for sent in report.collectives) for name in ("wire", "covered"))
    kinds = ", ".join(dict.fromkeys(sent.kind for sent in report.collectives))
    time = report.link_time
    took = f", {_milliseconds(time.seconds)} at the rate of {time.link}" if time else ""
    return f"a device sends {byte_size(wire)} ({kinds}){took}; {share_of(covered, wire)} of it beside products."


def _beside(other: Compilation) -> str:
    bound = f", at least {_milliseconds(other.roofline.seconds)}" if other.roofline else ""
    return f"{byte_size(other.memory.peak)} ({byte_size(other.memory.temporary)} temporary){bound}."


def _advised(number: int, advice: Advice, rank: int = 0) -> Sentence:
    gain = f" Gains up to {advice.seconds * 1e3:.2g} ms a step (estimate)." if advice.seconds > 0 else ""
    return Sentence(f"Change {number}", advice.text + gain, (advice.code,), rank=rank)


def _repeats(rows: Iterable[Any], *alike: str) -> list[list[Any]]:
    """Groups rows whose fields of these names are alike, and their layers but for numbers, as in repeated blocks."""
    groups: dict[tuple, list[Any]] = defaultdict(list)
    for row in rows:
        groups[without_numbers(row.layer), *(getattr(row, name) for name in alike)].append(row)
    return list(groups.values())


def _matmuls(matmuls: Sequence[Matmul], flops: int) -> ColumnTable:
    table = ColumnTable(
        f"Dots and convolutions: {len(matmuls)}, {scaled(flops)}FLOP a step",
        ("layer", "number", "role", "rows x sum x columns", "asked", "compiled", "summed in", "kernel", "share",
         "note"),
        narrow=("layer", "number", "role", "asked", "compiled", "share"),
        right=("number", "share"),
    )  # fmt: skip
    groups = _repeats(
        matmuls, "role", "kind", "sizes", "repeats", "asked", "compiled", "accumulation", "kernel", "note"
    )
    for group in sorted(groups, key=lambda group: -sum(matmul.flops for matmul in group)):
        first = group[0]
        table.add_row(
            *(pattern_of([matmul.layer for matmul in group]), str(len(group)), first.role, sizes(first)),
            *(short(first.asked), short(first.compiled), first.accumulation, first.kernel),
            f"{sum(matmul.flops for matmul in group) / max(1, flops):.1%}",
            first.note,
        )
    return table


def _unaligned(matmuls: Sequence[Matmul], flops: int) -> ColumnTable:
    names = (UNALIGNED, "number", "layers", "share")
    table = ColumnTable("Sizes that matrix units pad", names, names, ("number", "share"))
    groups: dict[str, list[Matmul]] = defaultdict(list)
    for matmul in matmuls:
        if words := unaligned(matmul):
            groups[words].append(matmul)
    for words, group in sorted(groups.items(), key=lambda item: -sum(matmul.flops for matmul in item[1])):
        share = sum(matmul.flops for matmul in group) / max(1, flops)
        table.add_row(words, str(len(group)), _where([matmul.layer for matmul in group]), f"{share:.1%}")
    return table


def unaligned(matmul: Matmul) -> str:
    """Sizes by the smallest of 8, 16, 128 they miss."""
    missed = []
    seen: set[int] = set()
    for multiple in (8, 16, 128):
        sizes = [size for size in dict.fromkeys(matmul.off(multiple)) if size not in seen]
        seen.update(sizes)
        if sizes:
            missed.append(f"{listed([*map(str, sizes)], _LAYER, 'sizes')} not divisible by {multiple}")
    return "; ".join(missed)


def sensitive(report: Compilation) -> ColumnTable:
    """Exponentials and sums in 16 bits."""
    names = ("layer", "number", "what", "asked", "compiled", "values")
    table = ColumnTable("Exponentials and sums asked for in 16 bits", names, names, ("number", "values"))
    for group in _repeats(report.sensitive, "kind", "dtype", "compiled", "elements"):
        first = group[0]
        layer = pattern_of([entry.layer for entry in group])
        cells = first.kind, first.dtype, first.compiled or "-", scaled(first.elements)
        table.add_row(layer, str(len(group)), *cells)
    return table


def precision(report: Compilation) -> ColumnTable:
    """Casts, and float32 arrays written."""
    names = ("what", "layer", "count", "size")
    table = ColumnTable("Casts, and float32 arrays written by a layer", names, names, names[2:])
    for cast in report.casts:
        table.add_row(f"{cast.source} to {cast.target}, asked for", "", str(cast.count), byte_size(cast.bytes))
    count, size = report.cast_kernels
    if not report.refused:
        table.add_row("kernels that only cast and move", "", str(count), byte_size(size))
    for group in _repeats(report.float32_work, "bytes"):
        layer = pattern_of([work.layer for work in group])
        table.add_row("float32 arrays", layer, str(len(group)), f"{byte_size(group[0].bytes)}")
    return table


def _memory(report: Compilation) -> ColumnTable:
    names = ("what", "size")
    table = ColumnTable("Memory of one device" if report.strategy else "Memory", names, names, ("size",))
    for what, size in memory_rows(report):
        table.add_row(what, byte_size(size))
    return table


def memory_rows(report: Compilation) -> list[tuple[str, int]]:
    """What takes memory, in bytes."""
    memory = report.memory
    return [
        ("weights", memory.parameters),
        *((f"of them in {_PACKED.get(dtype, dtype)}", size) for dtype, size in memory.integers.items()),
        (optimizer_title(memory), memory.optimizer),
        *([("optimizer in the host's memory, beside the rest", memory.host)] if memory.host else []),
        ("metrics and batch", memory.other),
        ("temporary (compiler)", memory.temporary),
        ("of it kept for the backward pass (estimate)", memory.activations),
        ("gradients at once, at most (estimate)", memory.gradients),
        ("peak (compiler)", memory.peak),
        # TPUs keep it there; `advise` ends their compiler before it is made, and says so.
        *(
            [("of it the program", memory.code)]
            if report.target in CHIPS and CHIPS[report.target].vendor == "google"
            else []
        ),
    ]


def optimizer_title(memory: Memory) -> str:
    """Names the optimizer's variables, with a dtype other than float32."""
    dtype = memory.optimizer_dtype
    return "optimizer" if dtype == "float32" else f"optimizer, {dtype}"


_SENT = ("arrays", "whole", "on the wire", "beside products")
_SUMMED = ("count", "bytes", "wire", "covered")


def _sums(group: Sequence[Collective]) -> tuple[str, ...]:
    count, size, wire, covered = (sum(getattr(one, name) for one in group) for name in _SUMMED)
    return str(count), byte_size(size), byte_size(wire), share_of(covered, wire)


def _collectives(report: Compilation) -> ColumnTable:
    groups: dict[tuple[str, str, int], list[Collective]] = defaultdict(list)
    for collective in report.collectives:
        groups[collective.kind, collective.dtype, collective.group].append(collective)
    names = ("kind", "dtype", "devices", *_SENT)
    narrow = [name for name in names if name != "whole"]
    table = ColumnTable("Collectives a step, bytes of one device", names, narrow, right=names[2:])
    for (kind, dtype, group), sent in groups.items():
        table.add_row(kind, dtype, str(group or "-"), *_sums(sent))
    return table


def collective_layers(report: Compilation) -> ColumnTable:
    """What each layer sends, repeated blocks together."""
    names = ("layer", "number", "kind", "dtype", "devices", *_SENT)
    narrow = ("layer", "number", "kind", "dtype", "on the wire")
    table = ColumnTable("Collectives by layer", names, narrow, ("number", *names[4:]))
    groups = _repeats(report.collectives, "kind", "dtype", "group")
    for sent in sorted(groups, key=lambda sent: -sum(collective.wire for collective in sent)):
        kind, dtype, group = sent[0].kind, sent[0].dtype, str(sent[0].group or "-")
        table.add_row(pattern_of([c.layer for c in sent]), str(len(sent)), kind, dtype, group, *_sums(sent))
    return table


def share_of(part: int, whole: int) -> str:
    """How much of some bytes others are, in percent."""
    return f"{part / max(1, whole):.0%}"


def largest(report: Compilation) -> ColumnTable:
    """The largest arrays when memory is fullest."""
    title = "The largest arrays when memory is fullest (estimate, from the order of kernels)"
    names = ("layer", "number", "what", "array", "size")
    table = ColumnTable(title, names, names, ("number", "size"))
    for group in _repeats(report.memory.largest, "what", "dtype", "shape"):
        first = group[0]
        layer = pattern_of([buffer.layer for buffer in group])
        table.add_row(layer, str(len(group)), first.what, f"{first.dtype}{list(first.shape)}", byte_size(first.bytes))
    return table


def compared(report: Compilation) -> ColumnTable:
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


def times(report: Compilation) -> list[str]:
    """The estimates of time, a paragraph each."""
    return [*filter(None, (_time(report), _speed(report), _link_time(report)))]


def _time(report: Compilation) -> str:
    time = report.time
    if time is None:
        return ""
    sent = f", collectives beside which nothing runs {_milliseconds(time.uncovered)}" if report.devices > 1 else ""
    parts = (
        f"Predicted time of a step: {_milliseconds(time.seconds)} (products {_milliseconds(time.products)}, other "
        f"kernels {_milliseconds(time.other)}{sent}). "
    )
    return ("" if time.unscored else parts) + score(CHIPS[report.target], time)


def _speed(report: Compilation) -> str:
    roofline = report.roofline
    if roofline is None:
        return f"No estimate of time: {_why_no_time(report)}."
    cycles = f"; the compiler's own estimate is {scaled(roofline.cycles)}cycles" if roofline.cycles else ""
    return (
        f"Estimate, from the chip's peak rates: a step takes no less than {_milliseconds(roofline.seconds)}, bound by "
        f"{roofline.bound} (products {_milliseconds(roofline.compute)}, memory {_milliseconds(roofline.memory)})"
        f"{cycles}."
    )


def _link_time(report: Compilation) -> str:
    time = report.link_time
    if time is None:
        return ""
    return (
        f"Estimate, from the rate of the chip's links: a device sends {byte_size(time.wire)} on a ring, in "
        f"{_milliseconds(time.seconds)} at {time.rate / 1e9:.4g} GB/s of {time.link}. Products run beside collectives "
        f"that send {share_of(time.covered, time.wire)} of that."
    )


def sizes(matmul: Matmul) -> str:
    """Writes a product's sizes, and its runs a step."""
    return " x ".join(map(str, matmul.sizes)) + (f" ({matmul.repeats} times)" if matmul.repeats > 1 else "")


def short(dtypes: tuple[str, ...]) -> str:
    """Writes operand dtypes in little room."""
    names = {"bfloat16": "bf16", "float16": "f16", "float32": "f32", "float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2"}
    names["float4_e2m1fn"] = "e2m1"
    return " x ".join(dict.fromkeys(names.get(dtype, dtype) for dtype in dtypes)) or "none"


def scaled(number: float) -> str:
    """Writes a number in three digits and prefix: 1.23 G."""
    for prefix, factor in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= factor:
            return f"{number / factor:.3g} {prefix}"
    return f"{number:.3g} "
