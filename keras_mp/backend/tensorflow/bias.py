"""The gradient of a bias in bfloat16, on a CPU.

    gradient = sum(upstream) over the rows       summed in float32, rounded once

TensorFlow's kernel for CPUs, `BiasAddGrad`, adds up in bfloat16: of 4,096 rows drawn from N(0, 1), whose sum is 64 in
size, it is off by up to 18. The sum is a product with ones, which is also faster than that kernel.
"""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_mp.backend.tensorflow.islands import is_differentiated_by_kernels_of_cpus
from keras_mp.backend.tensorflow.tensors import operation_of


def add(keras_own: Callable[..., Any]) -> Callable[..., Any]:
    """Makes the replacement of Keras's addition: a bias in bfloat16 gets its gradient by a product."""

    def add(x1: Any, x2: Any) -> Any:
        if not (_is_bias(x1, x2) and is_differentiated_by_kernels_of_cpus()):
            return keras_own(x1, x2)

        @tf.custom_gradient
        def shift(x: Any, bias: Any) -> Any:
            return keras_own(x, bias), lambda upstream: (upstream, _sum_of_rows(upstream))

        x, bias = tf.convert_to_tensor(x1), tf.convert_to_tensor(x2)
        reshape = _reshape_of_a_product(x)
        if reshape is None:
            return shift(x, bias)
        product, shape = reshape.inputs
        return tf.ensure_shape(tf.reshape(shift(product, bias), shape), x.shape)

    return add


def _reshape_of_a_product(x: tf.Tensor) -> tf.Operation | None:
    """The reshape that makes x of a product of matrices with the same features; None where x is something else.

    To the product the bias is added by the kernel that multiplies: TensorFlow merges the two where no reshape is
    between them.
    """
    reshape = operation_of(x, "Reshape")
    if reshape is None or operation_of(reshape.inputs[0], "MatMul") is None:
        return None
    return reshape if reshape.inputs[0].shape[-1] == x.shape[-1] else None


def _is_bias(x: Any, bias: Any) -> bool:
    """Whether Keras adds `bias` by TensorFlow's kernel for biases, with features last."""
    shapes = [getattr(tensor, "shape", None) for tensor in (x, bias)]
    if any(shape is None or tf.TensorShape(shape).rank is None for shape in shapes):
        return False
    return (
        not isinstance(x, tf.SparseTensor)
        and {getattr(tensor.dtype, "name", tensor.dtype) for tensor in (x, bias)} == {"bfloat16"}
        and len(x.shape) > 1
        and len(bias.shape) == 1
        and bias.shape[0] == x.shape[-1]
        and bias.shape[0] not in (None, 1)
    )


def _sum_of_rows(upstream: Any) -> Any:
    rows = tf.reshape(upstream, (-1, upstream.shape[-1]))
    return tf.matmul(tf.ones((1, tf.shape(rows)[0]), rows.dtype), rows)[0]
