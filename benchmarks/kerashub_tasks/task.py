"""What a task of KerasHub is built from at a tiny size, and a batch for it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import keras
import numpy as np

VOCABULARY = 40
LENGTH = 8
BATCH = 3
CLASSES = 4


class Task(NamedTuple):
    """A way to build a task.

    Attributes:
        family: the thing that it does, as the table says it.
        build: a function that makes the task under the global policy.
        labels: `labels(rng, task)` makes y; None where the task's preprocessor makes it of x.
        inputs: `inputs(rng, task)` makes x.
        compile: arguments of the task's own compile(), beside the optimizer.
    """

    family: str
    build: Callable[[], Any]
    labels: Callable[[np.random.Generator, Any], Any] | None
    inputs: Callable[[np.random.Generator, Any], Any]
    compile: dict[str, Any] = {}

    def data(self, task: Any) -> tuple[Any, ...]:
        """A fresh random batch (x, y) as the task's fit() takes it, or (x,) where its preprocessor makes y."""
        rng = np.random.default_rng()
        x = self.inputs(rng, task)
        return (x,) if self.labels is None else (x, self.labels(rng, task))


@contextmanager
def under(policy: str) -> Iterator[None]:
    """Sets the global dtype policy, and then the one before."""
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy)
    try:
        yield
    finally:
        keras.config.set_dtype_policy(before)


def inputs_of(**known: Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]) -> Callable[..., Any]:
    """Makes x from what a task's inputs are called; `known` overrides by name, given the input's shape."""

    def inputs(rng: np.random.Generator, task: Any) -> Any:
        def like(tensor: Any) -> np.ndarray:
            shape = (BATCH, *(size or LENGTH for size in tensor.shape[1:]))
            if tensor.name in known:
                return known[tensor.name](rng, shape)
            if "padding_mask" in tensor.name:
                return padded(shape).astype(tensor.dtype)
            if "float" in tensor.dtype:
                return rng.uniform(0, 1, shape).astype("float32")
            if "segment" in tensor.name:
                return rng.integers(0, 2, shape).astype(tensor.dtype)
            if "position" in tensor.name:
                return rng.integers(0, LENGTH, shape).astype(tensor.dtype)
            return rng.integers(3, VOCABULARY, shape).astype(tensor.dtype)

        return keras.tree.map_structure(like, task._inputs_struct)

    return inputs


def padded(shape: tuple[int, ...]) -> np.ndarray:
    """A mask whose last record is two shorter."""
    mask = np.ones(shape)
    mask[-1, -2:] = 0
    return mask


def output_shape(task: Any) -> tuple[int, ...]:
    return (BATCH, *(size or LENGTH for size in task.output.shape[1:]))


def classes(rng: np.random.Generator, task: Any) -> np.ndarray:
    """A class for each vector of logits."""
    *shape, count = output_shape(task)
    return rng.integers(0, count, shape).astype("int32")


def one_hot(rng: np.random.Generator, task: Any) -> np.ndarray:
    return np.eye(output_shape(task)[-1], dtype="float32")[classes(rng, task)]


def like_outputs(rng: np.random.Generator, task: Any) -> Any:
    """A value for each value of each output."""

    def like(tensor: Any) -> np.ndarray:
        return rng.uniform(0, 1, (BATCH, *(size or LENGTH for size in tensor.shape[1:]))).astype("float32")

    return keras.tree.map_structure(like, task.output)
