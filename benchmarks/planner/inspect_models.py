"""What the compilers make of ResNet-50 and GPT-2 124M, for four chips, two precisions and both backends.

    python benchmarks/planner/inspect_models.py --markdown docs/tables/inspect-models.md

Each backend, model and precision is lowered in a process of its own. The seconds are of the whole report; the
compiler's part is kept with its result (in keras_mp.planner.compile.compiler.cache_folder()), and so stays what it was.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from datetime import date
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

TARGETS = ("a100", "h100", "v5e", "v7x")
MODELS = ("resnet50", "gpt2")
COMPARED = ("float32", "mixed_bfloat16")
BACKENDS = ("tensorflow", "jax")
NAMES = (
    "model", "backend", "precision", "chip", "products", "in 16 bits", "of the operations", "unattributed", "TFLOP",
    "temporary GiB", "peak GiB", "fits", "bound ms", "Mcycles", "seconds",
)  # fmt: skip


def resnet50():
    import keras

    model = keras.applications.ResNet50(weights=None, classifier_activation=None)
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def gpt2():
    import keras

    from models.gpt import gpt

    model = gpt("gpt2")
    model.compile(keras.optimizers.AdamW(3e-4), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def batch_of(model: str):
    import keras

    if model == "resnet50":
        return keras.KerasTensor((64, 224, 224, 3), "float32"), keras.KerasTensor((64,), "int32")
    tokens = keras.KerasTensor((8, 1024), "int32")
    return tokens, tokens


def rows(model: str, precision: str, targets: list[str]) -> None:
    """Prints a row of figures, as JSON, for each target."""
    import keras

    import keras_mp

    keras.config.set_dtype_policy(precision)
    build = {"resnet50": resnet50, "gpt2": gpt2}[model]
    for target in targets:
        started = time.monotonic()
        report = keras_mp.inspect(build, batch_of(model), target)
        lowering = max(0.0, time.monotonic() - started - report.seconds)
        low = [m for m in report.matmuls if m.compiled and set(m.compiled) <= {"bfloat16", "float16"}]
        lost = sum(m.layer == "unattributed" or m.role == "unattributed" for m in report.matmuls)
        roofline = report.roofline
        figures = (
            model, report.backend, precision, target, len(report.matmuls), len(low),
            f"{sum(m.flops for m in low) / report.flops:.1%}", lost, f"{report.flops / 1e12:.3f}",
            f"{report.memory.temporary / 2**30:.2f}", f"{report.memory.peak / 2**30:.2f}",
            "yes" if report.memory.fits else "no", f"{roofline.seconds * 1e3:.1f}",
            f"{roofline.cycles / 1e6:.1f}" if roofline.cycles else "", f"{lowering + report.seconds:.0f}",
        )  # fmt: skip
        print(json.dumps(figures), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--backends", default=",".join(BACKENDS))
    parser.add_argument("--precisions", default=",".join(COMPARED))
    parser.add_argument("--targets", default=",".join(TARGETS))
    parser.add_argument("--markdown", type=Path, help="write the table there")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    targets = options.targets.split(",")
    if options.one:
        rows(options.models, options.precisions, targets)
        return
    lines = [f"| {' | '.join(NAMES)} |", "| --- | --- | --- | --- |" + " ---: |" * (len(NAMES) - 4)]
    for model in options.models.split(","):
        for backend in options.backends.split(","):
            for precision in options.precisions.split(","):
                command = [sys.executable, __file__, "--one", "--models", model, "--precisions", precision]
                process = subprocess.run(
                    [*command, "--targets", options.targets],
                    env=os.environ
                    | {"KERAS_BACKEND": backend, "JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3"}
                    | {"PYTHONPATH": str(Path(__file__).parents[2])},
                    stdout=subprocess.PIPE,
                    text=True,
                    check=True,
                )
                for line in process.stdout.splitlines():
                    lines.append(f"| {' | '.join(map(str, json.loads(line)))} |")
                    print(lines[-1], flush=True)
    if options.markdown:
        options.markdown.write_text(document(lines))


def document(lines: list[str]) -> str:
    return f"""\
# ResNet-50 and GPT-2 124M, compiled for chips that are not attached

Each row is one training step: `keras.applications.ResNet50` with a batch of 64 and SGD with momentum, or
`models.gpt` at GPT-2's size (vocabulary padded to 50304) with 8 x 1024 tokens and AdamW. Memory is reported by
the compiler. The bound is an estimate of the shortest possible time: all products at the chip's peak rate, or
all arrays once at its bandwidth, whichever is longer. Cycles are the sum of the TPU compiler's own estimates.
Seconds are for the whole report, including lowering, on 2 cores.

{chr(10).join(lines)}

{date.today()}. To reproduce: `python benchmarks/planner/inspect_models.py --markdown docs/tables/inspect-models.md`
"""


if __name__ == "__main__":
    main()
