"""Several processes on JAX, by `jax.distributed`."""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import jax

# Private: the key-value store of jax.distributed.
from jax._src import distributed

from keras_mp.backend.common.keras_patches import patched

ENGINE_ERRORS = (jax.errors.JaxRuntimeError,)
"""What a step or the store raises when another process is gone."""
LATER_SECONDS = 10.0
"""How much later than the kit, which names the process, JAX itself may end a training."""
_heard: dict[int, tuple[str, float]] = {}
_shards_input = [False]


def connect(
    addresses: Sequence[str],
    index: int,
    gpus: Sequence[int] | None,
    silence_seconds: float,
    join_seconds: float,
    on_lost: Callable[[], None],
) -> None:
    """Connects this process with the others.

    The arguments are those of `_tensorflow`. On the first address JAX's coordination service is to listen; after
    `join_seconds` JAX aborts this process; `on_lost` is called where the first process does not answer.

    Raises:
        RuntimeError: JAX has computed something already, and can no longer be connected.
    """
    everyone = ", ".join(f"worker {number} ({address})" for number, address in enumerate(addresses))
    waits = f"waiting for {everyone}. JAX lists the numbers of those that did not join when it ends this process"
    notices = [
        threading.Timer(min(10.0, join_seconds / 2), print, [waits], {"file": sys.stderr, "flush": True}),
        threading.Timer(join_seconds + 2, on_lost),
    ]
    for notice in notices:
        notice.daemon = True
        notice.start()
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    waiting = partial(partial, cluster_register_timeout=math.ceil(join_seconds))
    try:
        with patched({"jax._src.distributed._jax.get_distributed_runtime_service": waiting}):
            jax.distributed.initialize(
                addresses[0],
                len(addresses),
                index,
                local_device_ids=gpus,
                # In a SLURM job JAX would take the GPU numbered SLURM_LOCALID alone: also where a process has a whole
                # machine, and where CUDA_VISIBLE_DEVICES gives each process its own, which is then number 0.
                cluster_detection_method="deactivate",
                initialization_timeout=math.ceil(join_seconds + LATER_SECONDS),
                # The last heartbeat, of which JAX sends two in it, may be half of it old when a process is killed.
                heartbeat_timeout_seconds=math.ceil(2 * silence_seconds + LATER_SECONDS),
            )
    except jax.errors.JaxRuntimeError:
        raise  # such as a port in use
    except RuntimeError as error:
        raise RuntimeError(
            "JAX can be connected with other processes only before it computes anything: call keras_mp.parallel.join "
            f"before any model or random seed ({error})"
        ) from error
    finally:
        for notice in notices:
            notice.cancel()


def store_put(key: str, text: str) -> None:
    """Writes a text for all, unless one is there."""
    client: Any = distributed.global_state.client
    try:
        client.key_value_set(f"keras_mp/{key}", text)
    except jax.errors.JaxRuntimeError as error:
        if "ALREADY_EXISTS" not in str(error):
            raise


def store_get(key: str) -> str:
    """Reads a text, once a process has written it."""
    client: Any = distributed.global_state.client
    return str(client.blocking_key_value_get(f"keras_mp/{key}", 2**40))


def silent_processes(count: int, silence_seconds: float) -> list[int]:
    """Says that this process lives; the first lists the silent.

    To be called once a second. Silent is one of which nothing was heard for some seconds.
    """
    now, own, client = time.monotonic(), distributed.global_state.process_id, cast(Any, distributed.global_state.client)
    client.key_value_set(f"keras_mp/beat/{own}", str(now), allow_overwrite=True)
    if own:
        return []
    # After this process itself was stopped, it cannot tell who else was silent.
    was_stopped = now - _heard.get(0, ("", now))[1] > 1 + silence_seconds / 2
    beats = {int(key.rpartition("/")[2]): beat for key, beat in client.key_value_dir_get("keras_mp/beat/")}
    for index in range(count):
        beat = beats.get(index, "")
        if was_stopped or index not in _heard or _heard[index][0] != beat:
            _heard[index] = beat, now
    return [index for index, (_, heard) in _heard.items() if now - heard > silence_seconds]


def stops_after(step: int, stop: bool) -> bool:
    """Tells whether all stop after a step; all call it.

    One that wants to stop, or gets SIGTERM, takes the others with it.
    """
    from jax.experimental import multihost_utils  # not above, because Keras does not import it

    stops = bool(multihost_utils.reached_preemption_sync_point(step))
    if stop and not stops:
        os.kill(os.getpid(), signal.SIGTERM)  # which JAX takes as the notice of a preemption, and tells all
    return stops


def disconnect() -> None:
    """Ends the connection; all must call it."""
    # A process that exits without it would wait five minutes for the others.
    jax.distributed.shutdown()


def is_engine_error(error: BaseException) -> bool:
    """Tells whether an error may come of a lost process."""
    # Gloo, which sums between processes on a CPU, reports a broken connection as a ValueError.
    return isinstance(error, ENGINE_ERRORS) or (isinstance(error, ValueError) and "Gloo" in str(error))


def shards_input(now: bool | None = None) -> bool:
    """Tells, or sets, whether each process feeds its own rows."""
    if now is not None:
        _shards_input[0] = now
    return _shards_input[0]
