"""Makes the pictures of the pages anew: `KERAS_BACKEND=tensorflow python benchmarks/pictures.py [start gpt2 ...]`.

start: docs/start-*.svg, by running the Python of docs/index.md. gpt2: docs/gpt2-h100.svg, GPT-2 124M on 8 x 1024
tokens, compiled for an H100; minutes on 2 cores. audit: docs/numerics-audit.svg, of the training recipe language_model.
From figures that are in docs already: peers: docs/results/peers-*.svg. fp8: docs/tables/fp8-parity.svg, of the table
in docs/tables/fp8-parity.md.
"""

import os
import re
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
from keras_mp.reporting.svg import COLOURS, FRAME, Axes, Picture
from keras_mp.system.atomic_write import write_text

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
    model.compile(keras.optimizers.AdamW(3e-4), keras_mp.lean.ChunkedCrossEntropy(), jit_compile=True)
    tokens = keras.KerasTensor((8, 1024), "int32")
    report = keras_mp.inspect(model, (tokens, tokens), "h100", compare=["float32"])
    report.model = "GPT-2 124M, lean (the kit's attention and chunked cross entropy), 8 x 1024 tokens"
    report.to_svg(DOCS / "gpt2-h100.svg")
    for compiled in (report, report.compared["float32"]):
        peak, temporary = compiled.memory.peak / 2**20, compiled.memory.temporary / 2**20
        print(f"{compiled.precision}: peak {peak:.1f} MiB, temporary {temporary:.1f}, {compiled.shares}")


def audit():
    from keras_mp.training.training_recipe import find_recipe

    recipe = find_recipe("language_model", DOCS.parent / "recipes")
    config = recipe.config([], "pictures")
    model, _ = recipe.step(config)
    keras_mp.audit(model, recipe.batches(config), 8).to_svg(DOCS / "numerics-audit.svg")


def peers():
    from peers import draw

    for path in (DOCS / "results").glob("peers-*.json"):
        draw(path)


def fp8():
    """Final bits per byte less mixed_bfloat16's of the same seed: a dot a seed, a line for the mean."""
    rows = re.findall(
        r"^\| (mixed_bfloat16|fp8:\w+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|",
        (DOCS / "tables" / "fp8-parity.md").read_text(),
        re.M,
    )
    final = {name: [float(value) for value in values] for name, *values in rows}
    base = final.pop("mixed_bfloat16")
    mean = sum(base) / len(base)
    differences = {name: [a - b for a, b in zip(seeds, base, strict=True)] for name, seeds in final.items()}
    ends = [value - mean for value in base] + [value for seeds in differences.values() for value in seeds]
    drawing = Picture(760, 330)
    axes = Axes(70, 60, 748, 270, (0, len(final)), (min(ends) - 0.004, max(ends) + 0.004))
    drawing.text(10, 20, "language_model after 5 epochs: validation bits per byte less mixed_bfloat16's", bold=True)
    drawing.text(10, 40, "A dot is a seed, less mixed_bfloat16 with the same seed; a line is the mean of the 3 seeds.")
    (left, top), (right, bottom) = axes.place(0, max(base) - mean), axes.place(len(final), min(base) - mean)
    drawing.rectangle(left, top, right - left, bottom - top, FRAME, opacity=0.22)
    drawing.axes(axes, "", "", x_numbers=False)
    drawing.rule(*axes.place(0, 0), *axes.place(len(final), 0))
    for place, (name, seeds) in enumerate(differences.items()):
        x, y = axes.place(place + 0.5, sum(seeds) / len(seeds))
        drawing.curve([(x - 60, y), (x + 60, y)], COLOURS[0], 2.0)
        percent = 100 * (sum(seeds) / len(seeds)) / mean
        drawing.text(x + 66, y + 4, f"{percent:+.2f}%")
        for index, value in enumerate(seeds):
            across, down = axes.place(place + 0.5, value)
            drawing.dot(across + 24 * (index - 1), down, COLOURS[0], f"seed {index}: {value:+.4f}")
        drawing.text(x, 290, name, anchor="middle")
    drawing.text(70, 318, "0 is mixed_bfloat16; grey: how far its own 3 seeds lie from their mean")
    write_text(drawing.svg(), DOCS / "tables" / "fp8-parity.svg")


PICTURES = {picture.__name__: picture for picture in (start, gpt2, audit, peers, fp8)}

if __name__ == "__main__":
    for name in sys.argv[1:] or PICTURES:
        PICTURES[name]()
