"""What the compiler of a chip made of one step: the figures of a report, which tables and pages are functions of."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from keras_mp.planner.read.collectives import Collective
from keras_mp.planner.read.findings import Casts, Float32Work, Sensitive
from keras_mp.planner.read.matmuls import Matmul, dtype_pair
from keras_mp.planner.read.memory import Memory
from keras_mp.planner.report.suggestions import Advice, named
from keras_mp.planner.time.estimate import LinkTime, Roofline
from keras_mp.planner.time.step_time import StepTime


@dataclass(frozen=True)
class Compilation:
    """One step of a model, compiled for a chip.

    Args:
        model: the model's name.
        target: the chip's name, such as "h100".
        title: the name of the chip that people use.
        backend: "tensorflow" or "jax".
        precision: the model's precision.
        training: whether it is a training step.
        batch: shape and dtype of each array of the batch.
        matmuls: every dot, convolution and kernel that stands for several.
        sensitive: exponentials and sums asked for in 16 bits.
        casts: the casts that are asked for, by dtypes.
        cast_kernels: the number of kernels that only cast and move, and the bytes that they read and write.
        float32_work: the float32 arrays written, by layer.
        memory: the memory that the step needs.
        roofline: the time that the chip's rates allow; None for the host.
        advice: the changes that are suggested.
        notes: sentences on what to know about the figures.
        versions: the versions of the packages that compiled.
        seconds: the seconds that the compiler took, now or when the result that was kept was made.
        log: the file with what the compiler printed.
        strategy: the way in which several devices share the step: "data", "fully_sharded" or "tensor"; "" on one.
        devices: the number of devices that share the step. `memory`, and with the first two layouts `matmuls`, are
            those of one of them.
        collectives: the arrays that devices send to each other.
        compared: the same step in other precisions, by their names.
        link_time: the time of the collectives at the rate of the chip's links; None on one device, and where the rate
            is not known.
        refused: the compiler's message where it refuses the step because it is larger than the memory: then `memory` is
            from that message, no product has a compiled dtype, and there are neither times nor collectives.
        time: a prediction of what the step takes; None for the host, for a step that the compiler divides over devices
            ("tensor"), and where it refuses the step.
        flags: the options of the compiler, where they are not its own; of GPUs also the version of cuDNN that was
            assumed.
        extrapolated: the numbers of the model's blocks that memory and times of `advise` are from, such as "4 and 8 of
            48 blocks"; products and all else that is listed are then of the larger number. "" where all were compiled.
        error: a sentence where the predicted time cannot be right, which is a fault of keras_mp; "" where it can.
    """

    model: str
    target: str
    title: str
    backend: str
    precision: str
    training: bool
    batch: tuple[str, ...]
    matmuls: tuple[Matmul, ...]
    sensitive: tuple[Sensitive, ...]
    casts: tuple[Casts, ...]
    cast_kernels: tuple[int, int]
    float32_work: tuple[Float32Work, ...]
    memory: Memory
    roofline: Roofline | None
    advice: tuple[Advice, ...]
    notes: tuple[str, ...]
    versions: dict[str, str]
    seconds: float
    log: str
    strategy: str = ""
    devices: int = 1
    collectives: tuple[Collective, ...] = ()
    compared: Mapping[str, Compilation] = field(default_factory=dict)
    link_time: LinkTime | None = None
    refused: str = ""
    time: StepTime | None = None
    flags: Mapping[str, Any] = field(default_factory=dict)
    extrapolated: str = ""
    error: str = ""

    @property
    def flops(self) -> int:
        """Floating-point operations of all dots, convolutions and kernels in one step; a multiply-add is two."""
        return sum(matmul.flops for matmul in self.matmuls)

    @property
    def shares(self) -> dict[str, float]:
        """The share of the operations by operand dtypes as compiled, the largest first."""
        flops: dict[str, int] = defaultdict(int)
        for matmul in self.matmuls:
            flops[matmul.operands] += matmul.flops
        return {dtype: count / self.flops for dtype, count in sorted(flops.items(), key=lambda item: -item[1])}

    @property
    def asked_and_compiled(self) -> list[str]:
        """A sentence for each dtype that is asked for: how many products, and the dtypes they run and are summed in."""
        kinds: dict[str, list[Matmul]] = defaultdict(list)
        for matmul in self.matmuls:
            kinds[_family(matmul.asked)].append(matmul)
        return [self._kind(wanted, products) for wanted, products in kinds.items()]

    def _kind(self, wanted: str, products: Sequence[Matmul]) -> str:
        count = f"{len(products)} of {len(self.matmuls)} products"
        if self.refused:
            return f"{count} are {wanted} in the model; none is compiled."
        sums = ", ".join(dict.fromkeys(matmul.accumulation for matmul in products if matmul.accumulation))
        summed = f", with sums in {sums}." if sums else "."
        others: dict[str, list[str]] = defaultdict(list)
        for matmul in products:
            if _family(matmul.compiled) != wanted:
                others[_family(matmul.compiled)].append(matmul.layer)
        if not others:
            return f"{count} run in {wanted}{summed}"
        kept = len(products) - sum(map(len, others.values()))
        changed = "".join(
            f", the compiler removed {len(layers)} ({named(layers)})"
            if dtype == "none"
            else f", {len(layers)} in {dtype} ({named(layers)})"
            for dtype, layers in others.items()
        )
        return (
            f"{count} are {wanted} in the model: {kept} {'runs' if kept == 1 else 'run'} in {wanted}{changed}{summed}"
        )


def _family(dtypes: Sequence[str]) -> str:
    if dtypes and all(dtype.startswith("float8") for dtype in dtypes):
        return "FP8"
    if dtypes and all(dtype.startswith("float4") for dtype in dtypes):
        return "NVFP4"
    return dtype_pair(dtypes)
