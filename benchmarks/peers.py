"""A training step of the kit beside its peers', all in one run: the same model, batch, optimizer and machine.

    python benchmarks/peers.py                              # GPT, ResNet-18, ViT-Tiny on this CPU; `make bench`
    python benchmarks/peers.py --models gpt --rounds 40
    python benchmarks/peers.py --out docs/results           # also writes peers-<model>-<processor>.json and .svg there

Peers: plain Keras on TensorFlow and JAX with mixed_bfloat16, Keras's float8, and PyTorch under autocast, eager and
compiled, where it is installed. Each has a process of its own; measurements are interleaved, and a ratio is the median
over the rounds. Time: under 10 minutes on 2 cores. On Linux; PyTorch compiles with g++.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from results import machine, read, write
from rich.console import Console
from svg_pictures import COLOURS, OTHER, svg

from keras_mp.bench.benchmark_report import BenchmarkReport
from keras_mp.bench.workloads import Task, compare, device_of
from keras_mp.reporting.text import shorten_middle
from keras_mp.system.atomic_write import write_text
from keras_mp.system.host import cpu_flags, cpu_name

MODELS = ("gpt", "resnet18", "vit-tiny")
BASE = "keras_mp, TensorFlow"
NAME, LINE = 44, 110  # characters
TITLES = {
    "gpt": "GPT, 6 layers of width 384, batch 8 x 256",
    "resnet18": "ResNet-18, batch 16 of 32 x 32",
    "vit-tiny": "ViT-Tiny, batch 8 of 224 x 224",
}


def tasks(workload: str) -> list[Task]:
    """All that is compared on a model; what is not installed is left out."""
    tensorflow, jax = ({"KERAS_BACKEND": backend} for backend in ("tensorflow", "jax"))
    low = {"workload": workload, "precision": "mixed_bfloat16"}
    compared = []
    if importlib.util.find_spec("tensorflow"):
        keras_low = {"workload": workload, "policy": "mixed_bfloat16"}
        compared += [
            Task(BASE, "peer_keras:kit", low, tensorflow),
            Task(f"{BASE}, without islands", "peer_keras:kit", low | {"islands": False}, tensorflow),
            Task("Keras, TensorFlow", "peer_keras:plain", keras_low, tensorflow),
            Task("Keras, TensorFlow, no jit", "peer_keras:plain", keras_low | {"jit": False}, tensorflow),
            Task("Keras, TensorFlow, no jit, float32", "peer_keras:plain",
                 {"workload": workload, "policy": "float32", "jit": False}, tensorflow),
        ]  # fmt: skip
        if not workload.startswith("resnet"):  # whose convolutions have no float8
            compared.append(
                Task("Keras float8, TensorFlow", "peer_keras:plain",
                     {"workload": workload, "policy": "mixed_bfloat16", "float8": True}, tensorflow)
            )  # fmt: skip
    if importlib.util.find_spec("jax"):
        compared += [
            Task("keras_mp, JAX", "peer_keras:kit", low, jax),
            Task("Keras, JAX", "peer_keras:plain", {"workload": workload, "policy": "mixed_bfloat16"}, jax),
        ]
    if importlib.util.find_spec("torch"):
        compared += [
            Task("PyTorch", "peer_pytorch:step", low),
            Task("PyTorch, compiled", "peer_pytorch:step", low | {"compile": True}),
        ]
    return compared


# The instructions that decide how fast products of 16 bits are, the fastest first; a file is named after them, since
# two processors of one name can differ in them.
INSTRUCTIONS = ("amx_bf16", "avx512_bf16", "avx512f", "avx2", "bf16")
# The rate at which TensorFlow multiplies here, in 10^9 operations a second: machines of one name differ by two.
PRODUCT = """
import time, tensorflow as tf
x = tf.cast(tf.random.normal((2048, 2048)), "bfloat16")
def seconds():
    began = time.perf_counter()
    tf.matmul(x, x).numpy()
    return time.perf_counter() - began
print(round(2 * 2048**3 / min(seconds() for _ in range(20)) / 1e9))
"""


def processor() -> str:
    """The processor's name, and which instructions for products it has."""
    flags = cpu_flags()
    return " with ".join([cpu_name(), *[name for name in INSTRUCTIONS if name in flags][:1]])


def product_rate() -> str:
    """How fast the machine multiplies in bfloat16, as a clause; "" without TensorFlow."""
    if not importlib.util.find_spec("tensorflow"):
        return ""
    printed = subprocess.run([sys.executable, "-c", PRODUCT], check=True, capture_output=True, text=True).stdout
    return f", which multiply in bfloat16 at {printed.strip()} GFLOP/s together"


class Bar(NamedTuple):
    """A bar.

    Attributes:
        name: the text left of it.
        length: the length in any unit; None where there is nothing to draw.
        low, high: the ends of a line on it.
        words: the text right of it.
        highlighted: whether it has the first of the two colours.
    """

    name: str
    length: float | None
    low: float
    high: float
    words: str
    highlighted: bool


def bar_chart(title: str, below: str, bars: Sequence[Bar]) -> str:
    """Draws bars, one below the other.

    Args:
        title: the text above them.
        below: a line below the title, on what the bars and their lines are.
        bars: the bars, from top to bottom.
    """

    def draw(figure: Any) -> None:
        axes = figure.add_subplot()
        figure.suptitle(
            f"{shorten_middle(title, LINE)}\n{shorten_middle(below, LINE)}", x=0.01, ha="left", fontsize=9.0
        )
        axes.set_yticks(range(len(bars)), [shorten_middle(bar.name, NAME) for bar in bars])
        axes.set_xticks([])
        axes.set_xlim(0, 1.6 * max((bar.high for bar in bars if bar.length is not None), default=1.0))
        for place, bar in enumerate(bars):
            if bar.length is not None:
                axes.barh(place, bar.length, color=COLOURS[0] if bar.highlighted else OTHER)
                axes.hlines(place, bar.low, bar.high, color="black")
            axes.text(max(bar.length or 0.0, bar.high), place, f" {shorten_middle(bar.words, NAME)}", va="center")
        axes.set_ylim(len(bars) - 0.5, -0.5)

    return svg(draw, 720, 72 + 26 * len(bars))


def as_long(ratio: float) -> str:
    """A ratio of two times in words: "6% longer", "9% shorter", "as long", "2.5 times as long"."""
    if ratio >= 1.995:
        return f"{ratio:.2g} times as long"
    percent = round(100 * (ratio - 1))
    return f"{abs(percent)}% {'longer' if percent > 0 else 'shorter'}" if percent else "as long"


def draw(path: Path) -> Path:
    """Draws a result, and writes it beside its file.

    Args:
        path: the path of the JSON file.

    Returns:
        The path of the SVG file.
    """
    result = read(path)
    base = result["rows"][0][0]
    title = f"{result['title'].partition(': ')[2]}; {result['columns'][0]}; {result['machine'].partition(',')[0]}"
    below = f"Time of a step compared with {base}; the line is the middle half of the rounds"
    return write_text(bar_chart(title, below, [_bar(row, base) for row in result["rows"]]), path.with_suffix(".svg"))


def _bar(row: list[str], base: str) -> Bar:
    name, step, of_base = row[:3]
    kit = name.startswith("keras_mp")
    if not of_base:
        return Bar(name, None, 0.0, 0.0, step, kit)
    ratio, low, high = map(float, re.findall(r"\d+\.\d+", of_base))
    return Bar(name, ratio, low, high, f"{step} ms" + (f", {as_long(ratio)}" if name != base else ""), kit)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS), help="of %(default)s")
    parser.add_argument("--rounds", type=int, default=15, help="how often each is measured (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=0.5, help="of each in a round (default: %(default)s)")
    parser.add_argument("--only", default="", help="peers whose names hold this, beside keras_mp on TensorFlow")
    parser.add_argument("--out", type=Path, help="a folder for the results")
    options = parser.parse_args()
    # The command for GPUs is another; here JAX's search for one would only print.
    os.environ |= {"TF_CPP_MIN_LOG_LEVEL": "3", "JAX_PLATFORMS": "cpu"}
    rate = product_rate()
    for workload in options.models.split(","):
        wanted = [task for task in tasks(workload) if options.only in task.name or task.name.startswith(BASE)]
        rows = compare(
            wanted,
            rounds=options.rounds,
            seconds=options.seconds,
            paths=[str(HERE), *filter(None, sys.path)],
            log=lambda text: print(text, file=sys.stderr),
        )
        device = device_of(rows)
        on, here = (processor(), machine(processor()) + rate) if device == cpu_name() else (device, device)
        title = f"{TITLES.get(workload, workload)}, AdamW, mixed_bfloat16 but where said, {here}"
        base = next((row.name for row in rows if not row.problem), BASE)
        report = BenchmarkReport(title, base, rows)
        Console().print(report)
        if options.out:
            columns, rows = report.table()
            path = options.out / f"peers-{workload}-{re.sub(r'[^a-z0-9]+', '-', on.lower())}.json"
            write(
                path,
                f"A step beside its peers, on {on}: {TITLES.get(workload, workload)}",
                f"python benchmarks/peers.py --rounds {options.rounds} --seconds {options.seconds}",
                ["AdamW, mixed_bfloat16 but where said", *columns[1:]],
                rows,
                report.versions,
                " ".join(report.problems),
                here,
            )
            draw(path)


if __name__ == "__main__":
    main()
