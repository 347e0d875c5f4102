"""TensorFlow: the functions of `keras_mp.lean`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import keras
import tensorflow as tf

from keras_mp.backend.tensorflow.tensors import (
    barrier,
    call_program,
    dense,
    gradient_scope,
    has_islands,
    has_known_sizes,
)
from keras_mp.lean._tensorflow_step import step_scopes as step_scopes
from keras_mp.loss_scaling._tensorflow import share_of_batch


def unmerged(x: Any) -> Any:
    """Returns the same tensor."""
    return x  # with a barrier before a loop, XLA no longer knows how often the loop runs


def recompute(function: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a function that is recomputed in the backward pass."""

    @tf.custom_gradient
    def call(*arguments: Any) -> Any:
        scope = gradient_scope()

        def backward(*upstream: Any) -> Any:
            with scope():
                anew = barrier(list(arguments), [gradient for gradient in upstream if gradient is not None])
                watched = [argument for argument in anew if argument.dtype.is_floating]
                with tf.GradientTape(watch_accessed_variables=False) as tape:
                    tape.watch(watched)
                    results = function(*anew)
                pairs = [
                    (result, gradient)
                    for result, gradient in zip(results, upstream, strict=True)
                    if result.dtype.is_floating and gradient is not None
                ]
                targets, seeds = zip(*pairs, strict=True)
                gradients = iter(tape.gradient(targets, watched, seeds, tf.UnconnectedGradients.ZERO))
                return [dense(next(gradients)) if argument.dtype.is_floating else None for argument in anew]

        return function(*arguments), backward

    return call


def scan(
    step: Callable[..., Any], carry: list[Any], slices: list[Any], results: list[tuple[int, str]]
) -> tuple[list[Any], list[Any]]:
    """Calls a step for each slice, in one loop."""
    count = tf.shape(slices[0])[0]
    arrays = [tf.TensorArray(dtype, count, element_shape=slices[place].shape[1:]) for place, dtype in results]

    def body(index: Any, carry: Any, arrays: Any) -> Any:
        carry, made = step(carry, [sliced[index] for sliced in slices])
        return index + 1, carry, [array.write(index, result) for array, result in zip(arrays, made, strict=True)]

    _, carry, arrays = tf.while_loop(
        lambda index, carry, arrays: index < count, body, (tf.constant(0), list(carry), arrays),
        maximum_iterations=count,
    )  # fmt: skip
    return carry, [array.stack() for array in arrays]


def with_derivatives_of(formula: Callable[..., Any], values: Sequence[Any], arguments: Sequence[Any]) -> list[Any]:
    """Returns tensors that have the derivatives of a formula."""

    @tf.custom_gradient
    def same(*arguments: Any) -> Any:
        def gradient(*upstream: Any) -> Any:
            with tf.GradientTape() as tape:
                tape.watch(arguments)
                results = formula(*arguments)
            return tape.gradient(results, arguments, upstream, tf.UnconnectedGradients.ZERO)

        return [tf.identity(value) for value in values], gradient

    return same(*arguments)


def add_at(x: Any, places: Any, rows: Any) -> Any:
    """Adds rows, rounded to x's dtype, to those at places."""
    return tf.tensor_scatter_nd_add(x, places[:, None], tf.cast(rows, x.dtype))


def loss_outside(targets: tf.Tensor, vocabulary: int) -> tf.Tensor:
    """Loss and gradients of a target outside a vocabulary: NaN.

    Raises:
        tf.errors.InvalidArgumentError: on a CPU and outside XLA, where Keras's loss does; it names the target.
    """
    checked = tf.gather(tf.zeros(vocabulary), targets)
    return tf.reduce_sum(checked) + float("nan")


def fused_attention(
    query: Any, key: Any, value: Any, mask: Any, *, causal: bool, scale: float, mean_of_unseen: bool = False
) -> Any:
    """Returns None: TensorFlow has no fused attention."""
    return None


def keras_has_kernel(query: Any, key: Any, value: Any) -> bool:
    """Returns False: TensorFlow has no fused attention."""
    return False


def global_mean(count: Any) -> Any:
    """Divides a replica's sum for the global mean."""
    share = share_of_batch()
    if share is None:  # no step of several replicas
        return count
    # The loss is multiplied by the share later.
    return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.MEAN, count) * share


def steps_compiled_with(options: Mapping[str, Any]) -> AbstractContextManager[None]:
    """A scope that does nothing: `tf.function` takes no options."""
    del options
    return nullcontext()


def fused(function: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a function one program, also without jit."""

    def call(*arguments: Any) -> Any:
        if all(map(has_known_sizes, filter(tf.is_tensor, arguments))):
            return call_program(function, *arguments)
        return function(*arguments)  # each length would compile anew

    return call


# What attention computes otherwise where its products run as kernels of a CPU, between which no compiler stands.


# To start a block's kernels takes longer than to move the scores of so few rows through memory.
_WHOLE = 256


def rows_at_once(rows: int, block: int, *, causal: bool) -> int:
    """Counts the rows that attention takes at once."""
    return rows if not causal and 0 < rows <= _WHOLE and has_islands() else block


def computed_once(x: Any) -> Any:
    """Returns the same tensor, not merged with its readers'.

    XLA for GPUs weighs each merge against all readers. The mask of a deep model has hundreds, and to compile took twice
    as long.
    """
    return x if has_islands() else barrier([x], [])[0]


def product_over_rows(plain: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Makes a product over rows whose sums are rounded next.

    It contracts `(batch, heads, group, rows, n)` with `(batch, heads, group, rows, m)` over group and rows. A kernel of
    a CPU sums in float32, too, and rounds the sums itself; for it the sizes but the first must be known.
    """

    def by_kernel(left: Any, right: Any) -> Any:
        _, heads, group, rows, _ = left.shape
        left, right = (keras.ops.reshape(x, (-1, heads, group * rows, x.shape[4])) for x in (left, right))
        return keras.ops.matmul(keras.ops.transpose(left, (0, 1, 3, 2)), right)

    return by_kernel if has_islands() else plain
