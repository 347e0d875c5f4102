"""How much memory a compiled step takes, and what takes it."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from keras_mp.lowering import Argument, Lowered, is_backward
from keras_mp.planner.read.compiled_step import CompiledStep
from keras_mp.planner.read.compiler_memory import Refusal
from keras_mp.planner.read.hlo import BITS, FREE, NAMES, Instruction, Module, long_name

_BITS = {"bool": 8} | {long: BITS[short] for short, long in NAMES.items()}


@dataclass(frozen=True)
class Buffer:
    """One array that lives when memory is fullest.

    Args:
        layer: path of the layer whose operation makes it, or "unattributed".
        what: "activation" (made in the forward pass, read in the backward pass) or "temporary".
        dtype, shape, bytes: the array, without padding.
    """

    layer: str
    what: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int


@dataclass(frozen=True)
class Memory:
    """The memory of one step on one device, in bytes.

    Args:
        parameters: the weights, those that do not train included.
        integers: the part of `parameters` that is quantized, by the type that its numbers have: "int8", or "int4", of
            which a byte holds two.
        optimizer: the optimizer's variables.
        optimizer_dtype: the dtype that most of the optimizer's values are stored in: "float32", "bfloat16" or "float8".
        host: Optimizer variables in the host's memory, which are none of the other figures. A step reads and writes
            each once.
        other: the bytes of metrics and batch.
        activations: the part of `temporary` that the forward pass keeps for the backward pass. An estimate: the arrays
            that live when memory is fullest if kernels run in the order of the compiled module.
        gradients: The most bytes of gradients of weights that live at once, a part of `temporary` and an estimate as
            `activations` is: arrays of the backward pass with as many values as a weight of their layer that trains.
        arguments, outputs, aliased, temporary, code: the compiler's own statistics: what goes in, what comes out, how
            much of that shares its memory with what goes in, what is needed in between, and the program.
        peak: the larger of the compiler's own figure for the most that lives at once (some give none), and arguments
            + outputs - aliased + temporary; on TPUs, whose compilers count it, with the code.
        capacity: the memory of the chip; 0 where it is not known; of a step that the compiler refuses, what it leaves a
            program.
        largest: the largest arrays when memory is fullest, an estimate as `activations` is.
    """

    parameters: int
    optimizer: int
    other: int
    activations: int = 0
    arguments: int = 0
    outputs: int = 0
    aliased: int = 0
    temporary: int = 0
    code: int = 0
    peak: int = 0
    capacity: int = 0
    largest: tuple[Buffer, ...] = ()
    gradients: int = 0
    host: int = 0
    optimizer_dtype: str = "float32"
    integers: Mapping[str, int] = field(default_factory=dict)

    @property
    def fits(self) -> bool:
        """Whether the chip holds it; True where the chip's memory is not known."""
        return not self.capacity or self.peak <= self.capacity


def measure(step: CompiledStep) -> Memory:
    """Reads the compiler's statistics, or what it refuses."""
    if step.refused is not None:
        return _refused(step.lowered, step.refused)
    chip, statistics = step.target.chip, step.statistics
    whole = statistics["argument"] + statistics["output"] - statistics["alias"] + statistics["temp"]
    code = statistics["generated_code"]
    buffers, gradients = _at_the_peak(step)
    return Memory(
        **_by_shapes(step.lowered),
        activations=sum(buffer.bytes for buffer in buffers if buffer.what == "activation"),
        gradients=gradients,
        arguments=statistics["argument"],
        outputs=statistics["output"],
        aliased=statistics["alias"],
        temporary=statistics["temp"],
        code=code,
        # TPUs have their programs in the same memory.
        peak=max(statistics.get("peak_memory", 0), whole) + (code if step.target.platform == "tpu" else 0),
        capacity=chip.device_bytes if chip else 0,
        largest=tuple(sorted(buffers, key=lambda buffer: -buffer.bytes)[:10]),
    )


def _refused(lowered: Lowered, refusal: Refusal) -> Memory:
    """The arguments by their shapes, and all by the message."""
    arguments = sum(size_of(argument) for argument in lowered.arguments if not argument.on_host)
    return Memory(
        **_by_shapes(lowered),
        arguments=arguments,
        temporary=max(0, refusal.needed - arguments),
        peak=max(arguments, refusal.needed),
        capacity=refusal.available,
    )


def size_of(argument: Argument) -> int:
    """The bytes that an argument takes on one device."""
    elements = int(np.prod(argument.shape, dtype=np.int64)) // argument.parts
    return elements * _BITS.get(argument.dtype, 8 * np.dtype(argument.dtype).itemsize) // 8


def sizes_by_kind(arguments: Iterable[Argument]) -> dict[str, int]:
    """Bytes of arguments on a device by kind, or "host"."""
    kinds: dict[str, int] = defaultdict(int)
    for argument in arguments:
        kinds["host" if argument.on_host else argument.kind] += size_of(argument)
    return kinds


def _by_shapes(lowered: Lowered) -> dict[str, Any]:
    """The fields of a `Memory` that need no compiler."""
    kinds = sizes_by_kind(lowered.arguments)
    integers: dict[str, int] = defaultdict(int)
    for argument in lowered.arguments:
        if argument.kind in ("parameters", "state") and (argument.holds or argument.dtype == "int8"):
            integers[argument.holds or argument.dtype] += size_of(argument)
    return {
        "parameters": kinds["parameters"] + kinds["state"],
        "optimizer": kinds["optimizer"],
        "host": kinds["host"],
        "optimizer_dtype": _optimizer_dtype(lowered),
        "integers": dict(integers),
        "other": kinds["metrics"] + kinds["batch"],
    }


def _at_the_peak(step: CompiledStep) -> tuple[list[Buffer], int]:
    """The arrays of the entry computation that live together when they are largest, in its order.

    Returns:
        (arrays, gradients): the arrays, and the most bytes of gradients that live together at any time.
    """
    module = step.module
    entry = list(module.computations[module.entry].values())
    made = {instruction.name: place for place, instruction in enumerate(entry)}
    owner = {instruction.name: _owner(instruction, module) for instruction in entry}
    last: dict[str, int] = {}
    for place, instruction in enumerate(entry):
        for operand in instruction.operands:
            if operand in made:
                last[owner[operand]] = place
    ends: dict[int, list[str]] = defaultdict(list)
    live: dict[str, int] = {}
    total = most = 0
    of_weights, held, most_held = _sizes_of_weights(step.lowered), 0, 0
    gradients: dict[str, int] = {}
    fullest: list[str] = []
    moment = 0
    for place, instruction in enumerate(entry):
        if instruction.opcode not in FREE and instruction.name in last and not entry[last[instruction.name]].root:
            live[instruction.name] = instruction.size
            total += instruction.size
            gradients[instruction.name] = _gradient_bytes(instruction, step, of_weights)
            held += gradients[instruction.name]
            most_held = max(most_held, held)
            ends[last[instruction.name]].append(instruction.name)
            if total > most:
                most, fullest, moment = total, list(live), place
        for name in ends.pop(place, []):
            total -= live.pop(name)
            held -= gradients[name]
    by_name = {instruction.name: instruction for instruction in entry}
    buffers = []
    for name in fullest:
        instruction = by_name[name]
        what = "temporary"
        if not is_backward(step.name(instruction)) and last[name] > moment:
            what = "activation" if is_backward(step.name(entry[last[name]])) else "temporary"
        buffers += [
            Buffer(step.layer(instruction), what, long_name(shape.dtype), shape.dimensions, shape.size)
            for shape in instruction.shapes
            if shape.size
        ]
    return buffers, most_held


def _sizes_of_weights(lowered: Lowered) -> set[tuple[str, int]]:
    """Of each weight that trains the name of its layer, and its number of values on one device."""
    return {
        (weight.path.rpartition("/")[0].rpartition("/")[2], math.prod(weight.shape) // weight.parts)
        for weight in lowered.arguments
        if weight.kind == "parameters"
    }


def _gradient_bytes(instruction: Instruction, step: CompiledStep, of_weights: set[tuple[str, int]]) -> int:
    """The bytes of the gradients of weights that an instruction makes."""
    if not is_backward(step.name(instruction)):
        return 0
    layer = step.layer(instruction).rpartition("/")[2]
    return sum(shape.size for shape in instruction.shapes if (layer, math.prod(shape.dimensions)) in of_weights)


def _owner(instruction: Instruction, module: Module) -> str:
    """The instruction whose memory this one is a view of, or writes a part of."""
    inside = module.computations[instruction.computation]
    while memory := _viewed_or_written(instruction, module):
        source = inside.get(memory)
        if source is not None and source.opcode == "opt-barrier":  # which hands a tuple through
            source = inside.get(source.operands[0])
        if source is not None and source.opcode == "tuple" and instruction.opcode == "get-tuple-element":
            source = inside.get(source.operands[instruction.index])
        if source is None:
            break
        instruction = source
    return instruction.name


def _viewed_or_written(instruction: Instruction, module: Module) -> str:
    """The operand whose memory an instruction hands on, or writes its result into; "" where it is none."""
    if instruction.opcode in ("bitcast", "get-tuple-element", "copy-done", "async-done"):
        return instruction.operands[0] if instruction.operands else ""
    last = instruction
    if instruction.opcode == "fusion":
        last = next((inner for inner in module.computations[instruction.callees[0]].values() if inner.root), last)
    if last.opcode not in ("scatter", "dynamic-update-slice"):
        return ""
    inside, shape = module.computations[instruction.computation], instruction.shapes[:1]
    return next((name for name in instruction.operands if name in inside and inside[name].shapes[:1] == shape), "")


def _optimizer_dtype(lowered: Lowered) -> str:
    values: dict[str, int] = {}
    for argument in lowered.arguments:
        if argument.kind == "optimizer":
            values[argument.dtype] = values.get(argument.dtype, 0) + math.prod(argument.shape)
    dtype = max(values, key=lambda name: values[name], default="float32")
    return "float8" if dtype.startswith(("float8", "f8")) else dtype
