"""Several devices on TensorFlow: `MirroredStrategy`, with what it and Keras get wrong put right."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf

# Private: how Keras's trainer makes one value of those of the replicas.
from keras.src.backend.tensorflow.trainer import reduce_per_replica

from keras_mp.backend.common.keras_patches import patched
from keras_mp.backend.tensorflow.replicas import OnReplicas
from keras_mp.backend.tensorflow.tensors import as_tensor
from keras_mp.backend.tensorflow.workers import connected

HOW_TO_HAVE_MORE_DEVICES = "split it with tf.config.set_logical_device_configuration before TensorFlow is used"
_numbers = itertools.count(1)


class Replicas(OnReplicas, tf.distribute.MirroredStrategy):
    """`MirroredStrategy` by a plan.

    Args:
        plan: a `keras_mp.parallel.plan.Plan`.
    """

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


def can_jit() -> bool:
    """Whether a step can be jitted here: not on several replicas, which XLA's program for one device cannot reach."""
    return tf.distribute.get_strategy().num_replicas_in_sync == 1


def is_on_one_device() -> bool:
    """Returns True: a replica computes on one device, with all weights."""
    return True


def is_spread(model: keras.Model) -> bool:
    """Whether a model was built on several devices or processes."""
    return bool(model.distribute_strategy.num_replicas_in_sync > 1)


def reduce_dtype() -> str:
    """What the current strategy sums gradients in."""
    strategy = tf.distribute.get_strategy()
    return strategy.plan.reduce_dtype if isinstance(strategy, Replicas) else "float32"


def tpu_coordinates(names: Sequence[str]) -> tuple[str, list[tuple[int, ...]]] | None:
    """Returns None: on TensorFlow each device has all weights, and no sum of parts."""


def part_of(variable: Any) -> tuple[Any, Any]:
    """Reads a variable, of which each device has the whole here."""
    return as_tensor(variable), None


@contextmanager
def parallel_scope(plan: Any) -> Iterator[Any]:
    """A scope in which models are built, compiled and trained over the devices of a plan.

    Args:
        plan: a `keras_mp.parallel.plan.Plan`.

    Yields:
        The strategy.
    """
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
    """Makes Keras's function of an iterator, for training and for tests."""

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
