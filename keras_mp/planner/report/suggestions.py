"""What to change, in order of what it gains, each with the line of code that does it."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from keras_mp.lowering import UNATTRIBUTED
from keras_mp.planner.chips.targets import Target
from keras_mp.planner.read.findings import Sensitive
from keras_mp.planner.read.matmuls import Matmul, in_few_bits, seconds
from keras_mp.planner.read.memory import Memory
from keras_mp.precision.chips import Chip
from keras_mp.reporting import remedies
from keras_mp.reporting.text import pattern_of, shorten_middle, without_numbers

WORTHWHILE = 0.01  # of a step
_LAYER = 40  # characters of a layer's name
_LOW = ("float16", "bfloat16")


@dataclass(frozen=True)
class Advice:
    """One thing to change.

    Args:
        text: the fault, and the place where it is.
        code: the line that changes it.
        seconds: the gain of a step at the chip's peak rates, an estimate; 0 where it is not speed that is gained, or
            where the chip's rates are not known.
        at_most: the time of the products that are named, where they may gain but no rate says how much; else 0.
    """

    text: str
    code: str
    seconds: float = 0.0
    at_most: float = 0.0


def suggest(
    matmuls: Sequence[Matmul],
    sensitive: Sequence[Sensitive],
    memory: Memory,
    target: Target,
    precision: str,
    step_seconds: float = 0.0,
) -> list[Advice]:
    """Suggests changes to a compiled step, the most urgent first.

    Args:
        matmuls: the dots and convolutions of the step.
        sensitive: the exponentials and sums of the step in 16 bits.
        memory: the memory of the step.
        target: the target that it was compiled for.
        precision: the model's precision.
        step_seconds: the seconds of the whole step, as predicted: what gains less than `WORTHWHILE` of it is left out,
            but for FP8 that was asked for and is not there; 0 where it is not known.
    """
    urgent = [*_memory(memory, target), *_softmax(sensitive)]
    gains = [
        *_float32(matmuls, target.chip, precision),
        *_lost_bits(matmuls, target),
        *_sizes(matmuls, target),
    ]
    gains = [advice for advice in gains if not 0 < _worth(advice) < WORTHWHILE * step_seconds]
    gains += _lost_fp8(matmuls, target)
    return urgent + sorted(gains, key=lambda advice: -_worth(advice))


def _worth(advice: Advice) -> float:
    return advice.seconds or advice.at_most


def _memory(memory: Memory, target: Target) -> list[Advice]:
    if memory.fits:
        return []
    over = (memory.peak - memory.capacity) / 2**30
    state = memory.parameters + memory.optimizer
    if state > memory.capacity:
        text = f"Weights and optimizer alone, {state / 2**30:.1f} GiB, are more than {target.title} has: shard them."
        devices = 2 ** math.ceil(math.log2(state * target.devices / memory.capacity))
        return [Advice(text, remedies.DEVICES.format(strategy="fully_sharded", devices=devices))]
    text = (
        f"The step needs {over:.1f} GiB more than {target.title} has. Micro-batches need less, and make the same "
        "update if the loss divides by the number of rows or of targets, whatever masks or sample weights say. "
        "keras_mp.advise finds the cheapest measures that are enough."
    )
    return [Advice(text, remedies.MICRO_BATCHES.format(steps=4))]


def _softmax(sensitive: Sequence[Sensitive]) -> list[Advice]:
    softmaxes = [entry for entry in sensitive if entry.kind == "softmax"]
    if not softmaxes:
        return []
    lost = "6e-8" if softmaxes[0].dtype == "float16" else "1/256 of their neighbours"
    layers = named([entry.layer for entry in softmaxes])
    text = f"Softmax in {softmaxes[0].dtype} in {layers}: probabilities below {lost} are lost."
    return [Advice(text, remedies.STABILIZE)]


def _float32(matmuls: Sequence[Matmul], chip: Chip | None, precision: str) -> list[Advice]:
    in_float32 = [matmul for matmul in matmuls if "float32" in matmul.asked and matmul.kernel != "loop"]
    if not in_float32:
        return []
    low = "float16" if chip is not None and "bfloat16" not in chip.peak else "bfloat16"
    gain = 0.0
    if chip is not None and low in chip.peak:
        gain = sum(seconds(m, chip) - m.flops / (chip.peak[low] / chip.devices) for m in in_float32)
    if precision == "float32":
        text, code = "All products are asked for in float32.", remedies.POLICY
        return [Advice(text, code.format(precision=f"mixed_{low}"), gain)]
    layers = named([matmul.layer for matmul in in_float32])
    share = sum(m.flops for m in in_float32) / max(1, sum(m.flops for m in matmuls))
    if share < 0.005 and not gain:
        return []
    part = "less than 1%" if share < 0.005 else f"{share:.0%}"
    text = f"{len(in_float32)} products ({part} of the operations) are asked for in float32, in {layers}."
    return [Advice(text, remedies.AUDIT, gain)]


def _lost_fp8(matmuls: Sequence[Matmul], target: Target) -> list[Advice]:
    lost = [m for m in matmuls if in_few_bits(m.asked) and not in_few_bits(m.compiled)]
    if not lost:
        return []
    if target.chip is not None and "fp8" not in target.chip.peak:
        text = f"{target.title} has no FP8 units: {len(lost)} products asked for in FP8 run in {lost[0].operands}."
        return [Advice(text, remedies.NO_FP8)]
    gain = 0.0
    if target.chip is not None:
        gain = sum(seconds(m, target.chip) - m.flops / (target.chip.peak["fp8"] / target.chip.devices) for m in lost)
    text = f"{len(lost)} products asked for in FP8 run in {lost[0].operands}, in {named([m.layer for m in lost])}."
    return [Advice(text, remedies.FP8.format(scaling="delayed"), gain)]


def _lost_bits(matmuls: Sequence[Matmul], target: Target) -> list[Advice]:
    """16-bit products that the compiler runs in float32: on CPUs, why mixed precision is not faster."""
    widened = [m for m in matmuls if set(m.asked) <= set(_LOW) and "float32" in m.compiled]
    if not widened:
        return []
    share = sum(m.flops for m in widened) / max(1, sum(m.flops for m in matmuls))
    text = (
        f"{len(widened)} products ({share:.0%} of the operations) are asked for in {widened[0].asked[0]} and compiled "
        f"in float32: {target.title} casts the operands and then multiplies as before, so mixed precision is not "
        "faster there."
    )
    code = remedies.POLICY.format(precision="auto") + "  # what pays on this machine"
    if target.name == "host":
        code += "; on TensorFlow, jit_compile=False reaches the CPU's own bfloat16 kernels"
    return [Advice(text, code)]


def _sizes(matmuls: Sequence[Matmul], target: Target) -> list[Advice]:
    if target.chip is None:
        return []
    by_size: dict[tuple[int, int], list[Matmul]] = defaultdict(list)
    for matmul in matmuls:
        if matmul.layer == UNATTRIBUTED or not matmul.compiled:
            continue
        multiple = 128 if target.platform == "tpu" else 16 if in_few_bits(matmul.compiled) else 8
        for size in {size for size in matmul.off(multiple) if size > multiple}:
            by_size[size, multiple].append(matmul)
    advised = []
    for (size, multiple), group in by_size.items():
        padded = -(-size // multiple) * multiple
        spent = sum(seconds(m, target.chip) for m in group)
        # A TPU pads. A GPU takes a kernel without aligned loads, whose cost no data sheet says.
        gain = (spent * (1 - size / padded), 0.0) if target.platform == "tpu" else (0.0, spent)
        layers = named([m.layer for m in group])
        advised.append(
            Advice(
                f"The size {size} in {layers} is no multiple of {multiple}: the units of {target.title} work on "
                f"{padded} instead, or a slower kernel is taken.",
                f"{size} -> {padded}  # the next multiple of {multiple}",
                *gain,
            )
        )
    return sorted(advised, key=lambda advice: -_worth(advice))[:5]


def patterns(layers: Sequence[str]) -> list[str]:
    """Names layers, those of repeated blocks once."""
    blocks: dict[str, list[str]] = defaultdict(list)
    for layer in dict.fromkeys(layers):
        blocks[without_numbers(layer)].append(layer)
    return [pattern_of(group) for group in blocks.values()]


def named(layers: Sequence[str]) -> str:
    """Names three layers, and counts the others."""
    unique = patterns(layers)
    shown = ", ".join(repr(shorten_middle(layer, _LAYER)) for layer in unique[:3])
    return shown if len(unique) <= 3 else f"{shown} and {len(unique) - 3} more"
