"""What a task goes through, step by step; each step returns what to note of it, or raises."""

import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import keras_mp
from benchmarks.kerashub_tasks.plain import failure, one_line, prepared
from benchmarks.kerashub_tasks.task import BATCH, Task, under
from keras_mp.export.verification import relative_difference
from keras_mp.fp8.layers import Float8Layer
from keras_mp.numerics.nonfinite import LOWER_SCALE
from keras_mp.rebuild.walk import layers_by_path
from keras_mp.stability.sensitive import sensitive_layers

POLICY = "mixed_float16"
MOST_STEPS = 20
PRODUCTS = (keras.layers.Dense, keras.layers.EinsumDense)
TOO_LARGE = 2.0**60  # a loss scale that no gradient in float16 bears


class Missed(AssertionError):
    """A step came to an end with the wrong result."""


@dataclass
class Cell:
    """What became of a step.

    Attributes:
        status: "works", "keras" where plain Keras fails too, "fault" where it does not, "" where there was nothing to
            run the step on.
        note: a few figures.
        error: the kit's, on one line.
        plain: the policy, the line and the error of plain Keras.
        warning: the kit's own, where it works.
    """

    status: str
    note: str = ""
    error: str = ""
    plain: tuple[str, str, str] | None = None
    warning: str = ""


@dataclass
class Subject:
    """A task on its way."""

    config: Task
    folder: Path
    model: Any = None
    data: tuple[Any, ...] = ()
    batch: tuple[Any, ...] = ()
    finite: bool = True  # whether the losses of fit were
    warning: str = ""

    @property
    def x(self) -> Any:
        return self.batch[0]

    def compile(self, model: Any) -> None:
        optimizer = keras_mp.loss_scaling.wrap_optimizer(keras.optimizers.Adam(1e-3), model)
        model.compile(optimizer=optimizer, **self.config.compile)


def build(subject: Subject) -> str:
    subject.model = subject.config.build()
    subject.data = subject.config.data(subject.model)
    subject.batch = prepared(subject.model, subject.data)
    return f"{subject.model.count_params():,}"


def stabilize(subject: Subject) -> str:
    """All sensitive layers are treated."""
    count = len(sensitive_layers(subject.model))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        stabilized = keras_mp.stabilize(subject.model)
    subject.warning = next((str(each.message) for each in caught if "stabilize(" in str(each.message)), "")
    left = sensitive_layers(stabilized)
    if left:
        raise Missed(f"stabilize leaves {', '.join(layer.path for layer in left[:3])} in low precision, of {len(left)}")
    subject.model = stabilized
    return f"{count} layers"


def fit(subject: Subject) -> str:
    """Three steps that are applied: finite losses, finite weights, most of which have moved.

    Skipped ones, while the loss scale comes down from where it starts, are not counted.
    """
    subject.compile(subject.model)
    weights = subject.model.trainable_variables
    before = [keras.ops.convert_to_numpy(weight) for weight in weights]
    losses: list[float] = []
    skipped = 0
    while len(losses) - skipped < 3 and len(losses) < MOST_STEPS:
        losses += subject.model.fit(*subject.data, batch_size=BATCH, verbose=0).history["loss"]
        skipped = int(keras.ops.convert_to_numpy(getattr(subject.model.optimizer, "skipped_steps", 0)))
    after = [keras.ops.convert_to_numpy(weight) for weight in weights]
    subject.finite = bool(np.isfinite(losses).all())
    if not subject.finite:
        raise Missed(f"the losses are {', '.join(f'{loss:.3g}' for loss in losses[:5])}, ...")
    if not all(np.isfinite(value).all() for value in after):
        raise Missed("a weight is not finite after fit")
    moved = [weight for weight, old, new in zip(weights, before, after, strict=True) if np.any(old != new)]
    if len(moved) < len(weights) / 2:
        raise Missed(f"{len(moved)} of {len(weights)} weights have moved; the losses are {losses}")
    told = f", {skipped} steps skipped before" if skipped else ""
    return f"{losses[0]:.3g} to {losses[-1]:.3g}, {len(moved)} of {len(weights)} weights moved{told}"


def find_nonfinite(subject: Subject) -> str:
    """Nothing in a clean step; a loss scale that float16 does not bear is found in the backward pass.

    Where the losses of fit were not finite, no step is clean: then that is what must be found.
    """
    clean = keras_mp.numerics.find_nonfinite(subject.model, subject.batch, loss_scale=1.0)
    if not subject.finite:
        if clean is None or clean.backward or not clean.path:
            raise Missed(f"the losses of fit are not finite, and that is taken for {clean}")
        return f"names {clean.path.rpartition('/')[2]}: {clean.kind} in the forward pass"
    if clean is not None:
        raise Missed(f"a clean step is blamed: {clean}")
    overflow = keras_mp.numerics.find_nonfinite(subject.model, subject.batch, loss_scale=TOO_LARGE)
    if overflow is None or overflow.remedy != LOWER_SCALE or not overflow.backward:
        raise Missed(f"an overflow at loss scale {TOO_LARGE:g} is taken for {overflow}")
    return f"{overflow.path.rpartition('/')[2]} at 2^60, finite at {overflow.fitting_scale:g}"


def audit(subject: Subject) -> str:
    """A finite loss, and a gradient of the weights of some layer."""
    report = keras_mp.audit(subject.model, subject.batch)
    if not np.isfinite(report.loss):
        raise Missed(f"the loss of the audit is {report.loss}")
    trained = [layer for layer in report.layers if "kernel gradient" in layer.ranges]
    if not trained:
        raise Missed("no layer of the audit has a gradient")
    return f"{len(report.layers)} layers, {len(report.suspects())} suspects"


def export_float32(subject: Subject) -> str:
    """Nothing in 16 bits, and no more than 1e-5 from the model in float32."""
    report = keras_mp.export_float32(subject.model, subject.folder / "float32", verify=subject.x)
    if report.low_precision_ops:
        raise Missed(str(report))
    return f"0 of {report.nodes:,} nodes, {report.max_difference:.1e}"


def convert(subject: Subject) -> str:
    """Products in FP8, and outputs near those before."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        converted = keras_mp.convert(subject.model, select=lambda path, layer: True)
    texts = [str(each.message) for each in caught if "convert(" in str(each.message)]
    subject.warning = texts[0] if texts else ""
    products = [layer for layer in layers_by_path(converted).values() if isinstance(layer, Float8Layer)]
    if not products:
        if any(isinstance(layer, PRODUCTS) for layer in layers_by_path(subject.model).values()):
            raise Missed(f"no product is in FP8: {texts}")
        return "has no Dense layer"
    gap = _distance(_outputs(converted, subject.x), _outputs(subject.model, subject.x))
    if not gap < 0.5:
        raise Missed(f"the outputs in FP8 are off by {gap:.1e} of their size")
    return f"{len(products)} products, off by {gap:.1e}"


def _outputs(model: Any, x: Any) -> Any:
    """In graph mode, as fit and predict run it: MaskedLMHead of KerasHub fails in eager mode under mixed_float16."""
    return tf.function(model)(x, training=False)


def _distance(actual: Any, expected: Any) -> float:
    """The largest of the outputs' differences, each of its output's size, by their norms."""
    pairs = [
        [np.asarray(keras.ops.convert_to_numpy(leaf), "float64") for leaf in (a, b)]
        for a, b in zip(keras.tree.flatten(actual), keras.tree.flatten(expected), strict=True)
    ]
    return max(float(np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-30)) for a, b in pairs)


def save(subject: Subject) -> str:
    """The same outputs from the file."""
    path = subject.folder / "task.keras"
    subject.model.save(path)
    loaded = keras.saving.load_model(path)
    gap = relative_difference(_outputs(loaded, subject.x), _outputs(subject.model, subject.x))
    if not gap <= 1e-6:
        raise Missed(f"the outputs of the loaded task are off by {gap:.1e}")
    return f"{gap:.1e}"


STEPS: dict[str, Callable[[Subject], str]] = {
    "build": build,
    "stabilize": stabilize,
    "fit": fit,
    "find_nonfinite": find_nonfinite,
    "audit": audit,
    "export_float32": export_float32,
    "convert": convert,
    "save": save,
}


def row(config: Task, done: Callable[[dict[str, Any]], None] = lambda row: None) -> dict[str, Any]:
    """Takes a task through all steps.

    Args:
        config: the task's.
        done: a function that is given the row after each step.

    Returns:
        `{"family": ..., "cells": {step: cell}, "seconds": {step: seconds}}`.
    """
    made: dict[str, Any] = {"family": config.family, "cells": {}, "seconds": {}}
    # The policy is global, as in a program that sets it first: some layers of KerasHub take it wherever they are built.
    with tempfile.TemporaryDirectory() as folder, under(POLICY):
        subject = Subject(config, Path(folder))
        for step in STEPS:
            made["running"] = step
            done(made)
            started = time.process_time()
            made["cells"][step] = asdict(_cell(step, subject))
            made["seconds"][step] = round(time.process_time() - started, 1)
    made["running"] = ""
    done(made)
    return made


def _cell(step: str, subject: Subject) -> Cell:
    if step != "build" and not subject.batch:
        return Cell("")
    subject.warning = ""
    try:
        return Cell("works", STEPS[step](subject), warning=subject.warning)
    except Exception as error:
        plain = failure(step, subject.config, subject.folder)
        return Cell("fault" if plain is None else "keras", error=one_line(error), plain=plain)
