"""Several processes on JAX: `jax.distributed`, after which the devices of all are one list."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import keras
import numpy as np

COLLECTIVE_ERRORS = (jax.errors.JaxRuntimeError,)
"""What a step raises when another process is gone."""

LATER_SECONDS = 10.0
"""How much later than the kit's coordinator JAX's own ends a training, whose process sends no heartbeat."""

_shards_input = [False]


def connect(
    addresses: Sequence[str], index: int, gpus: Sequence[int] | None = None, silence_seconds: float = 20.0
) -> None:
    """Connects this process with the others.

    Args:
        addresses: `host:port` of each; on the first one JAX's coordinator is to listen.
        index: the number of this process among them.
        gpus: the numbers of the visible GPUs that this process takes; all by default.
        silence_seconds: the seconds after which the kit ends a training whose process sends no heartbeat; JAX does so
            later, so that the message which names the process comes first.

    Raises:
        RuntimeError: JAX has computed something already, and can no longer be connected.
    """
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    try:
        jax.distributed.initialize(
            addresses[0],
            len(addresses),
            index,
            local_device_ids=gpus,
            # In a SLURM job JAX would take the GPU numbered SLURM_LOCALID alone: also where a process has a whole
            # machine, and where CUDA_VISIBLE_DEVICES gives each process its own, which is then number 0.
            cluster_detection_method="deactivate",
            heartbeat_timeout_seconds=math.ceil(silence_seconds + LATER_SECONDS),
        )
    except RuntimeError as error:
        raise RuntimeError(
            "JAX can only be connected with other processes before it computes anything: begin the training with this, "
            f"before any model or random seed ({error})"
        ) from error


def steps_of(model: keras.Model) -> Any:
    """Returns None: Keras's own `fit` trains over several processes."""


def shards_input(now: bool | None = None) -> bool:
    """Whether each process feeds its shard of a batch, its own rows, or all of it; sets it where that is given."""
    if now is not None:
        _shards_input[0] = now
    return _shards_input[0]


def to_numpy(variable: keras.Variable) -> np.ndarray:
    """Reads a variable, wherever it lies; one that is split over processes, all of them must read."""
    value = variable.value
    if not value.is_fully_addressable and not value.is_fully_replicated:
        from jax.experimental import multihost_utils  # not above, because Keras does not import it

        return np.asarray(multihost_utils.process_allgather(value, tiled=True))
    return np.asarray(value)


def replica_values(variable: keras.Variable) -> None:
    """Returns None: JAX's arrays are whole, wherever they lie."""


def assign_replica_values(variable: keras.Variable, values: np.ndarray) -> None:
    """Gives a variable the sum of what replicas on TensorFlow held of it."""
    variable.assign(values.sum(axis=0))
