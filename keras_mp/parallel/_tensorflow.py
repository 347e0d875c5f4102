"""Several devices and processes, by TensorFlow's strategies."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf

# Private: how Keras's trainer makes one value of those of the replicas.
from keras.src.backend.tensorflow.trainer import reduce_per_replica

# Private: the coordination service that the strategy starts, and its key-value store.
from tensorflow.compiler.xla.tsl.protobuf.coordination_config_pb2 import CoordinatedJob
from tensorflow.python.eager.context import context

from keras_mp.backend.common.keras_patches import patched
from keras_mp.loss_scaling._tensorflow import OnReplicas

HOW_TO_HAVE_MORE_DEVICES = "split it with tf.config.set_logical_device_configuration before TensorFlow is used"
_numbers = itertools.count(1)


class Replicas(OnReplicas, tf.distribute.MirroredStrategy):
    """`MirroredStrategy` by a plan."""

    def __init__(self, plan: Any) -> None:
        # Private: two strategies of a process would number their collective operations alike, and TensorFlow takes the
        # second's for the first's.
        self._collective_key_base = next(_numbers) * 1000
        # TensorFlow's collective operations have no bfloat16; sums on one device have.
        one_device = tf.distribute.ReductionToOneDevice() if plan.reduce_dtype == "bfloat16" else None
        super().__init__(list(plan.devices), cross_device_ops=one_device)
        self.plan = plan

    def reduce(self, reduce_op: Any, value: Any, axis: int | None) -> Any:
        """As in `tf.distribute.Strategy`.

        Raises:
            ValueError: If the replicas have different numbers of rows to add up. Keras's `fit` and `evaluate` do so
                with an epoch's first batch.
        """
        for leaf in keras.tree.flatten(value) if axis is None else ():
            # A number has no shape, and an array of unknown rank none that tells.
            shapes = [tf.TensorShape(getattr(part, "shape", None)) for part in self.experimental_local_results(leaf)]
            rows = [shape[0] for shape in shapes if shape.rank]
            if None not in rows and len(set(rows)) > 1:
                self.plan.check_rows(sum(rows))
        return super().reduce(reduce_op, value, axis)


def is_spread(model: keras.Model) -> bool:
    """Whether a model was built on several devices or processes."""
    return bool(model.distribute_strategy.num_replicas_in_sync > 1)


def tpu_coordinates(names: Sequence[str]) -> tuple[str, list[tuple[int, ...]]] | None:
    """Returns None: each device has all weights."""


@contextmanager
def parallel_scope(plan: Any) -> Iterator[Any]:
    """Scope in which a model trains over a plan's devices."""
    if (together := connected()) is not None:
        if plan.reduce_dtype != "float32":
            raise ValueError(f"reduce_dtype={plan.reduce_dtype!r}: TensorFlow sums over processes in float32 alone")
        with together.scope():
            yield together
        return
    strategy = Replicas(plan)
    with patched({"keras.Model._make_function": _make_function}), strategy.scope():
        yield strategy


def _make_function(original: Callable[..., Any]) -> Callable[..., Any]:
    """Makes Keras's function of an iterator over batches."""

    def make(model: keras.Model, step: Callable[..., Any]) -> Callable[..., Any]:
        strategy = model.distribute_strategy
        if not isinstance(strategy, Replicas):
            return original(model, step)
        _check_model(model)
        if model.steps_per_execution == 1 or model.run_eagerly:
            return original(model, step)

        @model._autoconvert_optionals
        @tf.function(reduce_retracing=True, autograph=False)
        def one(data: Any) -> Any:
            return reduce_per_replica(strategy.run(step, args=(data,)), strategy, reduction="auto")

        # One after the other: in one graph, branches on whether there is a next batch are what fails, and a graph of
        # several steps takes TensorFlow a minute to optimize.
        def function(iterator: Any) -> Any:
            batches = itertools.islice(iterator, model.steps_per_execution)
            logs = [one(data) for data in batches]
            if not logs:
                raise StopIteration
            return logs[-1]

        return function

    return make


def _check_model(model: keras.Model) -> None:
    model.distribute_strategy.plan.check_dtypes(layer.compute_dtype for layer in model._flatten_layers())
    if model.jit_compile:
        raise ValueError(
            f"model {model.name!r} is compiled with jit_compile=True, and XLA's program for one device cannot sum over "
            "others on TensorFlow: compile with jit_compile=False"
        )


ENGINE_ERRORS = (tf.errors.OpError,)
"""What a step or the store raises when another process is gone."""
_strategy: list[Any] = []


class WorkerReplicas(OnReplicas, tf.distribute.MultiWorkerMirroredStrategy):
    """Replicas of all processes, with own draws and row counts."""


def connect(
    addresses: Sequence[str],
    index: int,
    gpus: Sequence[int] | None,
    silence_seconds: float,
    join_seconds: float,
    on_lost: Callable[[], None],
) -> None:
    """Connects this process with the others.

    Args:
        addresses: `host:port` of each, where TensorFlow is to listen.
        gpus: the numbers of the visible GPUs that this process takes; all by default.
        silence_seconds: the seconds after which a process that is silent is lost.
        join_seconds: the seconds that the rendezvous waits for all; then an error names who is missing.
        on_lost: an argument that is JAX's alone.

    Raises:
        RuntimeError: TensorFlow has computed something already, and can no longer be connected.
        ValueError: this machine has no such GPU.
    """
    # Where TensorFlow reads it.
    os.environ["TF_CONFIG"] = json.dumps(
        {"cluster": {"worker": list(addresses)}, "task": {"type": "worker", "index": index}}
    )
    try:
        _take_gpus(gpus)
        # As the strategy does, whose own limits are an hour and 10 s, and which waits for ever for the last to come.
        context().configure_coordination_service(
            service_type="standalone",
            service_leader="/job:worker/replica:0/task:0",
            cluster_register_timeout_in_ms=int(join_seconds * 1000),
            heartbeat_timeout_in_ms=int(silence_seconds * 1000),
            coordinated_jobs=[CoordinatedJob(name="worker", num_tasks=len(addresses))],
        )
        context().coordination_service.cluster_register_with_barrier = True
        strategy = WorkerReplicas()
    except RuntimeError as error:
        raise RuntimeError(
            f"TensorFlow can be connected with other processes only before it computes anything: call "
            f"keras_mp.parallel.join before any model or random seed ({error})"
        ) from error
    _strategy.append(strategy)


def _take_gpus(gpus: Sequence[int] | None) -> None:
    physical = tf.config.list_physical_devices("GPU")
    if gpus is None or not physical:
        return
    if max(gpus) >= len(physical):
        raise ValueError(
            f"this process would take GPU {max(gpus)}, and its machine has {len(physical)}: start fewer processes "
            "there, or give each its own GPU with CUDA_VISIBLE_DEVICES"
        )
    tf.config.set_visible_devices([physical[gpu] for gpu in gpus], "GPU")


def connected() -> Any:
    """The strategy over all processes; None for a process alone."""
    return _strategy[-1] if _strategy else None


def store_put(key: str, text: str) -> None:
    """Writes a text for all, unless one is there."""
    try:
        context().set_config_key_value(f"keras_mp/{key}", text)
    except tf.errors.AlreadyExistsError:
        pass


def store_get(key: str) -> str:
    """Reads a text, once a process has written it."""
    return str(context().get_config_key_value(f"keras_mp/{key}"))


def silent_processes(count: int, silence_seconds: float) -> list[int]:
    """Lists the processes that the first one does not hear.

    On the first process; the others only wait for an answer.
    """
    if _strategy[-1].cluster_resolver.task_id:
        store_get("lives")  # the question below would hold all threads of this process while the first one is stopped
        return []
    store_put("lives", "")
    states = context().get_task_states([("worker", count)])
    return [index for index, error in enumerate(states) if error is not None]


def stops_after(step: int, stop: bool) -> bool:
    """Returns `stop`: a step sums what all processes want."""
    return stop


def disconnect() -> None:
    """Does nothing: TensorFlow waits for nobody when a process exits."""


def is_engine_error(error: BaseException) -> bool:
    """Tells whether an error may come of a lost process."""
    return isinstance(error, ENGINE_ERRORS)
