"""Peak memory of each process while several load one KerasHub preset, fully sharded, with a CPU device each.

    python benchmarks/sharded_loading.py --markdown docs/tables/devices-table.md
    python benchmarks/sharded_loading.py --size 96MB --by keras

A Gemma backbone with random weights is saved as a preset in a temporary folder, and loaded by
`GemmaBackbone.from_preset` inside `keras_mp.parallel.distribute("fully_sharded")`; `--by keras` lays the weights out
alike, and leaves their loading to Keras. The peak is the largest resident memory that Linux noted (VmHWM) while the
preset was loaded; the memory before it is that of the interpreter with its imports and with the other processes
connected. A backbone with as many layers of width 8 is measured, too: it takes what does not depend on the weights'
size, compiled programs and Python's objects."""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import AbstractContextManager
from datetime import date
from pathlib import Path
from typing import Any

os.environ["KERAS_BACKEND"] = "jax"
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

MIB = 2**20
LIMIT = 1800  # seconds, after which a process is killed
PROCESSES = 4
SIZES = {
    "1.2GB": {
        "vocabulary_size": 65536,
        "num_layers": 8,
        "hidden_dim": 1024,
        "intermediate_dim": 16384,
        "head_dim": 128,
    },
    "96MB": {"vocabulary_size": 16384, "num_layers": 4, "hidden_dim": 512, "intermediate_dim": 4096, "head_dim": 64},
}
HEADER = (
    "loaded by",
    "process",
    "whole model",
    "share",
    "largest tensor",
    "before",
    "peak",
    "peak less before and share",
    "the same at width 8",
    "seconds",
)


def memory(name: str) -> int:
    """A figure of this process in bytes: VmRSS, what is resident, or VmHWM, the largest that was."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(f"{name}:")).split()[1]) * 1024


def make(size: dict[str, int], folder: str) -> None:
    """Saves a backbone with random weights as a preset."""
    import keras_hub

    keras_hub.models.GemmaBackbone(num_query_heads=8, num_key_value_heads=8, **size).save_to_preset(folder)


def scope(by: str) -> AbstractContextManager[Any]:
    """The kit's scope, or Keras's with the same layouts."""
    import keras

    import keras_mp
    from keras_mp.backend.jax.parallel import Layout
    from keras_mp.parallel.distribution import make_plan

    if by == "keras_mp":
        return keras_mp.parallel.distribute("fully_sharded")
    return Layout(make_plan("fully_sharded", keras.distribution.list_devices())).scope()


def load(folder: str, by: str, result: Path) -> None:
    """One process: joins the others, loads its part of the preset, and writes what that took."""
    import keras
    import keras_hub

    from keras_mp.parallel import workers
    from keras_mp.parallel.cluster import find_cluster

    with workers.join(find_cluster()), scope(by):
        keras.Variable("zeros", (8, 8))  # the first array starts JAX
        before, start = memory("VmRSS"), time.monotonic()
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
        backbone = keras_hub.models.GemmaBackbone.from_preset(folder)
        figures = {"before": before, "peak": memory("VmHWM"), "seconds": time.monotonic() - start}
        values = [variable.value for variable in backbone.variables]
        figures["whole"] = sum(value.nbytes for value in values)
        figures["largest"] = max(value.nbytes for value in values)
        figures["share"] = sum(shard.data.nbytes for value in values for shard in value.addressable_shards)
        result.write_text(json.dumps(figures))


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on."""
    probes = [socket.socket() for _ in range(count)]
    for probe in probes:
        probe.bind(("", 0))
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


def load_together(preset: str, by: str, processes: int, results: Path) -> list[dict[str, float]]:
    """Starts the processes, waits for them, and returns their figures."""
    addresses = [f"localhost:{port}" for port in free_ports(processes)]
    running = []
    try:
        for index in range(processes):
            task = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
            own = {"TF_CONFIG": json.dumps(task), "XLA_FLAGS": "--xla_force_host_platform_device_count=1"}
            command = [sys.executable, __file__, "--by", by, "--load", preset, str(results / f"{index}.json")]
            running.append(subprocess.Popen(command, env=os.environ | own))
        codes = [process.wait(LIMIT) for process in running]
    finally:
        for process in running:
            process.kill()
    if any(codes):
        raise SystemExit(f"the processes ended with {codes}")
    return [json.loads((results / f"{index}.json").read_text()) for index in range(processes)]


def measure(size: dict[str, int], by: str, processes: int) -> list[dict[str, float]]:
    """Makes a preset, loads it and removes it."""
    with tempfile.TemporaryDirectory() as temporary:
        preset = f"{temporary}/preset"
        # A process of its own, whose memory is free before the others start.
        subprocess.run([sys.executable, __file__, "--make", json.dumps(size), preset], check=True)
        return load_together(preset, by, processes, Path(temporary))


def above(figures: dict[str, float]) -> float:
    """What a process takes at its peak beside its share and what it had before, in bytes."""
    return figures["peak"] - figures["before"] - figures["share"]


def rows(name: str, by: str, processes: int) -> list[str]:
    """Measures a backbone and its narrow copy; a row for each process, sizes in MiB."""
    wide = measure(SIZES[name], by, processes)
    narrow = SIZES[name] | {"vocabulary_size": 8, "hidden_dim": 8, "intermediate_dim": 16, "head_dim": 8}
    constant = max(above(figures) for figures in measure(narrow, by, processes))
    table = []
    for index, own in enumerate(wide):
        sizes = [own[key] for key in ("whole", "share", "largest", "before", "peak")] + [above(own), constant]
        cells = [by, str(index), *(f"{size / MIB:.0f}" for size in sizes), f"{own['seconds']:.0f}"]
        table.append(f"| {' | '.join(cells)} |")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, help="by default both, the smaller one also by Keras alone")
    parser.add_argument("--by", choices=("keras_mp", "keras"), default="keras_mp")
    parser.add_argument("--processes", type=int, default=PROCESSES)
    parser.add_argument("--markdown", type=Path, help="the page whose table is replaced")
    parser.add_argument("--make", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--load", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.make:
        return make(json.loads(options.make[0]), options.make[1])
    if options.load:
        return load(options.load[0], options.by, Path(options.load[1]))
    runs = (
        [(options.size, options.by)]
        if options.size
        else [("96MB", "keras"), ("96MB", "keras_mp"), ("1.2GB", "keras_mp")]
    )
    table = []
    for name, by in runs:
        table += rows(name, by, options.processes)
        print(*table[-options.processes :], sep="\n", flush=True)
    if options.markdown:
        from results import put_table

        from keras_mp.system.packages import installed

        packages = installed(("jax", "keras", "keras-hub", "h5py"))
        versions = ", ".join(f"{package} {version}" for package, version in packages.items())
        made = f"`python benchmarks/sharded_loading.py --markdown {options.markdown}`, {date.today()}, {versions}."
        header = [f"| {' | '.join(HEADER)} |", f"| --- |{' ---: |' * (len(HEADER) - 1)}"]
        put_table(options.markdown, "sharded_loading.py", [*header, *table, "", made])


if __name__ == "__main__":
    main()
