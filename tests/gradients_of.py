"""Values and gradients of a function of arrays, on the backend that runs: eagerly, in a graph, jitted."""

import keras
import numpy as np

MODES = ("eager", "jit") if keras.backend.backend() == "jax" else ("eager", "graph", "jit")


def compiled(function):
    """The function under the backend's jit."""
    if keras.backend.backend() == "jax":
        import jax

        return jax.jit(function)
    import tensorflow as tf

    return tf.function(function, jit_compile=True, autograph=False)


def value_and_gradients(function, arrays, mode="eager", unknown=()):
    """Calls a function and differentiates it.

    Args:
        function: a function from tensors to a number.
        arrays: the arguments of the function, NumPy arrays.
        mode: one of MODES.
        unknown: the axes whose size is not known on TensorFlow in a graph.

    Returns:
        The value, and a gradient for each argument, as NumPy arrays in float32.
    """
    if keras.backend.backend() == "jax":
        import jax

        both = jax.value_and_grad(function, argnums=tuple(range(len(arrays))))
        value, gradients = (jax.jit(both) if mode == "jit" else both)(*map(jax.numpy.asarray, arrays))
    else:
        import tensorflow as tf

        def both(*arguments):
            with tf.GradientTape() as tape:
                tape.watch(arguments)
                value = function(*arguments)
            return value, tape.gradient(value, arguments)

        if mode != "eager":
            shapes = [[None if axis in unknown else size for axis, size in enumerate(each.shape)] for each in arrays]
            signature = [tf.TensorSpec(shape, each.dtype) for shape, each in zip(shapes, arrays, strict=True)]
            both = tf.function(both, input_signature=signature, jit_compile=mode == "jit", autograph=False)
        value, gradients = both(*map(tf.convert_to_tensor, arrays))
    return tuple(
        np.asarray(keras.ops.convert_to_numpy(keras.ops.cast(each, "float32"))) for each in (value, *gradients)
    )
