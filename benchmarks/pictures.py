"""Makes the pictures of the pages anew: `KERAS_BACKEND=tensorflow python benchmarks/pictures.py [start gpt2 ...]`.

start: docs/start-inspect.svg, by running the Python of docs/index.md. gpt2: docs/gpt2-h100.svg, GPT-2 124M on 8 x 1024
tokens, compiled for an H100; minutes on 2 cores. peers: docs/results/peers-*.svg, from the figures beside them.
"""

import os
import runpy
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "benchmarks")]

import keras
from svg_pictures import stacked_bars

import keras_mp
from keras_mp.planner.read.memory import Memory
from keras_mp.planner.report.compile_report import CompileReport
from keras_mp.planner.report.compile_table import optimizer_title
from keras_mp.reporting.text import byte_size

DOCS = ROOT / "docs"


def drawn_parts(memory: Memory) -> dict[str, float]:
    """The parts of a drawn bar: as `memory_parts`, with what the forward pass keeps apart, and without a least size."""
    rest = memory.peak - memory.parameters - memory.optimizer - memory.other - memory.activations
    parts = {
        "weights": memory.parameters,
        optimizer_title(memory): memory.optimizer,
        "metrics and batch": memory.other,
        "kept for the backward pass": memory.activations,
        "other temporary": rest,
    }
    return {name: float(size) for name, size in parts.items() if size > 0}


def step_picture(report: CompileReport) -> str:
    """Memory at the peak and operations by dtype, a bar for each precision that was compiled, as SVG."""
    reports = {report.precision: report, **report.compared}
    memory = {f"{name}: {byte_size(other.memory.peak)}": drawn_parts(other.memory) for name, other in reports.items()}
    operations = {name: other.shares for name, other in reports.items()}
    charts = {
        "Memory of a step at its peak, by what takes it": memory,
        "Operations of the products, by the dtype of their operands as compiled": operations,
    }
    return stacked_bars(f"{report.model}, on {report.title}", charts)


def start():
    from test_docs import program

    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        Path("page.py").write_text(program(DOCS / "index.md"))
        keras.utils.set_random_seed(0)
        report = runpy.run_path("page.py")["report"]
        os.chdir(ROOT)
    (DOCS / "start-inspect.svg").write_text(step_picture(report))


def gpt2():
    from models.gpt import gpt

    keras.config.set_dtype_policy("mixed_bfloat16")
    model = keras_mp.stabilize(gpt("gpt2"))
    model.compile(keras.optimizers.AdamW(3e-4), keras_mp.lean.ChunkedCrossEntropy(), jit_compile=True)
    tokens = keras.KerasTensor((8, 1024), "int32")
    report = keras_mp.inspect(model, (tokens, tokens), "h100", compare=["float32"])
    report.model = "GPT-2 124M, lean (the kit's attention and chunked cross entropy), 8 x 1024 tokens"
    (DOCS / "gpt2-h100.svg").write_text(step_picture(report))
    for compiled in (report, report.compared["float32"]):
        peak, temporary = compiled.memory.peak / 2**20, compiled.memory.temporary / 2**20
        print(f"{compiled.precision}: peak {peak:.1f} MiB, temporary {temporary:.1f}, {compiled.shares}")


def peers():
    from peers import draw

    for path in (DOCS / "results").glob("peers-*.json"):
        draw(path)


PICTURES = {picture.__name__: picture for picture in (start, gpt2, peers)}

if __name__ == "__main__":
    for name in sys.argv[1:] or PICTURES:
        PICTURES[name]()
