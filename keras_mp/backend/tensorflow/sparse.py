"""Which gradients TensorFlow keeps sparse: those of weights whose rows are looked up."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

HAS_SPARSE_GRADIENTS = True


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
