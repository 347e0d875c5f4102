"""Compiles a psum, a psum_scatter, a slice of a psum and gathers between products for devices that are not attached.

    python compile_collectives.py FOLDER

writes the compiled text of each as FOLDER/DEVICES-PROGRAM.hlo.
"""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

from keras_mp.parallel._jax_part import AXIS, put_together
from keras_mp.parallel.hops import groups_of
from keras_mp.planner.chips.targets import find_target

SIZE = 2048


def devices_of(name):
    """The devices of a topology, and options for their compiler."""
    if name == "h100x8":
        jax.devices()  # registers the plugin
        h100 = find_target("h100")
        described = topologies.get_topology_desc("h100", "cuda", target_config=h100.configuration, topology="1x1x8")
        return described.devices, h100.flags
    sides = {"v5e-4": "2x2", "v5e-16": "4x4", "v5e-256": "16x16"}[name]
    return topologies.get_topology_desc(platform="tpu", topology_name=f"v5e:{sides}").devices, {}


def psum(array):
    return jax.lax.psum(array, "x")


def psum_scatter(array):
    return jax.lax.psum_scatter(array, "x", tiled=True)


def slice_of_psum(array):
    rows = SIZE // jax.lax.axis_size("x")
    return jax.lax.dynamic_slice_in_dim(psum(array), jax.lax.axis_index("x") * rows, rows)


def products(array, *weights):
    """Four products, each of weights that are gathered first."""
    for weight in weights:
        array = jnp.tanh(array @ jax.lax.all_gather(weight, "x", tiled=True))
    return array


def compiled_products(name):
    """The text that the compiler makes of them."""
    devices, options = devices_of(name)
    mesh = jax.sharding.Mesh(np.array(devices), ("x",))
    rows = PartitionSpec("x", None)
    step = jax.jit(jax.shard_map(products, mesh=mesh, in_specs=rows, out_specs=rows, check_vma=False))
    sizes = [SIZE * len(devices), *[SIZE] * 4]
    arrays = [jax.ShapeDtypeStruct((size, SIZE), jnp.bfloat16, sharding=NamedSharding(mesh, rows)) for size in sizes]
    return step.lower(*arrays).compile(compiler_options=options).as_text()


def compiled_gather(hops):
    """The text of a gather of 4096 x 4096 bytes over 256 v5e, at once or in hops."""
    mesh = jax.sharding.Mesh(np.array(devices_of("v5e-256")[0]), (AXIS,))
    rows, groups = PartitionSpec(AXIS), groups_of(hops)

    def gather(part):
        return put_together(part, 0, groups)

    step = jax.jit(jax.shard_map(gather, mesh=mesh, in_specs=rows, out_specs=PartitionSpec(), check_vma=False))
    return (
        step.lower(jax.ShapeDtypeStruct((4096, 4096), jnp.uint8, sharding=NamedSharding(mesh, rows)))
        .compile()
        .as_text()
    )


def compiled(program, name):
    """The text that the compiler makes of a program on these devices."""
    devices, options = devices_of(name)
    mesh = jax.sharding.Mesh(np.array(devices), ("x",))
    whole, rows = PartitionSpec(), PartitionSpec("x", None)
    out = whole if program is psum else rows
    step = jax.jit(jax.shard_map(program, mesh=mesh, in_specs=whole, out_specs=out, check_vma=False))
    array = jax.ShapeDtypeStruct((SIZE, SIZE), jnp.float32, sharding=NamedSharding(mesh, whole))
    return step.lower(array).compile(compiler_options=options).as_text()


if __name__ == "__main__":
    for devices in ("v5e-4", "v5e-16", "h100x8"):
        for program in (psum, psum_scatter, slice_of_psum):
            text = compiled(program, devices)
            (Path(sys.argv[1]) / f"{devices}-{program.__name__}.hlo").write_text(text)
    for name, hops in (("gather", ()), ("gather_in_hops", (16, 16))):
        (Path(sys.argv[1]) / f"v5e-256-{name}.hlo").write_text(compiled_gather(hops))
    for devices in ("v5e-4", "h100x8"):
        (Path(sys.argv[1]) / f"{devices}-products.hlo").write_text(compiled_products(devices))
