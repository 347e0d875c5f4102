"""Makes the pictures of the pages anew: `KERAS_BACKEND=tensorflow python benchmarks/pictures.py [start gpt2 audit]`.

start: docs/start-*.svg, by running the Python of docs/index.md. gpt2: docs/gpt2-h100.svg, GPT-2 124M on 8 x 1024
tokens, compiled for an H100; minutes on 2 cores. audit: docs/numerics-audit.svg, of the training recipe language_model.
"""

import os
import runpy
import shutil
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import keras

import keras_mp

DOCS = ROOT / "docs"


def start():
    from test_docs import program

    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        Path("page.py").write_text(program(DOCS / "index.md"))
        keras.utils.set_random_seed(0)
        runpy.run_path("page.py")
        for name in ("start-audit.svg", "start-inspect.svg"):
            shutil.copy(name, DOCS)
        os.chdir(ROOT)


def gpt2():
    from models.gpt import gpt

    keras.config.set_dtype_policy("mixed_bfloat16")
    model = keras_mp.stabilize(gpt("gpt2"))
    model.compile(keras.optimizers.AdamW(3e-4), keras_mp.ChunkedCrossEntropy(), jit_compile=True)
    tokens = keras.KerasTensor((8, 1024), "int32")
    report = keras_mp.inspect(model, (tokens, tokens), "h100", compare=["float32"])
    report.to_svg(DOCS / "gpt2-h100.svg")
    for compiled in (report, report.compared["float32"]):
        peak, temporary = compiled.memory.peak / 2**20, compiled.memory.temporary / 2**20
        print(f"{compiled.precision}: peak {peak:.1f} MiB, temporary {temporary:.1f}, {compiled.shares}")


def audit():
    from recipes.run import batches, step

    model, _ = step(["language_model"])
    keras_mp.audit(model, batches(["language_model"]), 8).to_svg(DOCS / "numerics-audit.svg")


if __name__ == "__main__":
    for name in sys.argv[1:] or ("start", "gpt2", "audit"):
        {"start": start, "gpt2": gpt2, "audit": audit}[name]()
