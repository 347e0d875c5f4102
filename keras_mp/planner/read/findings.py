"""What else a compiled step does in which precision: sensitive operations, casts, float32 results."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from keras_mp.lowering import UNATTRIBUTED, call_of
from keras_mp.planner.read.compiled_step import CompiledStep
from keras_mp.planner.read.hlo import BITS, NAMES, long_name

_MOVES = {"convert", "bitcast", "copy", "transpose", "reshape", "parameter", "fusion", "constant", "tuple", "broadcast"}


@dataclass(frozen=True)
class Sensitive:
    """An exponential or a sum asked for in 16 bits.

    Args:
        layer: path of the layer, or "unattributed".
        kind: "softmax", "sum", or the function, such as "exponential" or "tanh".
        dtype: the 16-bit dtype.
        elements: the number of values that go in.
        compiled: the dtype that the compiler computes it in; "" where it is not to be found in the compiled step.
    """

    layer: str
    kind: str
    dtype: str
    elements: int
    compiled: str


@dataclass(frozen=True)
class Casts:
    """The casts from one dtype to another.

    Args:
        source, target: the dtypes.
        count: the number of casts that the step asks for.
        bytes: the bytes that they read and write, if each were a pass over memory of its own.
    """

    source: str
    target: str
    count: int
    bytes: int


@dataclass(frozen=True)
class Float32Work:
    """Float32 arrays that a layer's kernels write.

    Args:
        layer: the path of the layer.
        bytes: the bytes that they write in one step.
    """

    layer: str
    bytes: int


def sensitive(step: CompiledStep) -> list[Sensitive]:
    """Lists 16-bit exponentials and sums, largest first; equal ones once."""
    compiled: dict[str, str] = {}
    for computation in step.module.computations.values():
        for instruction in computation.values():
            if instruction.opcode not in ("convert", "bitcast", "fusion", "parameter", "get-tuple-element"):
                compiled.setdefault(
                    instruction.operation, long_name(instruction.shapes[0].dtype) if instruction.shapes else ""
                )
    entries = [
        Sensitive(
            step.lowered.layer(call_of(step.asked.full_name(entry.at.op))),
            entry.kind,
            long_name(entry.dtype),
            entry.elements * entry.at.repeats,
            compiled.get(entry.at.op, ""),
        )
        for entry in step.asked.low
    ]
    return sorted(dict.fromkeys(entries), key=lambda entry: (entry.kind != "softmax", -entry.elements))


def casts(step: CompiledStep) -> list[Casts]:
    """Lists the casts between floats, the most bytes first."""
    counts: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0])
    for entry in step.asked.casts:
        if entry.source in NAMES and entry.target in NAMES and entry.source != entry.target:
            count = counts[entry.source, entry.target]
            count[0] += entry.at.repeats
            count[1] += entry.at.repeats * entry.elements * (BITS[entry.source] + BITS[entry.target]) // 8
    entries = [Casts(long_name(source), long_name(target), n, size) for (source, target), (n, size) in counts.items()]
    return sorted(entries, key=lambda entry: -entry.bytes)


def cast_kernels(step: CompiledStep) -> tuple[int, int]:
    """Counts kernels that only cast and move, and their bytes."""
    count = size = 0
    for kernel, repeats in step.module.kernels():
        opcodes = {instruction.opcode for instruction in step.module.inside(kernel)}
        if "convert" in opcodes and opcodes <= _MOVES:
            count += repeats
            size += repeats * step.module.traffic(kernel)
    return count, size


def float32_work(step: CompiledStep) -> list[Float32Work]:
    """Adds up float32 arrays by layer, the largest first.

    What no layer's call names, such as the optimizer's update, is left out.
    """
    written: dict[str, int] = defaultdict(int)
    for kernel, repeats in step.module.kernels():
        layer = step.layer(kernel)
        if layer != UNATTRIBUTED:
            written[layer] += repeats * sum(shape.size for shape in kernel.shapes if shape.dtype == "f32")
    entries = [Float32Work(layer, size) for layer, size in written.items() if size]
    return sorted(entries, key=lambda entry: -entry.bytes)
