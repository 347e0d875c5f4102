"""The gradient of a bias in bfloat16, on a CPU.

    gradient = sum(upstream) over the rows       summed in float32, rounded once

TensorFlow's kernel for CPUs, `BiasAddGrad`, adds up in bfloat16: of 4,096 rows drawn from N(0, 1), whose sum is 64 in
size, it is off by up to 18. The sum is a product with ones, which is also faster than that kernel.
"""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_mp.backend.tensorflow.islands import is_differentiated_by_kernels_of_cpus


def add(keras_own: Callable[..., Any]) -> Callable[..., Any]:
    """Makes the replacement of Keras's addition: a bias in bfloat16 gets its gradient by a product."""

    def add(x1: Any, x2: Any) -> Any:
        if not (_is_bias(x1, x2) and is_differentiated_by_kernels_of_cpus()):
            return keras_own(x1, x2)

        @tf.custom_gradient
        def shift(x: Any, bias: Any) -> Any:
            return keras_own(x, bias), lambda upstream: (upstream, _sum_of_rows(upstream))

        x, bias = tf.convert_to_tensor(x1), tf.convert_to_tensor(x2)
        product = _product_of_rows(x)
        if product is None:
            return shift(x, bias)
        return tf.ensure_shape(tf.reshape(shift(product, bias), x.op.inputs[1]), x.shape)

    return add


def _product_of_rows(x: tf.Tensor) -> tf.Tensor | None:
    """The product of matrices that x is a reshape of, with the same features; None where it is something else.

    To it the bias is added by the kernel that multiplies: TensorFlow merges the two where no reshape is between them.
    """
    if isinstance(x, tf.__internal__.EagerTensor) or x.op.type != "Reshape":
        return None
    product = x.op.inputs[0]
    return product if product.op.type == "MatMul" and product.shape[-1] == x.shape[-1] else None


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
