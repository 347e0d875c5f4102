"""A report of each class, with text that must be escaped in HTML and numbers that JSON does not have."""

import dataclasses
import math
from pathlib import Path

import keras
import numpy as np

from keras_mp.bench.benchmark_report import BenchmarkReport
from keras_mp.bench.workloads import Measured
from keras_mp.export.export_report import DeploymentReport, ExportReport
from keras_mp.numerics.audit import audit
from keras_mp.numerics.audit_report import AuditReport
from keras_mp.numerics.verdict import Verdict
from keras_mp.planner.fit.advice_report import AdviceReport, ChipAdvice
from keras_mp.planner.fit.measures import Measures
from keras_mp.planner.read.collectives import Collective
from keras_mp.planner.read.findings import Casts, Float32Work, Sensitive
from keras_mp.planner.read.matmuls import Matmul
from keras_mp.planner.read.memory import Buffer, Memory
from keras_mp.planner.report.compile_report import CompileReport
from keras_mp.planner.report.suggestions import Advice
from keras_mp.planner.time.estimate import LinkTime, Roofline
from keras_mp.training.model_report import ModelReport, Part

MARKUP = "<b>'&\""


def _small_model():
    layers = [keras.Input((4,)), keras.layers.Dense(4, name="first"), keras.layers.Dense(1, name="second")]
    model = keras.Sequential(layers, name="small")
    model.compile("sgd", "mse")
    return model


def _batch():
    return np.ones((4, 4), "float32"), np.zeros((4, 1), "float32")


def audited() -> AuditReport:
    """An audit with a note, and a layer that overflows."""
    report = audit(_small_model(), _batch())
    report.model, report.notes = f"small {MARKUP}", [f"a note {MARKUP}"]
    report.layers[0].verdicts["mixed_float16"] = Verdict(False, "output", "it overflows", error=math.inf)
    return report


def benchmarked() -> BenchmarkReport:
    """Two rows that ran, and one that did not."""
    details = {"units": 32, "unit": "samples", "batch": 32, "device": "a CPU", "versions": {"keras": "3.15"}}
    rows = [
        Measured("float32", seconds=[0.2, 0.21], first=1.5, peak=2**28, details=details),
        Measured("mixed_bfloat16", seconds=[0.1, 0.15], first=1.0, details=details),
        Measured("fp8", "failed", f"no room {MARKUP}"),
    ]
    return BenchmarkReport(f"a model {MARKUP}", "float32", rows)


def compiled(precision: str = "mixed_bfloat16", *, compare: bool = True) -> CompileReport:
    """A step with an entry in each of its lists."""
    low = ("bfloat16", "bfloat16")
    product = Matmul(f"dense {MARKUP}", 1, "forward", "dot", (4, 130, 8), low, low, "float32", "float32", 10, 1, "k", 0)
    lost = Matmul("head", 1, "forward", "dot", (4, 130, 8), low, ("float32",) * 2, "float32", "float32", 20, 2, "k", 0)
    largest = (Buffer("dense", "activation", "bfloat16", (4, 8), 64),)
    sizes = (2**20, 2**21, 2**10, 2**19, 2**22, 2**21, 2**20, 2**20, 2**10, 2**23, 2**30)
    return CompileReport(
        model=f"gpt {MARKUP}",
        target="h100",
        title="NVIDIA H100",
        backend="jax",
        precision=precision,
        training=True,
        batch=("int32 (4, 8)",),
        matmuls=(product, lost),
        sensitive=(Sensitive("dense", "softmax", "bfloat16", 100, ""),),
        casts=(Casts("float32", "bfloat16", 3, 100),),
        cast_kernels=(2, 200),
        float32_work=(Float32Work("dense", 300),),
        memory=Memory(*sizes, largest),
        roofline=Roofline(1e-3, 1e-3, math.inf, 5),
        advice=(Advice(f"wide {MARKUP}", f"code {MARKUP}", 1e-4),),
        notes=(f"a note {MARKUP}",),
        versions={"jax": "0.10"},
        seconds=1.0,
        log="log.txt",
        collectives=(
            Collective("all-reduce", "float32", 4, f"dense {MARKUP}", 2, 8, 12),
            Collective("all-reduce", "float32", 4, "head", 1, 4, 6),
            Collective("collective-permute", "bfloat16", 0, "head", 1, 4, 4),
        ),
        link_time=LinkTime(math.inf, 22, 1e9, f"NVLink {MARKUP}"),
        compared={"float32": compiled("float32", compare=False)} if compare else {},
    )


def advised() -> AdviceReport:
    """A chip that fits, one that does not, and one of which nothing was compiled."""
    step = compiled()
    measures = Measures("mixed_bfloat16", micro_batches=2, strategy="data")
    fits = ChipAdvice(
        *("h100x4", "4 x H100", 4, True, measures, step.memory, step, "compiled", "", (f"code {MARKUP}",), 3, 1),
        (f"a note {MARKUP}",),
    )
    small = ChipAdvice("t4", "T4", 1, False, Measures("mixed_float16"), step.memory, step, "compiled", MARKUP)
    state = dataclasses.replace(step.memory, temporary=0, peak=3, largest=())
    shapes = ChipAdvice("v100", "V100", 1, None, None, state, None, "shapes alone", "no compiler")
    rows = (fits, small, shapes)
    return AdviceReport(
        f"gpt {MARKUP}", "jax", 124, ("int32[8]",), rows, 4, 1, 2.0, (f"a note {MARKUP}",), {"jax": "0"}
    )


def listed() -> ModelReport:
    """A part that is changed, one that can be and one that cannot, of each change."""
    parts = (
        Part("block/norm", "stabilize", "LayerNormalization", True, False, ""),
        Part("block/softmax", "stabilize", "Softmax", False, True, "it sums in bfloat16"),
        Part("block/own", "stabilize", "Own", False, False, f"code of its own {MARKUP}"),
        Part("block/up", "convert", "768 x 3072", True, False, "", 1.5),
        Part("block/down", "convert", "3072 x 768", False, True, "its product gains", 1.25),
        Part("head", "convert", "768 x 50257", False, False, f"it computes the output {MARKUP}"),
        Part("block/attention", "make_lean", "attention", True, False, ""),
        Part("block/gelu", "make_lean", "gelu", False, True, ""),
        Part("head", "make_lean", "head", False, False, f"an activation {MARKUP}"),
    )
    return ModelReport(f"gpt {MARKUP}", parts, "FP8", "FP8", "Predicted from peak rates for h100.", "convert(model)")


def exported() -> ExportReport:
    """A SavedModel that differs by an infinity."""
    return ExportReport(Path("folder") / f"saved {MARKUP}", 203, 0, math.inf, 1e-4, (f"a note {MARKUP}",))


def deployed() -> DeploymentReport:
    """An int8 file with an operator in float32."""
    operators = {"ADD": 2, "CONV": 1}
    path = Path("folder") / "model.tflite"
    return DeploymentReport(path, "LiteRT int8", 10, operators, 0, 0.1, None, {"ADD": 1}, 8, (MARKUP,))


EXAMPLES = {
    AdviceReport: advised,
    AuditReport: audited,
    BenchmarkReport: benchmarked,
    CompileReport: compiled,
    DeploymentReport: deployed,
    ExportReport: exported,
    ModelReport: listed,
}
