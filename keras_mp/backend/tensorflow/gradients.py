"""Gradients: functions with one of their own, and gradients that may be sparse."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import keras
import tensorflow as tf

# Private: no public name tells whether forward mode follows a tensor.
from tensorflow.python.eager import forwardprop_util

from keras_mp.backend.tensorflow.tensors import as_tensor

HAS_SPARSE_GRADIENTS = True
ACCUMULATING_COPIES = False


def custom_gradient(function: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a function of tensors that has a gradient of its own.

    Args:
        function: a function from tensors to `(results, gradient)`: floats, in any structure, and `gradient(*upstream)`,
            which takes a tensor for each of them and returns one for each argument, or None for 0. What it computes is
            differentiated as usual.

    Returns:
        A function of the same tensors that returns the results.
    """
    own = tf.custom_gradient(function)
    return lambda *arguments: own(*map(as_tensor, arguments))


def in_forward_mode(tensors: Sequence[Any]) -> bool:
    """Whether forward mode follows one of the tensors.

    In a graph it then follows each operation that computes a result, and not the function's own gradient.
    """
    return bool(forwardprop_util.pack_tangents(list(tensors)).tangents)


def gradients_of(function: Callable[..., Any], arguments: Sequence[Any], upstream: Any) -> list[Any]:
    """Computes the gradients of a function at its arguments, those of `sum(upstream result)`: one for each."""
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch(list(arguments))
        result = function(*arguments)
    return tape.gradient(result, list(arguments), upstream, tf.UnconnectedGradients.ZERO)


def sum_repeated_rows(gradient: Any) -> Any:
    """Gives each row of a sparse gradient once, as the sum of its occurrences; a dense one is returned as it is."""
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    rows, places = tf.unique(gradient.indices)
    sums = tf.math.unsorted_segment_sum(gradient.values, places, tf.size(rows))
    return tf.IndexedSlices(sums, rows, gradient.dense_shape)


def map_values(function: Callable[[Any], Any], gradient: Any) -> Any:
    """Applies a function to the values that a dense, sparse or ragged gradient or tensor stores."""
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(function(gradient.values), gradient.indices, gradient.dense_shape)
    if isinstance(gradient, tf.SparseTensor):
        return gradient.with_values(function(gradient.values))
    if isinstance(gradient, tf.RaggedTensor):
        return gradient.with_flat_values(function(gradient.flat_values))
    return function(gradient)


def values_of(gradient: Any) -> Any:
    """Returns the values that a dense, sparse or ragged gradient or tensor stores, as a dense tensor."""
    if isinstance(gradient, tf.RaggedTensor):
        return gradient.flat_values
    return gradient.values if isinstance(gradient, (tf.IndexedSlices, tf.SparseTensor)) else gradient


def dense(gradient: Any) -> Any:
    """Returns a gradient as a tensor of its variable's shape."""
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    return tf.math.unsorted_segment_sum(gradient.values, gradient.indices, gradient.dense_shape[0])


def register_gradient(operation: str, gradient: Callable[..., Any]) -> None:
    """Gives one of TensorFlow's operations a gradient, for second derivatives and forward mode.

    Args:
        operation: the name of the operation, such as "XlaDotV2".
        gradient: a function from the operation and the gradients of its results to those of its inputs. It is left as
            it is where this version of TensorFlow, or another library, has one.
    """
    with suppress(KeyError):
        tf.RegisterGradient(operation)(gradient)


def sparse_gradients(model: keras.Model, embeddings: list[Any], unclear: list[Any]) -> list[Any]:
    """Tells which variables have a gradient that is `tf.IndexedSlices`.

    Args:
        model: a built Keras model.
        embeddings: variables whose rows are looked up for certain.
        unclear: variables that the model is traced for, forward and backward.

    Returns:
        The embeddings, and those of the unclear variables that have one; all of them where the model cannot be traced
        without data, as a subclassed one.
    """
    if not unclear:
        return embeddings
    try:
        return [*embeddings, *_traced(model, unclear)]
    except Exception:  # whatever a stranger's layer raises here, it raises again, and better explained, in training
        return [*embeddings, *unclear]


def _traced(model: keras.Model, variables: list[keras.Variable]) -> list[Any]:
    sparse: list[Any] = []

    def step(*flat: Any) -> None:
        inputs = flat[0] if len(flat) == 1 else keras.tree.pack_sequence_as(model.input, list(flat))
        # The scope, so that the model does not keep the losses that its layers add here.
        with tf.GradientTape() as tape, keras.StatelessScope(collect_losses=True) as scope:
            outputs = [*keras.tree.flatten(model(inputs, training=True)), *scope.losses]
            floats = [tf.reduce_sum(tf.cast(output, tf.float32)) for output in outputs if output.dtype.is_floating]
        gradients = tape.gradient(floats, [variable.value for variable in variables])
        pairs = zip(variables, gradients, strict=True)
        sparse.extend(variable for variable, gradient in pairs if isinstance(gradient, tf.IndexedSlices))

    if not getattr(model, "inputs", None):
        raise ValueError(f"model {model.name!r} has no inputs to trace it with")
    tf.function(step, autograph=False).get_concrete_function(*map(_spec, model.inputs))
    return sparse


def _spec(tensor: Any) -> Any:
    spec = tf.SparseTensorSpec if getattr(tensor, "sparse", False) else tf.TensorSpec
    return spec(tensor.shape, tensor.dtype)
