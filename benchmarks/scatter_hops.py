"""What libtpu makes of a sum over a slice of TPUs of which each device keeps a part: at once, and in hops.

    python benchmarks/scatter_hops.py              # 40 s on 2 cores; no TPU is needed
    python benchmarks/scatter_hops.py v5e:4x4

For each slice the sums in the compiled module of a scatter of float32[4096, 4096], and of float32[50257, 4096] along
its second axis, with the sizes along that axis of what each takes or makes.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

os.environ |= {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost"}
os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"  # nothing runs on a TPU
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from keras_mp.parallel._jax_part import scattered
from keras_mp.parallel.hops import groups_of, hops_of
from keras_mp.planner.chips.targets import find_target
from keras_mp.precision.chip import TpuSlices
from keras_mp.precision.chips import CHIPS

# Split along its first axis; and along its second, because its first divides by no number of devices.
SHAPES = ((4096, 4096), (50257, 4096))
TPUS = [name for name, chip in CHIPS.items() if isinstance(chip.compiler, TpuSlices)]
SLICES = [find_target(f"{name}x{2**power}").topology for name in TPUS for power in range(2, 9)]


def collectives(topology: str, axis: int, hops: tuple[int, ...]) -> str:
    """The kinds of what is summed in the compiled module, with the numbers of rows."""
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    mesh = Mesh(np.array(devices), ("batch",))
    parts = PartitionSpec("batch") if axis == 0 else PartitionSpec(None, "batch")
    step = jax.shard_map(
        lambda x: scattered(x, axis, groups_of(hops)), mesh=mesh, in_specs=PartitionSpec(), out_specs=parts,
        check_vma=False,
    )  # fmt: skip
    whole = jax.ShapeDtypeStruct(SHAPES[axis], jnp.float32, sharding=NamedSharding(mesh, PartitionSpec()))
    text = jax.jit(step).lower(whole).compile().as_text()
    found = []
    for computation in text.split("\n}\n"):
        # An all-reduce in a computation of this name is the inside of a fusion that scatters.
        fused = re.search(r"^%all-reduce-scatter[\w.]* \(", computation, re.M)
        for sizes, kind in re.findall(r"f32\[([\d,]+)\]\S* (all-reduce|reduce-scatter)(?:-start)?\(", computation):
            rows = sizes.split(",")[axis]
            found.append(f"{'reduce-scatter in a fusion' if fused else kind} [{rows}]")
    return ", ".join(found)


def main() -> None:
    """Prints a row a slice."""
    print("| slice | at once | first axis, in hops | | second axis, in hops | |\n| --- | --- | --- | --- | --- | --- |")
    for topology in sys.argv[1:] or SLICES:
        cells = [topology, collectives(topology, 0, ())]
        for axis, hops in enumerate(hops_of(topology)):
            cells += [" x ".join(map(str, hops)), collectives(topology, axis, hops) if hops else ""]
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
