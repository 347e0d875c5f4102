"""Measurements on one NVIDIA GPU in ten minutes: each part in its own process, within its own limit, into one JSON.

python -m benchmarks.gpu_minutes --out docs/results/gpu-minutes.json
python -m benchmarks.gpu_minutes --tiny --out /tmp/gpu.json              # tries it out on a CPU
python -m benchmarks.gpu_minutes --markdown docs/results/gpu-minutes.json
"""

from __future__ import annotations

import argparse
import platform
import sys
from pathlib import Path

from benchmarks.gpu_minutes.markdown import tables
from benchmarks.gpu_minutes.process import run_part
from benchmarks.gpu_minutes.record import Record
from keras_mp.system.packages import installed

ROOM = "benchmarks.gpu_minutes."
# In the order of worth: module, and seconds of the limit. Together below ten minutes.
LIMITS = {
    "products": ("products", 110.0),
    "gpt2": ("steps", 150.0),
    "numerics": ("numerics", 45.0),
    "llama": ("steps", 140.0),
    "resnet50": ("steps", 80.0),
    "predictions": ("predictions", 60.0),
}
# The model of each part, and the one of a rehearsal.
MODELS = {
    "gpt2": ("gpt2-124m", "gpt-small"),
    "llama": ("llama-1b", "llama-small"),
    "resnet50": ("resnet50", "resnet-small"),
}


def arguments_of(name: str, tiny: bool, target: str) -> list[str]:
    """What the part's `main` is called with."""
    if name == "predictions":
        return [target, *(MODELS[model][tiny] for model in MODELS if not tiny or model == "gpt2")]
    return [MODELS[name][tiny]] if name in MODELS else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="the JSON file")
    parser.add_argument("--tiny", action="store_true", help="sizes that a CPU runs in seconds")
    parser.add_argument("--parts", default=",".join(LIMITS), help="of %(default)s")
    parser.add_argument("--target", default="h100", help="the chip of the predictions")
    parser.add_argument("--limit", type=float, help="seconds for each part, instead of its own limit")
    parser.add_argument("--markdown", type=Path, help="prints the tables of this JSON, and measures nothing")
    options = parser.parse_args()
    if options.markdown:
        print(tables(options.markdown), end="")
        return
    if options.out is None:
        parser.error("--out: where the JSON goes")
    unknown = sorted(set(options.parts.split(",")) - set(LIMITS))
    if unknown:
        parser.error(f"--parts: {', '.join(unknown)} is none of {', '.join(LIMITS)}")
    packages = ("jax", "keras", "torch", "torchao", "transformer-engine", "numpy")
    header = {
        "command": "python -m benchmarks.gpu_minutes " + " ".join(sys.argv[1:]),
        "tiny": options.tiny,
        "versions": {"python": platform.python_version()} | installed(packages),
    }
    record = Record(options.out, header)
    for name in options.parts.split(","):
        module, limit = LIMITS[name]
        arguments = arguments_of(name, options.tiny, options.target)
        run_part(record, name, ROOM + module, options.limit or limit, options.tiny, arguments)
        entry = record.content["parts"][name]
        print(
            f"{name}: {entry['status']}, {entry['seconds']} s, {len(entry['rows'])} rows {entry['error']}", flush=True
        )


if __name__ == "__main__":
    main()
