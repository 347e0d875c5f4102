"""The report of `inspect`: what the compiler of a chip made of one step, that can be printed, written and checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rich.console import RenderableType

from keras_mp.planner.read.matmuls import Matmul, in_few_bits
from keras_mp.planner.report import compile_table
from keras_mp.planner.report.compilation import Compilation
from keras_mp.reporting.answer import Sentence
from keras_mp.reporting.report import Report


class CheckError(AssertionError):
    """A compiled step that fails a check."""


@dataclass(frozen=True)
class CompileReport(Compilation, Report):
    """The result of compiling a model's step for a chip."""

    in_the_shell = True

    compared: Mapping[str, CompileReport] = field(default_factory=dict)

    def _title(self) -> str:
        return f"{self.model} on {self.title}"

    def _answer(self) -> list[Sentence]:
        return compile_table.answer(self)

    def _tables(self) -> dict[str, list[RenderableType]]:
        return compile_table.tables(self)

    def check(
        self,
        *,
        fp8_share: float | None = None,
        fp8_kept: bool = False,
        low_precision_share: float | None = None,
        no_low_precision_softmax: bool = False,
        fits: bool = False,
    ) -> None:
        """Raises unless the step is as wanted; for tests.

        Args:
            fp8_share: the least share of the operations, 0 to 1, that must run with FP8 operands.
            fp8_kept: whether every product asked for in FP8 must run in FP8.
            low_precision_share: the least share of the operations, 0 to 1, that must run with operands of 16 or 8 bits.
            no_low_precision_softmax: whether no softmax may be asked for in 16 bits.
            fits: whether the chip's memory must hold the step.

        Raises:
            CheckError: If something is not so; the message lists the operations.
            ValueError: If a share is not from 0 to 1.
        """
        wrong = []
        for name, share, holds in (
            ("fp8_share", fp8_share, lambda matmul: in_few_bits(matmul.compiled)),
            ("low_precision_share", low_precision_share, _runs_low),
        ):
            if share is None:
                continue
            if not 0 <= share <= 1:
                raise ValueError(f"{name} must be from 0 to 1, got {share}")
            others = [matmul for matmul in self.matmuls if not holds(matmul)]
            have = 1 - sum(matmul.flops for matmul in others) / max(1, self.flops)
            if have < share:
                wrong.append(f"{name} is {have:.3f}, below {share}:\n{_listed(others)}")
        lost = [matmul for matmul in self.matmuls if in_few_bits(matmul.asked) and not in_few_bits(matmul.compiled)]
        if fp8_kept and lost:
            wrong.append(f"{len(lost)} products asked for in FP8 do not run in FP8:\n{_listed(lost)}")
        softmax = [entry for entry in self.sensitive if entry.kind == "softmax"]
        if no_low_precision_softmax and softmax:
            layers = "\n".join(
                f"  {entry.layer}: softmax of {entry.elements} values in {entry.dtype}" for entry in softmax
            )
            wrong.append(f"softmax in 16 bits:\n{layers}")
        if fits and not self.memory.fits:
            need, have_memory = self.memory.peak / 2**30, self.memory.capacity / 2**30
            wrong.append(f"the step needs {need:.2f} GiB, and {self.title} has {have_memory:.2f}")
        if wrong:
            raise CheckError(f"the step of {self.model!r} on {self.title}: " + "\n".join(wrong))


def _runs_low(matmul: Matmul) -> bool:
    return bool(matmul.compiled) and all(
        dtype.startswith(("float8", "float4")) or dtype in ("float16", "bfloat16") for dtype in matmul.compiled
    )


def _listed(matmuls: Sequence[Matmul]) -> str:
    lines = [
        f"  {matmul.layer} ({matmul.role}): {' x '.join(map(str, matmul.sizes))} in {matmul.operands}"
        for matmul in sorted(matmuls, key=lambda matmul: -matmul.flops)
    ]
    more = [f"  and {len(lines) - 20} more"] if len(lines) > 20 else []
    return "\n".join(lines[:20] + more)
