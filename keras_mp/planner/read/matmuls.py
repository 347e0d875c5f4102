"""Joins the dots, convolutions and kernels that a step asks for with those that the compiler made of them."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from keras_mp.lowering import UNATTRIBUTED, call_of, is_backward
from keras_mp.planner.read.asked import Contraction
from keras_mp.planner.read.compiled_step import CompiledStep
from keras_mp.planner.read.flops import dot_flops
from keras_mp.planner.read.hlo import Instruction, Module, long_name
from keras_mp.precision.chips import Chip

# A number may follow: TensorFlow makes names of scopes unique.
_ROLE = re.compile(r"keras_mp\.(forward|input_gradient|kernel_gradient)")


# XLA's names of kernels that were written by hand: Mosaic's, Triton's, cuDNN's attention.
_KERNELS = re.compile(r"tpu_custom_call|mosaic_gpu|__cudnn\$fmha|(__gpu\$xla\.gpu\.)?triton")


# The note of a product of a step that the compiler refuses.
NOT_COMPILED = "not compiled"
# The note of a kernel that has no product, or whose products cannot be read.
OPERATIONS_NOT_KNOWN = "operations not known"


@dataclass(frozen=True)
class Matmul:
    """A product of a step, or a kernel for several.

    Args:
        layer: path of the layer whose call it belongs to, or "unattributed".
        call: the number of the call of that layer in the step, from 1; 0 where it is not known.
        role: "forward", "input gradient", "kernel gradient", "recomputed", or "unattributed".
        kind: "dot", "convolution" or "kernel": Mosaic's for TPUs, Triton's and cuDNN's attention for GPUs.
        sizes: rows, summed dimension and columns of the matrix product (of one, where there is a batch of them); of a
            convolution batch x positions, inputs x window, and features; of attention queries, features and keys.
        asked: dtypes of the operands in the lowered step. FP8 too where they were cast from FP8: a compiler may turn
            that into an FP8 product, or not.
        compiled: dtypes of the operands as compiled; empty where the compiler left nothing of it.
        result: dtype of the result as compiled.
        accumulation: the dtype that the products are summed in.
        flops: floating-point operations in one step; a multiply-add is two.
        repeats: the number of times a step runs it; in a loop of unknown length, once.
        kernel: the kernel that runs it.
        cycles: the TPU compiler's estimate for the kernel that it is part of; 0 where there is none.
        note: a remark on what became of it, where there is something to say.
        counted: False where a loop's length is not known, so that `flops` counts one round.
        runs: the instruction of the compiled step that runs it, or is fused with it; "" where nothing is left.
        traffic: the bytes that a kernel moves in a step; 0 where each of its arrays crosses once.
    """

    layer: str
    call: int
    role: str
    kind: str
    sizes: tuple[int, int, int]
    asked: tuple[str, ...]
    compiled: tuple[str, ...]
    result: str
    accumulation: str
    flops: int
    repeats: int
    kernel: str
    cycles: int
    note: str = ""
    counted: bool = True
    runs: str = ""
    traffic: int = 0

    @property
    def operands(self) -> str:
        """The operand dtypes as compiled, "bfloat16" or "float32 x bfloat16"; "none" where nothing is left."""
        return dtype_pair(self.compiled)

    def off(self, multiple: int) -> tuple[int, ...]:
        """The sizes that are no multiple of a number; of a convolution its features, of a kernel none."""
        sizes = {"dot": self.sizes, "convolution": self.sizes[2:]}.get(self.kind, ())
        return tuple(size for size in sizes if size % multiple)


def dtype_pair(dtypes: Sequence[str]) -> str:
    """Writes two operands' dtypes, once if they are the same."""
    return " x ".join(dict.fromkeys(dtypes)) or "none"


def in_few_bits(dtypes: Sequence[str]) -> bool:
    """Whether all operands are floats of 8 or 4 bits."""
    return bool(dtypes) and all(dtype.startswith(("float8", "float4")) for dtype in dtypes)


def peak_of(dtypes: Sequence[str], chip: Chip) -> float:
    """A chip's peak for operands, in operations per second.

    TPUs multiply float32 operands as bfloat16 unless more is asked for; NVIDIA's since A100 as TensorFloat-32. INT8
    counts at the rate of 16 bits where the chip's own is not in the table: no chip with INT8 units falls below that.
    """
    peak = chip.peak
    if dtypes and all(dtype == "int8" for dtype in dtypes):
        return peak.get("int8") or peak.get("bfloat16") or peak.get("float16") or peak["float32"]
    if in_few_bits(dtypes):
        if "fp4" in peak and all(dtype.startswith("float4") for dtype in dtypes):
            return peak["fp4"]
        return peak.get("fp8") or peak.get("bfloat16") or peak["float16"]
    if "float32" in dtypes:
        return peak.get("tfloat32") or peak.get("float32") or peak["bfloat16"]
    if "bfloat16" in dtypes:
        return peak.get("bfloat16") or peak["float32"]
    if "float16" in dtypes:
        return peak.get("float16") or peak["bfloat16"]
    return peak.get("float32") or peak["bfloat16"]


def seconds(matmul: Matmul, chip: Chip) -> float:
    """What a product takes at the chip's peak, as compiled."""
    return matmul.flops / (peak_of(matmul.compiled or matmul.asked, chip) / chip.devices)


def join(step: CompiledStep) -> list[Matmul]:
    """Joins asked and compiled products, an entry for each."""
    asked, module = step.asked.contractions, step.module
    made = _made(module, step.target.platform)
    compiled = {}
    for entry in asked:
        name = _name_in(made, (entry.op, *entry.followers))
        if name is not None:
            compiled[entry.op] = made[name][0]
    merged = _merged(asked, compiled)
    compiled |= _of_equal_sizes([entry for entry in asked if entry.op not in {**compiled, **merged}], made.get("", ()))
    rows = []
    for entry, (index, role) in zip(asked, _roles(step), strict=True):
        layer_call = step.lowered.calls[index] if index is not None else None
        after, note = compiled.get(entry.op), ""
        if step.refused:
            after, note = _NOTHING, NOT_COMPILED
        if after is None and entry.op in merged:
            after, note = compiled[merged[entry.op]], "merged with another"
        if after is None:
            after, note = _remains(entry.op, module)
        if entry.kind == "kernel" and not entry.flops and not note:
            note = OPERATIONS_NOT_KNOWN
        if (times := _times(entry, after)) > 1:
            note = f"expanded to a dense product, {times} times the operations"
        rows.append(
            Matmul(
                layer=step.lowered.layer(index),
                call=layer_call.number if layer_call else 0,
                role=role,
                kind=entry.kind,
                sizes=entry.sizes,
                asked=tuple(map(long_name, entry.asked)),
                compiled=after.operands,
                result=after.result,
                accumulation=after.accumulation,
                flops=entry.flops * times * entry.at.repeats,
                repeats=entry.at.repeats,
                kernel=after.kernel,
                cycles=after.cycles,
                note=note,
                counted=entry.at.counted,
                runs=after.runs,
                traffic=entry.traffic * entry.at.repeats,
            )
        )
    return rows


@dataclass(frozen=True)
class Made:
    """A compiled product, with the library of its kernel.

    `elements` are those of its operands, the smaller first, and of its result.
    """

    operands: tuple[str, ...]
    result: str
    accumulation: str
    kernel: str
    cycles: int
    flops: int
    runs: str = ""
    elements: tuple[int, ...] = ()


_NOTHING = Made((), "", "", "", 0, 0)


def products(module: Module, platform: str) -> list[Made]:
    """Lists the dots, convolutions and kernels of a compiled module.

    Args:
        platform: "cuda", "tpu" or "cpu".
    """
    return [made for same_name in _made(module, platform).values() for made in same_name]


def _made(module: Module, platform: str) -> dict[str, list[Made]]:
    by_operation: dict[str, list[Made]] = defaultdict(list)
    for kernel, _ in module.kernels():
        for instruction in module.inside(kernel):
            if instruction.opcode in ("dot", "convolution") or _is_library(instruction) or _is_kernel(instruction):
                # What XLA makes of a block-scaled product without a kernel for it has the name on the kernel.
                name = instruction.operation or kernel.operation
                by_operation[name].append(_describe(instruction, kernel, module, platform))
    return by_operation


def _name_in(made: Mapping[str, Any], names: Sequence[str]) -> str | None:
    """Finds what was made of an operation under its own name, or under that and others, as of a dot and a transpose."""
    for name in names:
        if name in made:
            return name
    for name in names:
        for other in made:
            if set(name.split("/")) <= set(other.split("/")):
                return other
    return None


def _is_library(instruction: Instruction) -> bool:
    return instruction.opcode == "custom-call" and bool(re.search(r"gemm|matmul|conv|dot", instruction.target, re.I))


def _is_kernel(instruction: Instruction) -> bool:
    return instruction.opcode == "custom-call" and bool(_KERNELS.match(instruction.target))


def _describe(instruction: Instruction, kernel: Instruction, module: Module, platform: str) -> Made:
    shapes = module.shapes_of(instruction)
    if _is_kernel(instruction):  # before its operands are masks and counts
        shapes = [shape for shape in shapes if "f" in shape.dtype and len(shape.dimensions) > 1]
    shapes = shapes[:2]
    operands = tuple(long_name(shape.dtype) for shape in shapes)
    result = long_name(instruction.shapes[0].dtype)
    flops = 0
    contracted = re.search(r"lhs_contracting_dim(?:ensions\":\[\"|s=\{)(\d+)", instruction.attributes)
    if contracted and len(shapes) == 2 and not _is_kernel(instruction):
        flops = dot_flops(instruction.shapes[0].dimensions, [shapes[0].dimensions[int(contracted[1])]])
    return Made(
        operands,
        result,
        _accumulation(operands, instruction, platform),
        _kernel(instruction, kernel, platform),
        kernel.cycles,
        flops,
        kernel.name,
        (*sorted(math.prod(shape.dimensions) for shape in shapes), math.prod(instruction.shapes[0].dimensions)),
    )


def _times(entry: Contraction, made: Made) -> int:
    """How many times its own operations a product takes: a ragged one may be made dense, all rows by all matrices."""
    is_dense = made.flops > entry.flops if made.flops else sum(made.elements) > sum(_elements(entry))
    return entry.groups if is_dense else 1


def _elements(entry: Contraction) -> tuple[int, ...]:
    rows, _, columns = entry.sizes
    return *sorted(math.prod(operand.dimensions) for operand in entry.operands), rows * columns


def _of_equal_sizes(asked: Sequence[Contraction], made: Sequence[Made]) -> dict[str, Made]:
    """Joins what lost its name by its sizes: XLA for CPUs names no gradient of a convolution's kernel.

    Among equal ones the order decides, so that a kernel may be said to run the product of another layer of its size.
    """
    nameless: dict[tuple[int, ...], list[Made]] = defaultdict(list)
    for one in made:
        nameless[one.elements].append(one)
    joined = {}
    for entry in asked:
        elements = _elements(entry)
        for sizes in (elements, tuple(entry.groups * size for size in elements)):  # as it is, or made dense
            if nameless[sizes] and entry.op not in joined:
                joined[entry.op] = nameless[sizes].pop(0)
    return joined


def _kernel(instruction: Instruction, kernel: Instruction, platform: str) -> str:
    target = instruction.target or kernel.target
    for part, title in (
        ("cublas$lt$matmul$f8", "cuBLASLt FP8"),
        ("cublas$lt", "cuBLASLt"),
        ("cublas", "cuBLAS"),
        ("cudnn$fmha", "cuDNN attention"),
        ("tpu_custom_call", "Mosaic"),
        ("mosaic_gpu", "Mosaic"),
        ("cudnn$conv", "cuDNN convolution"),
        ("cudnn$blockScaledDot", "cuDNN block-scaled"),
        ("cudnn", "cuDNN"),
        ("triton", "Triton"),
        ("onednn", "oneDNN"),
        ("ynn", "YNNPACK"),
    ):
        if part in target:
            return title
    if target:
        return target
    if platform == "tpu":
        return "matrix unit"
    if platform == "cpu":
        return "XLA for CPUs"
    return "loop, no tensor cores"


def _accumulation(operands: tuple[str, ...], instruction: Instruction, platform: str) -> str:
    if any(dtype.startswith(("float8", "float4")) for dtype in operands):
        # Hopper sums FP8 products with fewer bits unless a higher precision is asked for.
        precise = re.search("HIGHEST|highest", instruction.attributes) or "blockScaled" in instruction.target
        return "float32" if precise or platform != "cuda" else "float32, fast"
    if operands and all(dtype == "int8" for dtype in operands):
        return "int32"
    if platform == "cpu":
        return long_name(instruction.shapes[0].dtype)
    return "float32"


def _merged(asked: Sequence[Contraction], compiled: Mapping[str, Made]) -> dict[str, str]:
    """Finds, for each dot that has no instruction of its own, the one that a compiler made of it and another.

    Compilers join dots that share an operand: the product is then larger than the dot whose name it bears; or the
    same, where both operands are.
    """
    by_source: dict[int, list[Contraction]] = defaultdict(list)
    for entry in asked:
        if entry.op in compiled:
            for source in entry.sources:
                by_source[source].append(entry)
    spare = {entry.op: compiled[entry.op].flops - entry.flops for entry in asked if entry.op in compiled}
    result = {}
    for entry in asked:
        if entry.op in compiled or entry.kind == "kernel":  # which no compiler joins
            continue
        for other in (other for source in entry.sources for other in by_source[source]):
            same = sorted(entry.sources) == sorted(other.sources)
            if same or spare[other.op] >= entry.flops:
                spare[other.op] -= 0 if same else entry.flops
                result[entry.op] = other.op
                break
    return result


def _remains(operation: str, module: Module) -> tuple[Made, str]:
    """What is left of a dot that is none any more: products and sums in a loop, or nothing."""
    for kernel, _ in module.kernels():
        for instruction in module.inside(kernel):
            if instruction.operation == operation and instruction.opcode in ("multiply", "reduce", "fusion", "add"):
                dtype = long_name(instruction.shapes[0].dtype)
                return Made(
                    (dtype,), dtype, dtype, "loop", kernel.cycles, 0, kernel.name
                ), "compiled as products and sums"
    return _NOTHING, "not in the compiled step"


def _roles(step: CompiledStep) -> list[tuple[int | None, str]]:
    """Finds the layer call and the role of each dot: from its name, and from which operand is a weight."""
    asked = step.asked.contractions
    full = [step.asked.full_name(entry.op) for entry in asked]
    weights = {i for i, argument in enumerate(step.lowered.arguments) if argument.kind in ("parameters", "state")}
    calls = [call_of(name) for name in full]
    # A weight that one call alone multiplies by tells whose a nameless product is.
    owners: dict[int, set[int]] = defaultdict(set)
    kernels: dict[int | None, set[int]] = defaultdict(set)
    activations: dict[int | None, set[int]] = defaultdict(set)
    for entry, name, call in zip(asked, full, calls, strict=True):
        if not is_backward(name):
            for weight, operand in zip(entry.weights, entry.operands, strict=True):
                if weight in weights:
                    kernels[call].add(math.prod(operand.dimensions))
                    if call is not None:
                        owners[weight].add(call)
                elif not any(w in weights for w in entry.weights):
                    rows, summed, columns = entry.sizes
                    activations[call] |= {rows * summed, summed * columns}
    result: list[tuple[int | None, str]] = []
    for entry, name, call in zip(asked, full, calls, strict=True):
        mine = [weight for weight in entry.weights if weight in weights]
        if call is None and mine and len(owners[mine[0]]) == 1:
            call = next(iter(owners[mine[0]]))
        result.append(
            (
                call,
                _role(
                    name,
                    bool(mine) or entry.kind == "kernel",
                    entry.sizes[0] * entry.sizes[2] * entry.groups,
                    kernels[call],
                    activations[call],
                ),
            )
        )
    return result


def _role(name: str, has_weight: bool, size: int, kernels: set[int], activations: set[int]) -> str:
    written = _ROLE.findall(name)
    if written:
        return written[-1].replace("_", " ")
    if "rematted_computation" in name:
        return "recomputed"
    if not is_backward(name):
        return "forward" if call_of(name) is not None or has_weight else UNATTRIBUTED
    if has_weight or "BackpropInput" in name:
        return "input gradient"
    if "BackpropFilter" in name or (size in kernels and size not in activations):
        return "kernel gradient"
    return "input gradient" if size in activations and size not in kernels else UNATTRIBUTED
