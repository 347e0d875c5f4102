"""The memory that libtpu assigns to MaxText's form of a step: a loop over layers, its loss, clipping and kernel.

The eight runs on v6e whose need MaxText logged, in plain JAX: what `docs/tables/predictions.md` says of them.

    python benchmarks/planner/scanned_layers.py --maxtext FOLDER

FOLDER is `src` of a clone of github.com/AI-Hypercomputer/maxtext, for the kernel of grouped queries; without it only
the runs without groups are compiled, with JAX's kernel. Needs the extra `inspect`.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
from jax import numpy as jnp
from jax.ad_checkpoint import checkpoint_name as named
from jax.experimental import topologies
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from keras_mp.planner.read.compiler_memory import assigned_memory, dumping_to, is_assigned

KEPT = ("qkv_proj", "out_proj", "mlpwi", "mlpwo", "context")  # MaxText's policy save_qkv_proj, save_out_proj, save_mlp
KEYS = 512  # of a block of the kernel, as in the runs' configs
CHIPS, ROWS = "v6e:2x4", ((8, 2048), (16, 2048), (4, 4096), (2, 8192), (1, 16384), (1, 32768))


class Model(NamedTuple):
    layers: int
    heads: int
    key_heads: int
    head: int
    theta: float
    width: int = 1024
    hidden: int = 2816
    vocabulary: int = 32768


MODELS = {"272m": Model(12, 8, 8, 256, 1e4), "270m": Model(18, 8, 2, 128, 5e5)}


def attention(model: Model, length: int, mesh: Mesh, maxtext: bool) -> Any:
    """The kernel for queries, keys, values and segments, divided by rows."""
    blocks = {"block_q": min(1024, length), "block_kv": KEYS, "block_kv_compute": KEYS}
    blocks |= {"block_q_dkv": min(2048, length), "block_kv_dkv": KEYS, "block_kv_dkv_compute": KEYS}
    if maxtext:
        room = "maxtext.kernels.tokamax_splash_attention.splash_attention_"
        kernels, masks = importlib.import_module(f"{room}kernel"), importlib.import_module(f"{room}mask")
        segments = importlib.import_module(f"{room.removesuffix('splash_attention_')}base").SegmentIds
        options = {"use_fused_bwd_kernel": True, "fuse_reciprocal": True, "use_base2_exp": True}
        config = kernels.SplashConfig(**blocks, **options, residual_checkpoint_name="context")

        def kernel() -> Any:
            return kernels.make_splash_mha(mask=masks.CausalMask(shape=(length, length)), config=config, q_seq_shards=1)

    else:
        segments = splash_attention_kernel.SegmentIds
        sizes = splash_attention_kernel.BlockSizes(**blocks, block_q_dq=min(2048, length), block_kv_dq=KEYS)
        mask = splash_attention_mask.MultiHeadMask([splash_attention_mask.CausalMask((length, length))] * model.heads)

        def kernel() -> Any:
            return splash_attention_kernel.make_splash_mha(
                mask=mask, block_sizes=sizes, head_shards=1, q_seq_shards=1, residual_checkpoint_name="context"
            )

    def attend(*operands: Any) -> Any:
        return jax.vmap(lambda q, k, v, ids: kernel()(q, k, v, segments(ids, ids)))(*operands)

    rows = PartitionSpec("data")
    return jax.shard_map(attend, mesh=mesh, in_specs=(rows,) * 4, out_specs=rows, check_vma=False)


def normalized(x: jax.Array, scale: jax.Array) -> jax.Array:
    wide = x.astype("float32")
    return (wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-5) * scale).astype("bfloat16")


def rotated(x: jax.Array, theta: float) -> jax.Array:
    pairs = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None, None] * (theta ** (-jnp.arange(pairs) / pairs))
    first, second = jnp.split(x.astype("float32"), 2, -1)
    sine, cosine = jnp.sin(angles), jnp.cos(angles)
    return jnp.concatenate([first * cosine - second * sine, second * cosine + first * sine], -1).astype("bfloat16")


@jax.custom_vjp
def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """MaxText's, whose backward pass reads the exponentials of all logits."""
    return _forward(logits, targets)[0]


def _forward(logits: jax.Array, targets: jax.Array) -> tuple[jax.Array, Any]:
    shifted = logits - logits.max(-1, keepdims=True)
    exponentials = jnp.exp(shifted)
    total = exponentials.sum(-1, keepdims=True)
    return -jnp.sum(targets * (shifted - jnp.log(total)), -1), (targets, exponentials, total)


def _backward(kept: Any, upstream: jax.Array) -> tuple[jax.Array, None]:
    targets, exponentials, total = kept
    return upstream[..., None] * (exponentials / total - targets), None


cross_entropy.defvjp(_forward, _backward)


def step_of(model: Model, rows: int, length: int, mesh: Mesh, maxtext: bool) -> Any:
    """A step of AdamW with a clipped gradient: parameters, moments and count; inputs, targets and segments."""
    attend, heads = attention(model, length, mesh, maxtext), model.heads

    def block(x: jax.Array, weights: dict[str, jax.Array], segments: jax.Array) -> jax.Array:
        weights = {name: w if w.ndim == 1 else w.astype("bfloat16") for name, w in weights.items()}
        projected = named(jnp.einsum("btd,dnh->btnh", normalized(x, weights["norm_1"]), weights["qkv"]), "qkv_proj")
        q, k, v = jnp.split(projected, (heads, heads + model.key_heads), 2)
        q, k = rotated(q, model.theta) * model.head**-0.5, rotated(k, model.theta)
        mixed = jnp.swapaxes(attend(*(jnp.swapaxes(a, 1, 2) for a in (q, k, v)), segments), 1, 2)
        x = x + named(jnp.einsum("btnh,nhd->btd", mixed, weights["out"]), "out_proj")
        gates = jnp.einsum("btd,dcf->btcf", normalized(x, weights["norm_2"]), weights["in"])
        gates = named(gates, "mlpwi")
        return x + named((jax.nn.silu(gates[:, :, 0]) * gates[:, :, 1]) @ weights["down"], "mlpwo")

    def loss(parameters: Any, inputs: jax.Array, targets: jax.Array, segments: jax.Array) -> jax.Array:
        policy = jax.checkpoint_policies.save_only_these_names(*KEPT)
        body = jax.checkpoint(lambda x, w: (block(x, w, segments), None), policy=policy, prevent_cse=False)
        x, _ = jax.lax.scan(body, parameters["embedding"].astype("bfloat16")[inputs], parameters["blocks"])
        logits = normalized(x, parameters["norm"]) @ parameters["logits"].astype("bfloat16")
        logits = jax.lax.with_sharding_constraint(logits.astype("float32"), NamedSharding(mesh, PartitionSpec("data")))
        losses = cross_entropy(logits, jax.nn.one_hot(targets, model.vocabulary)) * (segments != 0)
        return losses.sum() / (rows * length)

    def step(state: Any, inputs: jax.Array, targets: jax.Array, segments: jax.Array) -> Any:
        parameters, mean, square, count = state
        value, gradients = jax.value_and_grad(loss)(parameters, inputs, targets, segments)
        norm = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(gradients)))
        gradients = jax.tree.map(lambda g: jnp.where(norm < 1.0, g, g / norm), gradients)
        mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, mean, gradients)
        square = jax.tree.map(lambda v, g: 0.95 * v + 0.05 * g * g, square, gradients)
        count = count + 1

        def updated(p: jax.Array, m: jax.Array, v: jax.Array) -> jax.Array:
            root = jnp.sqrt(v / (1 - 0.95**count)) + 1e-8
            return p - 3e-4 * (m / (1 - 0.9**count) / root + 0.1 * p)

        return (jax.tree.map(updated, parameters, mean, square), mean, square, count), (value, norm)

    return step


def lowered(model: Model, rows: int, length: int, maxtext: bool) -> Any:
    """The step on eight chips, `rows` on each."""
    mesh = Mesh(np.array(topologies.get_topology_desc(platform="tpu", topology_name=CHIPS).devices), ("data",))

    def array(*shape: int, dtype: str = "float32", axes: tuple[str, ...] = ()) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec(*axes)))

    heads = model.heads + 2 * model.key_heads
    shapes = {"norm_1": (model.width,), "norm_2": (model.width,), "qkv": (model.width, heads, model.head)}
    shapes |= {"out": (model.heads, model.head, model.width), "in": (model.width, 2, model.hidden)}
    shapes |= {"down": (model.hidden, model.width)}
    parameters = {
        "embedding": array(model.vocabulary, model.width),
        "blocks": {name: array(model.layers, *shape) for name, shape in shapes.items()},
        "norm": array(model.width),
        "logits": array(model.width, model.vocabulary),
    }
    batch = [array(rows * mesh.size, length, dtype="int32", axes=("data",)) for _ in range(3)]
    step = step_of(model, rows * mesh.size, length, mesh, maxtext)
    return jax.jit(step, donate_argnums=0).lower((parameters, parameters, parameters, array()), *batch)


def assigned(step: Any) -> float:
    """GiB of a chip, as soon as they are assigned."""
    folder = Path(tempfile.mkdtemp())
    compiling = threading.Thread(target=step.compile, kwargs={"compiler_options": dumping_to(folder)}, daemon=True)
    compiling.start()
    while compiling.is_alive() and not is_assigned(folder, "tpu"):
        time.sleep(0.2)
    time.sleep(1.0)  # the last lines
    memory = assigned_memory(folder, "tpu")
    return (memory["argument"] + memory["output"] - memory["alias"] + memory["temp"]) / 2**30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--maxtext", metavar="FOLDER")
    parser.add_argument("--run", nargs=3, metavar=("MODEL", "ROWS", "LENGTH"), help="one run, in this process")
    arguments = parser.parse_args()
    if arguments.maxtext:
        sys.path.append(arguments.maxtext)
    if arguments.run:
        name, rows, length = arguments.run
        model = MODELS[name]
        step = lowered(model, int(rows), int(length), maxtext=model.key_heads != model.heads)
        print(f"{name} {rows} x {length}: {assigned(step):.2f} GiB", flush=True)
        os._exit(0)  # the compiler goes on
    for name, runs in (("272m", ROWS[:2]), ("270m", ROWS if arguments.maxtext else ())):
        for rows, length in runs:
            os.spawnv(os.P_WAIT, sys.executable, [sys.executable, *sys.argv, "--run", name, str(rows), str(length)])


if __name__ == "__main__":
    main()
