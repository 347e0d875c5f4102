"""Steps over several processes on TensorFlow, and what each replica holds of a variable."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

# Private: how a strategy keeps a variable of which each replica has its own.
from tensorflow.python.distribute.values import SyncOnReadVariable

from keras_mp.loss_scaling._tensorflow import OnReplicas
from keras_mp.parallel._tensorflow import connected


class Steps(NamedTuple):
    """Steps of a loop over batches, made by all together."""

    # Given this process's rows of a batch, and whether it wants to stop: its own logs, and whether any process does.
    train: Callable[[Any, bool], tuple[dict[str, float], bool]]
    test: Callable[[Any], None]  # adds this process's rows of a test batch to the metrics, and waits for nobody
    results: Callable[[], dict[str, float]]  # the metrics over the rows of all processes


def steps_of(model: keras.Model) -> Steps:
    """Makes the steps of a model of the strategy's scope."""
    strategy = connected()

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
    """Returns True: each process always feeds its own rows."""
    return True


def replica_values(variable: keras.Variable) -> np.ndarray | None:
    """Reads each replica's part of a sum over them.

    All processes must call it. The sum itself would lose how it was made, and with it the last bit of what is added
    later.

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
    """Gives replicas the parts that `replica_values` read, or their sum.

    The first one gets the sum where there are not as many replicas.
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
    # One function: called outside of one, TensorFlow makes a new one each time, and warns of retracing.
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
