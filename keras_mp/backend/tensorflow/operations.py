"""The operation of a traced forward pass that first puts out a value that is not finite."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from keras_mp.backend.tensorflow.observe import unchanged

Tap = Callable[[Any, bool], Any]
Frame = tuple[str, int]


def nonfinite_operation(
    model: keras.Model, forward: Callable[[Tap, Any], tuple[Any, list[Any]]], batch: Any, place: int
) -> tuple[str, list[Frame]] | None:
    """Follows a tensor of the forward pass that is not finite back to the operation whose inputs all are.

    Args:
        model: a built Keras model; no variable of it changes.
        forward: `forward(tap, batch) -> (loss, kept)`, as for `observed_step`.
        batch: a structure of arrays.
        place: of the tensor in `kept`.

    Returns:
        TensorFlow's name of the operation, and the lines of Python that led to it, as (file, line number), the
        innermost first; None where the tensor is finite.
    """
    flat = [tf.convert_to_tensor(leaf) for leaf in tf.nest.flatten(batch)]
    tensors: list[tf.Tensor] = []

    @tf.function(autograph=False)
    def finite(*leaves: tf.Tensor) -> tf.Tensor:
        graph = tf.compat.v1.get_default_graph()

        def tap(x: Any, watch: bool) -> Any:
            if tf.compat.v1.get_default_graph() is not graph:
                return None
            return tf.identity(x) if watch else x

        _, kept = forward(tap, tf.nest.pack_sequence_as(batch, leaves))
        tensors[:] = [kept[place]]
        seen = {id(kept[place])}
        for tensor in tensors:  # which grows
            fresh = [x for x in tensor.op.inputs if x.dtype.is_floating and id(x) not in seen]
            seen |= {id(x) for x in fresh}
            tensors.extend(fresh)
        return tf.stack([tf.reduce_all(tf.math.is_finite(tf.cast(x, tf.float32))) for x in tensors])

    with unchanged(model):
        flags = finite(*flat).numpy()
    bad = {id(tensor) for tensor, flag in zip(tensors, flags, strict=True) if not flag}
    at = tensors[0]
    if id(at) not in bad:
        return None
    while spoiled := [x for x in at.op.inputs if id(x) in bad]:
        at = spoiled[0]
    return at.op.type, [(frame.filename, frame.lineno) for frame in reversed(at.op.traceback)]
