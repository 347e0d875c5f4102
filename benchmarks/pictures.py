"""Makes the pictures of the pages anew: `KERAS_BACKEND=tensorflow python benchmarks/pictures.py [start gpt2 ...]`.

start: docs/start-inspect.svg, by running the Python of docs/index.md. gpt2: docs/gpt2-h100.svg, GPT-2 124M on 8 x 1024
tokens, compiled for an H100; minutes on 2 cores. peers: docs/results/peers-*.svg, from the figures beside them.
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
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "benchmarks")]

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
        shutil.copy("start-inspect.svg", DOCS)
        os.chdir(ROOT)


def gpt2():
    from models.gpt import gpt

    keras.config.set_dtype_policy("mixed_bfloat16")
    model = keras_mp.stabilize(gpt("gpt2"))
    model.compile(keras.optimizers.AdamW(3e-4), keras_mp.lean.ChunkedCrossEntropy(), jit_compile=True)
    tokens = keras.KerasTensor((8, 1024), "int32")
    report = keras_mp.inspect(model, (tokens, tokens), "h100", compare=["float32"])
    report.model = "GPT-2 124M, lean (the kit's attention and chunked cross entropy), 8 x 1024 tokens"
    report.to_svg(DOCS / "gpt2-h100.svg")
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
