"""How long it takes until a first step has run: importing, and the first step, of the kit and of plain Keras.

    python benchmarks/start_up.py                       # on both backends, three models
    python benchmarks/start_up.py --backends jax --models gpt

Each is a process of its own, and the kit's and Keras's take turns; a figure is the median. A first step is from
`prepare`, or `compile`, to the end of a `fit` of one step, in mixed_bfloat16.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
IMPORTS = {
    "import keras": "import time; start = time.perf_counter(); import keras",
    "import keras_mp, alone": "import time; start = time.perf_counter(); import keras_mp",
    "keras_mp.prepare, after Keras": "import time, keras; start = time.perf_counter(); from keras_mp import prepare",
}
FIRST = """
import sys, time
which, workload = sys.argv[1:]
from peer_keras import WORKLOADS, batch_of, cross_entropy, keras, keras_mp, kit_model, optimizer, plain_model
sizes = WORKLOADS[workload]
x, y = batch_of(sizes)
keras.config.set_dtype_policy("mixed_bfloat16")
loss = keras_mp.lean.ChunkedCrossEntropy() if which == "keras_mp" and sizes.reads_text else cross_entropy()
model = kit_model(sizes) if which == "keras_mp" else plain_model(sizes)
updates = optimizer()
start = time.perf_counter()
keras_mp.prepare(model, updates, loss) if which == "keras_mp" else model.compile(updates, loss)
model.fit(x, y, batch_size=len(x), verbose=0)
"""


def seconds(code: str, backend: str, *arguments: str) -> float:
    """The seconds from `start` to the end of a program, which runs in a process of its own."""
    quiet = {"KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3", "JAX_PLATFORMS": "cpu"}
    paths = os.pathsep.join([str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", f"{code}\nprint(time.perf_counter() - start)", *arguments]
    environment = os.environ | quiet | {"PYTHONPATH": paths}
    return float(
        subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout.split()[-1]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backends", default="tensorflow,jax", help="of %(default)s")
    parser.add_argument("--models", default="gpt,resnet18,vit-tiny", help="of %(default)s")
    parser.add_argument("--rounds", type=int, default=3, help="how often each is measured (default: %(default)s)")
    options = parser.parse_args()
    for backend in options.backends.split(","):
        for name, code in IMPORTS.items():
            taken = statistics.median(seconds(code, backend) for _ in range(options.rounds))
            print(f"{backend:10} {name:30} {taken * 1e3:7.0f} ms", flush=True)
        for model in filter(None, options.models.split(",")):
            taken: dict[str, list[float]] = {"Keras": [], "keras_mp": []}
            for _ in range(options.rounds):
                for which, times in taken.items():
                    times.append(seconds(FIRST, backend, which, model))
            both = {which: statistics.median(times) for which, times in taken.items()}
            ratio = both["keras_mp"] / both["Keras"]
            print(
                f"{backend:10} first step of {model:16} {both['keras_mp']:7.1f} s, {ratio:.2f} of that of Keras",
                flush=True,
            )


if __name__ == "__main__":
    main()
