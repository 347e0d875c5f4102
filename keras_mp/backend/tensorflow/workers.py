"""Several processes on TensorFlow: MultiWorkerMirroredStrategy, and the steps that Keras's fit cannot make under it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

# Private: the coordination service that the strategy starts, and its key-value store.
from tensorflow.compiler.xla.tsl.protobuf.coordination_config_pb2 import CoordinatedJob

# Private: how a strategy keeps a variable of which each replica has its own.
from tensorflow.python.distribute.values import SyncOnReadVariable
from tensorflow.python.eager.context import context

from keras_mp.backend.tensorflow.replicas import OnReplicas

ENGINE_ERRORS = (tf.errors.OpError,)
"""What a step or the store raises when another process is gone."""

_strategy: list[Any] = []


class WorkerReplicas(OnReplicas, tf.distribute.MultiWorkerMirroredStrategy):
    """The replicas of all processes: each draws random numbers of its own, and counts by the rows that it has."""


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
        index: the number of this process among them.
        gpus: the numbers of the visible GPUs that this process takes; all by default.
        silence_seconds: the seconds after which a process that sends no heartbeat is lost.
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
    """Writes a text where all processes can read it; one that is there stays."""
    try:
        context().set_config_key_value(f"keras_mp/{key}", text)
    except tf.errors.AlreadyExistsError:
        pass


def store_get(key: str) -> str:
    """Reads a text, and waits until a process has written it."""
    return str(context().get_config_key_value(f"keras_mp/{key}"))


def silent_processes(count: int, silence_seconds: float) -> list[int]:
    """Asks the coordination service of the first process which ones it does not hear.

    Returns:
        Those of which nothing was heard for some seconds, on the first process. The others only wait for an answer.
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
    """Whether a step may have raised it because another process is gone."""
    return isinstance(error, ENGINE_ERRORS)


class Steps(NamedTuple):
    """What a loop over batches needs; all processes must call each of them together, but for `test`.

    Attributes:
        train: a function that makes a step with this process's rows of a batch, given whether it wants to stop; returns
            its own logs, and whether any process wants to stop.
        test: a function that adds this process's rows of a test batch to the metrics.
        results: a function that returns the metrics over the rows of all processes.
    """

    train: Callable[[Any, bool], tuple[dict[str, float], bool]]
    test: Callable[[Any], None]
    results: Callable[[], dict[str, float]]


def steps_of(model: keras.Model) -> Steps:
    """Makes the steps of a compiled model.

    Args:
        model: a model that was built and compiled in the strategy's scope.

    Returns:
        Its steps.
    """
    strategy = _strategy[-1]

    def step(data: Any, stop: Any) -> Any:
        logs = model.train_step(data)
        stops = tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, tf.identity(stop))
        return logs, stops

    jit = model.jit_compile is True
    one = tf.function(step, jit_compile=True, reduce_retracing=True, autograph=False) if jit else step

    @tf.function(reduce_retracing=True, autograph=False)
    def train_on(data: Any, stop: Any) -> Any:
        return strategy.run(one, args=(data, stop))

    @tf.function(reduce_retracing=True, autograph=False)
    def test_on(data: Any) -> None:
        # Without the counting of rows, for which processes wait for one another: they may have different numbers.
        super(OnReplicas, strategy).run(model.test_step, args=(data,))

    def train(rows: Any, stop: bool) -> tuple[dict[str, float], bool]:
        logs, stops = train_on(_per_replica(strategy, rows), tf.constant(float(stop)))
        logs, stops = keras.tree.map_structure(
            lambda value: strategy.experimental_local_results(value)[0], (logs, stops)
        )
        return _floats(logs), float(stops) > 0

    return Steps(train, lambda rows: test_on(_per_replica(strategy, rows)), lambda: _floats(model.get_metrics_result()))


def shards_input(now: bool | None = None) -> bool:
    """Returns True, and sets nothing: here each process always feeds its shard of a batch, its own rows."""
    return True


def to_numpy(variable: keras.Variable) -> np.ndarray:
    """Reads a variable."""
    return np.asarray(keras.ops.convert_to_numpy(variable))


def replica_values(variable: keras.Variable) -> np.ndarray | None:
    """Reads what each replica holds of a variable whose value is a sum over them; all processes must call it.

    The sum itself would lose how it was made, and with it the last bit of what is added later.

    Args:
        variable: a Keras variable.

    Returns:
        An array of shape (replicas, *shape of the variable); None for a variable that is the same on all.
    """
    held = variable._value
    if not isinstance(held, SyncOnReadVariable):
        return None
    strategy = held.distribute_strategy
    own = iter([component.read_value()[None] for component in held.values])
    values = strategy.experimental_distribute_values_from_function(lambda context: next(own))
    return np.asarray(_gather(strategy, values))


def assign_replica_values(variable: keras.Variable, values: np.ndarray) -> None:
    """Gives each replica's part of a variable the value that `replica_values` read; where it has not as many, the sum.

    Args:
        variable: a Keras variable.
        values: shape (replicas, *shape of the variable).
    """
    held = variable._value
    if not isinstance(held, SyncOnReadVariable):
        variable.assign(values.sum(axis=0))
        return
    strategy = held.distribute_strategy
    if len(values) != strategy.num_replicas_in_sync:
        total = np.zeros((strategy.num_replicas_in_sync, *values.shape[1:]), values.dtype)
        total[0] = values.sum(axis=0)
        values = total
    own = strategy.experimental_distribute_values_from_function(
        lambda context: tf.constant(values[context.replica_id_in_sync_group])
    )
    for component, value in zip(held.values, strategy.experimental_local_results(own), strict=True):
        component.assign(value)


@tf.function(autograph=False)
def _gather(strategy: Any, values: Any) -> Any:
    """Gathers in one function: called outside of one, TensorFlow makes a new one each time, and warns of retracing."""
    return strategy.gather(values, axis=0)


def _per_replica(strategy: Any, rows: Any) -> Any:
    """Splits the rows of this process over its own devices."""
    own = len(strategy.extended.worker_devices)

    def split(array: Any) -> Any:
        parts = iter([array] if own == 1 else [array[index::own] for index in range(own)])
        return strategy.experimental_distribute_values_from_function(lambda context: tf.convert_to_tensor(next(parts)))

    return keras.tree.map_structure(split, rows)


def _floats(logs: dict[str, Any]) -> dict[str, float]:
    flat: dict[str, Any] = {}
    for name, value in logs.items():
        flat |= value if isinstance(value, dict) else {name: value}
    return {name: float(value) for name, value in flat.items()}
