"""Compiles updates that round stochastically, for chips that are not attached; prints a line of JSON for each.

KERAS_BACKEND=jax python tests/loss_scaling/compile_rounding.py
"""

import json

import jax
import jax.numpy as jnp
from jax.experimental import topologies

from keras_mp.optimizer.stochastic_rounding import random_bits, round_to_bfloat16, round_to_float8
from keras_mp.planner.chips.targets import find_target

SHAPE = (2048, 4096)


def weight(value, gradient, step):
    """A bfloat16 weight moves by its gradient."""
    return round_to_bfloat16(value.astype("float32") - 1e-3 * gradient, random_bits(SHAPE, 7, step, 0))


def state(value, gradient, step):
    """A moment in E4M3 follows its gradient."""
    return round_to_float8(0.9 * value.astype("float32") + 0.1 * gradient, random_bits(SHAPE, 7, step, 0))


def temporaries(update, dtype, name):
    """The temporary memory of an update, in bytes for each value."""
    target = find_target(name)
    if target.platform == "cuda":
        jax.devices()  # registers the plugin
        described = topologies.get_topology_desc(
            target.name, "cuda", target_config=target.configuration, topology="1x1x1"
        )
    else:
        described = topologies.get_topology_desc(platform="tpu", topology_name=target.topology)
    place = jax.sharding.SingleDeviceSharding(described.devices[0])
    arguments = [
        jax.ShapeDtypeStruct(shape, kind, sharding=place)
        for shape, kind in ((SHAPE, dtype), (SHAPE, jnp.bfloat16), ((), jnp.int32))
    ]
    step = jax.jit(update, donate_argnums=0, out_shardings=place)
    compiled = step.lower(*arguments).compile(compiler_options=target.flags if target.platform == "cuda" else {})
    return compiled.memory_analysis().temp_size_in_bytes / (SHAPE[0] * SHAPE[1])


if __name__ == "__main__":
    for name in ("v5e", "h100"):
        for update, dtype in ((weight, jnp.bfloat16), (state, jnp.float8_e4m3fn)):
            print(json.dumps([name, update.__name__, temporaries(update, dtype, name)]), flush=True)
