"""What a compiled step runs, in which precision, with how much memory: `inspect` and its report."""

from __future__ import annotations

import dataclasses
import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras

from keras_mp.backend.common.lowered import UNATTRIBUTED
from keras_mp.conversion.in_precision import FP8, check_precision, in_precision, precision_of
from keras_mp.parallel.plan import Plan, plan_of
from keras_mp.precision.policy import policy_scope
from keras_mp.reporting.html import write_text
from keras_mp.xla import findings
from keras_mp.xla.advice import Advice, advise, asks_fp8, runs_fp8
from keras_mp.xla.collectives import Collective, collectives
from keras_mp.xla.compile import compile_step
from keras_mp.xla.compiled_step import build_without_values, lower_step
from keras_mp.xla.estimate import Roofline, estimate
from keras_mp.xla.findings import Casts, Float32Work, Sensitive
from keras_mp.xla.hlo import parse
from keras_mp.xla.matmuls import Matmul, dtype_pair, join
from keras_mp.xla.memory import Memory, measure
from keras_mp.xla.targets import Target, find_target, slice_of


class CheckError(AssertionError):
    """A compiled step is not as a test wants it; the message lists the operations that are not."""


@dataclass(frozen=True)
class CompileReport:
    """What the compiler of a chip made of one step of a model.

    Args:
        model: the model's name.
        target: the chip's name, such as "h100".
        title: the name that people use.
        backend: "tensorflow" or "jax".
        precision: the model's precision.
        training: whether it is a training step.
        batch: shape and dtype of each array of the batch.
        matmuls: every dot and convolution.
        sensitive: exponentials and sums asked for in 16 bits.
        casts: the casts that are asked for, by dtypes.
        cast_kernels: how many kernels only cast and move, and the bytes that they read and write.
        float32_work: the float32 arrays written, by layer.
        memory: what the step needs.
        roofline: what the chip's rates allow; None for the host.
        advice: what to change.
        notes: what to know about the figures.
        versions: of the packages that compiled.
        seconds: how long the compiler took, now or when the result that was kept was made.
        log: the file with what the compiler printed.
        layout: how several devices share the step: "data", "fully_sharded" or "tensor"; "" on one.
        devices: how many share it. `memory`, and with the first two layouts `matmuls`, are those of one of them.
        collectives: what they send to each other.
        compared: the same step in other precisions, by their names.
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
    layout: str = ""
    devices: int = 1
    collectives: tuple[Collective, ...] = ()
    compared: dict[str, CompileReport] = dataclasses.field(default_factory=dict)

    @property
    def flops(self) -> int:
        """Floating-point operations of all dots and convolutions in one step; a multiply-add is two."""
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
        """A sentence for each dtype that is asked for: how many products, and in what they run."""
        sentences = []
        for wanted in dict.fromkeys(_family(matmul.asked) for matmul in self.matmuls):
            group = [matmul for matmul in self.matmuls if _family(matmul.asked) == wanted]
            kept = sum(_family(matmul.compiled) == wanted for matmul in group)
            others: dict[str, int] = defaultdict(int)
            for matmul in group:
                if _family(matmul.compiled) != wanted:
                    others[_family(matmul.compiled)] += 1
            changed = "".join(
                f"; {count} {'in ' + dtype if dtype != 'none' else 'in none'}" for dtype, count in others.items()
            )
            sentences.append(
                f"{len(group)} of {len(self.matmuls)} matmuls asked for {wanted}; {kept} run in {wanted}{changed}"
            )
        return sentences

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
            fp8_share: at least this share of the operations, 0 to 1, runs with FP8 operands.
            fp8_kept: every product asked for in FP8 runs in FP8.
            low_precision_share: at least this share of the operations runs with operands of 16 or 8 bits.
            no_low_precision_softmax: no softmax is asked for in 16 bits.
            fits: the chip's memory holds the step.

        Raises:
            CheckError: If something is not so; the message lists the operations.
            ValueError: If a share is not from 0 to 1.
        """
        wrong = []
        for name, share, holds in (
            ("fp8_share", fp8_share, runs_fp8),
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
        lost = [matmul for matmul in self.matmuls if asks_fp8(matmul) and not runs_fp8(matmul)]
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

    def to_json(self) -> str:
        """The whole report as JSON."""
        return json.dumps(dataclasses.asdict(self))

    def to_html(self, path: str | Path) -> Path:
        """Writes the report as one HTML file, pictures inside.

        Args:
            path: the file; an existing one is replaced.

        Returns:
            The path.
        """
        from keras_mp.xla.html import write

        return write(self, Path(path))

    def to_svg(self, path: str | Path) -> Path:
        """Writes the picture: memory and operations by dtype, a bar for each precision; and returns the path."""
        from keras_mp.xla.html import picture

        return write_text(picture(self), Path(path))

    def __rich__(self) -> Any:
        from keras_mp.xla.table import render

        return render(self)

    def __str__(self) -> str:
        from keras_mp.xla.table import text

        return text(self)


def inspect(
    model: Any,
    batch: Any,
    target: str = "host",
    *,
    training: bool = True,
    compare: Sequence[str] = (),
    flags: dict[str, Any] | None = None,
    strategy: str | Plan | None = None,
    chips: int = 4,
) -> CompileReport:
    """Compiles one step of a model for a chip that need not be attached, and reports what the compiler made of it.

    Nothing is executed, and no weight changes. What `fit` creates before its first step, the optimizer's variables and
    the metrics', is created here too.

    Args:
        model: a built keras.Model, compiled where a training step is asked for; or a function without arguments that
            builds one. On JAX the function's variables get shapes and no values, so that a model larger than memory
            can be looked at.
        batch: what `fit` takes a batch to be, (x, y) or (x, y, sample_weight); for inference x. Arrays, or anything
            with a shape and a dtype, such as `keras.KerasTensor`.
        target: a chip, such as "h100" or "v5e" (`keras-mp targets` lists them), or "host".
        training: a whole training step, with loss, backward pass and optimizer; otherwise inference.
        compare: other precisions to compile the same step in: "float32", "mixed_float16", "mixed_bfloat16", "fp8".
        flags: further options of XLA, such as `{"xla_gpu_enable_triton_gemm": False}`.
        strategy: for a slice of several TPUs, on JAX: "data", "fully_sharded" or "tensor" (as for
            `keras_mp.distribute`), or a `keras_mp.parallel.plan.Plan`. The batch is then that of all devices. The rules
            of "tensor" are the Plan's, or those that the model has from `keras_mp.tensor_rules`.
        chips: of the slice: 4, 8, 16, 32, 64, 128 or 256. A Plan has as many devices as the slice.

    Returns:
        The report. A step that does not fit the chip's memory is reported too.

    Raises:
        ValueError: If the model is not built or compiled, the batch does not fit it or the slice's devices, a name or
            the slice is not known, or a float16 model is to run on TPUs.
        ImportError: If the target's compiler is not installed; the message is the command that installs it.
        keras_mp.xla.compile.CompileError: If the compiler fails; the message says at what.
    """
    chip = find_target(target)
    plan = None
    if strategy is not None:
        chip = slice_of(chip, chips)
        plan = plan_of(strategy, chip.devices)
    precisions = [check_precision(name) for name in ([compare] if isinstance(compare, str) else compare)]
    build: Callable[[], Any] | None = None
    if not isinstance(model, keras.Model) and callable(model):
        build = model
        model = build_without_values(build)
    report = _report(model, batch, chip, training, flags, plan)
    compared = {}
    for precision in precisions:
        if precision == report.precision:
            compared[precision] = report
        else:
            other = _rebuilt(build, precision) if build else in_precision(model, precision)
            compared[precision] = dataclasses.replace(
                _report(other, batch, chip, training, flags, plan), precision=precision
            )
    return dataclasses.replace(report, compared=compared)


def _rebuilt(build: Callable[[], Any], precision: str) -> Any:
    if precision == FP8:
        raise ValueError("compare='fp8' needs a model: a function that builds one in FP8 can be inspected by itself")
    with policy_scope(precision):
        return build_without_values(build)


def _report(
    model: Any, batch: Any, target: Target, training: bool, flags: dict[str, Any] | None, plan: Plan | None
) -> CompileReport:
    lowered = lower_step(model, batch, training=training, platform=target.platform, plan=plan)
    compiled = compile_step(lowered, target, flags)
    module = parse(compiled.hlo)
    described = compiled.described
    matmuls = join(lowered, described, module, target.platform)
    chip = target.chip
    memory = measure(lowered, described, module, chip.memory_bytes // chip.devices if chip else 0)
    sensitive = findings.sensitive(lowered, described, module)
    precision = precision_of(model)
    arguments = [argument for argument in lowered.arguments if argument.kind == "batch"]
    return CompileReport(
        model=model.name,
        target=target.name,
        title=target.title,
        backend=lowered.backend,
        precision=precision,
        training=training,
        batch=tuple(f"{argument.dtype}{list(argument.shape)}" for argument in arguments),
        matmuls=tuple(matmuls),
        sensitive=tuple(sensitive),
        casts=tuple(findings.casts(described)),
        cast_kernels=findings.cast_kernels(module),
        float32_work=tuple(findings.float32_work(lowered, described, module)),
        memory=memory,
        # Of a step that the compiler divides, the products are known whole, and not as each device runs them.
        roofline=estimate(matmuls, module, chip) if chip and not (plan and plan.by_compiler) else None,
        advice=tuple(advise(matmuls, sensitive, memory, target, precision)),
        notes=(*_notes(target, matmuls, lowered.backend, plan), *filter(None, [compiled.note])),
        versions=dict(compiled.versions),
        seconds=compiled.seconds,
        log=compiled.log,
        layout=plan.layout if plan else "",
        devices=plan.size if plan else 1,
        collectives=tuple(collectives(module)),
    )


def _notes(target: Target, matmuls: Sequence[Matmul], backend: str, plan: Plan | None) -> list[str]:
    notes = []
    if plan is not None:
        notes.append(
            "Bytes of collectives are those of the whole arrays. Estimates of time leave out what the links between "
            "the chips take."
        )
        if plan.by_compiler:
            notes.append("The products are listed as asked for; the compiler divides them over the devices.")
    if target.platform == "cuda":
        notes.append(
            "Compiled without autotuning, which times kernels on the chip: there the choice between cuBLAS, cuDNN and "
            "Triton, and the tile sizes, can differ."
        )
        if backend == "jax":
            notes.append(
                "On JAX, Keras takes cuDNN's fused attention where it finds a GPU when the step is traced; here it "
                "found none."
            )
    if target.chip is not None and target.chip.devices > 1 and plan is None:
        notes.append(f"One of the {target.chip.devices} devices that the runtime makes of one {target.title}.")
    if target.platform == "tpu" and any("float32" in matmul.compiled for matmul in matmuls):
        notes.append("A TPU multiplies float32 operands in one bfloat16 pass unless a higher precision is asked for.")
    if target.platform == "cuda" and target.chip is not None and "tfloat32" in target.chip.peak:
        if any("float32" in matmul.compiled for matmul in matmuls):
            notes.append("Products of float32 operands run as TensorFloat-32, with 10 bits of mantissa, by default.")
    if any(not matmul.counted for matmul in matmuls):
        notes.append("Products in loops of unknown length are counted once.")
    if any(UNATTRIBUTED in (matmul.layer, matmul.role) for matmul in matmuls):
        notes.append("A product is unattributed where neither its name nor its operands tell which layer's it is.")
    return notes


def _family(dtypes: Sequence[str]) -> str:
    if dtypes and all(dtype.startswith("float8") for dtype in dtypes):
        return "FP8"
    return dtype_pair(dtypes)


def _runs_low(matmul: Matmul) -> bool:
    return bool(matmul.compiled) and all(
        dtype.startswith("float8") or dtype in ("float16", "bfloat16") for dtype in matmul.compiled
    )


def _listed(matmuls: Sequence[Matmul]) -> str:
    lines = [
        f"  {matmul.layer} ({matmul.role}): {' x '.join(map(str, matmul.sizes))} in {matmul.operands}"
        for matmul in sorted(matmuls, key=lambda matmul: -matmul.flops)
    ]
    more = [f"  and {len(lines) - 20} more"] if len(lines) > 20 else []
    return "\n".join(lines[:20] + more)
