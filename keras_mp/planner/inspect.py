"""Compile a step for a chip and report what the compiler made of it: `inspect`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import keras

from keras_mp.lowering import UNATTRIBUTED, Plan, Source, plan_of
from keras_mp.planner.chips.targets import Target, find_target
from keras_mp.planner.compile.compiler import compile_step
from keras_mp.planner.read import findings
from keras_mp.planner.read.collectives import Collective, CollectiveLayers, collectives
from keras_mp.planner.read.compiled_step import CompiledStep
from keras_mp.planner.read.matmuls import Matmul, join
from keras_mp.planner.read.memory import measure
from keras_mp.planner.report.compile_report import CompileReport
from keras_mp.planner.report.suggestions import suggest
from keras_mp.planner.time.estimate import estimate, impossible, link_time
from keras_mp.planner.time.step_time import step_time
from keras_mp.reporting.progress import progress


def inspect(
    model: keras.Model | Callable[[], keras.Model],
    batch: Any,
    target: str = "host",
    *,
    training: bool = True,
    compare: Sequence[str] = (),
    flags: dict[str, Any] | None = None,
    strategy: str | Plan | None = None,
) -> CompileReport:
    """Compiles one step of a model for a chip.

    The chip need not be attached; the report says what the compiler made of the step. Nothing is executed, and no
    weight changes. What `fit` creates before its first step, the optimizer's variables and the metrics', is created
    here too.

    Args:
        model: a built keras.Model, compiled where a training step is asked for; or a function without arguments that
            builds one. On JAX the function's variables get shapes and no values, so that a model larger than memory
            can be looked at. The policy "auto" is then that of the target.
        batch: a batch as `fit` takes it, (x, y) or (x, y, sample_weight); for inference x. Its parts are arrays, or
            anything with a shape and a dtype, such as `keras.KerasTensor`.
        target: a chip, such as "h100", "RTX 4090" or "v5e" (`keras-mp doctor --chips` lists them), or "host"; with
            `strategy` several: "h100x8" for 2, 4 or 8 GPUs of one host, "v5e-8" for a slice of 4, 8, 16, 32, 64, 128 or
            256 TPUs.
        training: whether a whole training step is compiled, with loss, backward pass and optimizer; otherwise
            inference.
        compare: other precisions to compile the same step in: "float32", "mixed_float16", "mixed_bfloat16", "fp8".
        flags: further options of XLA, such as `{"xla_gpu_enable_triton_gemm": False}`.
        strategy: the way in which several chips share the step, on JAX: "data", "fully_sharded" or "tensor" (as for
            `keras_mp.parallel.distribute`), or what that yields for as many devices. The batch is then that of all
            devices. The rules of "tensor" are those given there, or those that the model has from
            `keras_mp.parallel.tensor_rules`.

    Returns:
        The report. A step that does not fit the chip's memory is reported too; where the compiler refuses it, with the
        memory that its message names, the products as they are asked for, and no times.

    Raises:
        ValueError: If the model is not built or compiled, the batch does not fit it or the devices, a name or the
            slice is not known, several chips are named without a strategy or one with it, or a float16 model is to run
            on TPUs.
        ImportError: If the target's compiler is not installed; the message is the command that installs it.
        keras_mp.errors.CompileError: If the compiler fails; the message says at what.

    Examples:
        >>> import keras, keras_mp
        >>> choice = keras_mp.set_global_policy("mixed_bfloat16")
        >>> model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
        >>> model.compile("adam", "mse")
        >>> batch = keras.KerasTensor((16, 8), "float32"), keras.KerasTensor((16, 4), "float32")
        >>> report = keras_mp.inspect(model, batch)  # for this machine; or "h100", "v5e", which need not be attached
        >>> report.matmuls[0].asked
        ('bfloat16', 'bfloat16')
    """
    chip, source = find_target(target), Source(model)
    if strategy is None and chip.chips > 1:
        raise ValueError(
            f"target names {chip.chips} chips: pass strategy='data', 'fully_sharded' or 'tensor' to divide the step "
            f"over them, or target={chip.name!r}"
        )
    if strategy is not None and chip.chips == 1:
        raise ValueError(f"strategy={strategy!r} divides a step over several chips: name them, target='{chip.name}x4'")
    plan = None if strategy is None else plan_of(strategy, chip.devices, chip.topology)
    precisions = source.check_precisions(compare)

    def report_in(policy: str = "") -> CompileReport:
        tell(f"traces a step{policy and f' in {policy}'}")
        step = source.lower(batch, chip.traced, policy=policy, training=training, plan=plan)
        tell(f"compiles it for {chip.title}")
        compiled = compile_step(step, chip, {**step.flags, **(flags or {})})
        tell("reads the program", 1)
        return report_on(compiled, policy or step.precision, training=training, plan=plan)

    with progress("inspect", 1 + len(precisions)) as tell:
        report = report_in()
        others = {name: report if name == report.precision else report_in(name) for name in precisions}
    return dataclasses.replace(report, compared=others)


def report_on(step: CompiledStep, precision: str, *, training: bool = True, plan: Plan | None = None) -> CompileReport:
    """Reads a compiled step into a report, in any thread.

    Args:
        step: the compiled step, of one device or of a plan's.
        precision: the precision of the model, for the report.
        training: whether it is a training step.
        plan: the plan that it was lowered with.
    """
    target, module, chip, refused = step.target, step.module, step.target.chip, step.refused
    devices = plan.size if plan else 1
    matmuls, memory, sensitive = join(step), measure(step), findings.sensitive(step)
    # Of a step that the compiler divides, the products are known whole, and not as each device runs them.
    timed = refused is None and not (plan and plan.by_compiler)
    roofline = estimate(matmuls, module, chip) if chip and timed else None
    time = step_time(matmuls, module, chip, devices) if chip and timed else None
    sent: list[Collective] = []
    if plan:
        layers = CollectiveLayers(step, [matmul.layer for matmul in matmuls])
        sent = collectives(module, devices, layers.of, {matmul.runs for matmul in matmuls})
    known = matmuls if refused is None else []
    return CompileReport(
        model=step.lowered.model,
        target=target.name,
        title=target.title,
        backend=step.lowered.backend,
        precision=precision,
        training=training,
        batch=step.lowered.batch,
        matmuls=tuple(matmuls),
        sensitive=tuple(sensitive),
        casts=tuple(findings.casts(step)),
        cast_kernels=findings.cast_kernels(step),
        float32_work=tuple(findings.float32_work(step)),
        memory=memory,
        roofline=roofline,
        advice=tuple(suggest(known, sensitive, memory, target, precision, time.seconds if time else 0.0)),
        notes=tuple(_notes(target, matmuls, plan)),
        refused=refused.message if refused else "",
        versions=dict(step.versions),
        seconds=step.seconds,
        log=step.log,
        strategy=plan.strategy if plan else "",
        devices=devices,
        collectives=tuple(sent),
        link_time=link_time(sent, chip) if chip else None,
        time=time,
        flags={**step.flags, **target.libraries},
        error=impossible(matmuls, roofline, time.seconds, chip) if chip and roofline and time else "",
    )


def _notes(target: Target, matmuls: Sequence[Matmul], plan: Plan | None) -> list[str]:
    notes = []
    if plan is not None:
        notes.append(
            "On the wire: the bytes that a device sends if the collectives run on a ring of n devices, of an array's "
            "bytes 2(n-1)/n in an all-reduce, (n-1)/n in an all-gather, a reduce-scatter or an all-to-all, all in a "
            "permute."
        )
        if plan.by_compiler:
            notes.append("The products are listed as asked for; the compiler divides them over the devices.")
            if target.platform == "cuda":
                notes.append("Attention is compiled without cuDNN's kernel, which XLA divides only on real devices.")
    if target.platform == "cuda":
        notes.append(
            "Autotuning times kernels on the chip: there the choice between cuBLAS, cuDNN and Triton, and the tile "
            "sizes, can differ."
        )
    if target.chip is not None and target.chip.devices > 1 and plan is None:
        notes.append(f"One of the {target.chip.devices} devices that the runtime makes of one {target.title}.")
    if target.platform == "tpu" and any("float32" in matmul.compiled for matmul in matmuls):
        notes.append("A TPU multiplies float32 operands in one bfloat16 pass unless a higher precision is asked for.")
    if target.platform == "cuda" and target.chip is not None and "tfloat32" in target.chip.peak:
        if any("float32" in matmul.compiled for matmul in matmuls):
            notes.append("Products of float32 operands run as TensorFloat-32, with 10 bits of mantissa, by default.")
    if any(not matmul.counted for matmul in matmuls):
        notes.append("Products in loops of unknown length count once: for chosen experts, balanced routing.")
    if any(UNATTRIBUTED in (matmul.layer, matmul.role) for matmul in matmuls):
        notes.append("A product is unattributed where neither its name nor its operands tell which layer's it is.")
    return notes
