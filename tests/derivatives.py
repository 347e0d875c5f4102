"""Second derivatives and forward mode of functions of arrays and of models, on the backend that runs."""

import keras
import numpy as np
from keras import ops


def penalty_gradients(function, arrays, mode="eager", model=None):
    """The gradients of a penalty on a function's gradients, the mean of their squares: reverse mode over reverse mode.

    Args:
        function: a function from tensors to a number.
        arrays: the arguments of the function, NumPy arrays.
        mode: one of `gradients_of.MODES`.
        model: the model whose trainable variables the function reads; the penalty's gradients for them come last.

    Returns:
        A gradient for each argument and variable, as NumPy arrays in float32; of what has none zeros.
    """
    variables = [] if model is None else model.trainable_variables

    def penalty_of(gradients):
        return sum(ops.mean(ops.square(ops.cast(gradient, "float32"))) for gradient in gradients)

    if keras.backend.backend() == "jax":
        import jax

        others = [] if model is None else model.non_trainable_variables

        def penalty(arguments, values, rest):
            mapping = [*zip(variables, values, strict=True), *zip(others, rest, strict=True)]

            def number(*arguments):
                with keras.StatelessScope(state_mapping=mapping):
                    return function(*arguments)

            return penalty_of(jax.grad(number, argnums=tuple(range(len(arguments))))(*arguments))

        both = jax.grad(penalty, argnums=(0, 1))
        values, rest = ([variable.value for variable in group] for group in (variables, others))
        own, more = (jax.jit(both) if mode == "jit" else both)([jax.numpy.asarray(x) for x in arrays], values, rest)
        return [to_numpy(gradient) for gradient in (*own, *more)]
    import tensorflow as tf

    def both(*arguments):
        with tf.GradientTape() as outer:
            outer.watch(arguments)
            with tf.GradientTape() as inner:
                inner.watch(arguments)
                value = function(*arguments)
            penalty = penalty_of(inner.gradient(value, arguments, unconnected_gradients="zero"))
        return outer.gradient(penalty, [*arguments, *(v.value for v in variables)], unconnected_gradients="zero")

    gradients = _in_mode(both, mode)(*map(tf.convert_to_tensor, arrays))
    return [to_numpy(gradient) for gradient in gradients]


def directional(function, arrays, directions, mode="eager"):
    """The derivative of a function's result along a direction, by forward mode, as a NumPy array in float32."""
    if keras.backend.backend() == "jax":
        import jax

        def along(arrays, directions):
            def stateless(*arrays):
                with keras.StatelessScope():
                    return function(*arrays)

            return jax.jvp(stateless, arrays, directions)[1]

        given = [tuple(map(jax.numpy.asarray, each)) for each in (arrays, directions)]
        return to_numpy((jax.jit(along) if mode == "jit" else along)(*given))
    import tensorflow as tf

    def along(arguments, directions):
        with tf.autodiff.ForwardAccumulator(arguments, directions) as accumulator:
            result = function(*arguments)
        return accumulator.jvp(result, unconnected_gradients="zero")

    return to_numpy(_in_mode(along, mode)(*([tf.convert_to_tensor(x) for x in each] for each in (arrays, directions))))


def _in_mode(function, mode):
    import tensorflow as tf

    return function if mode == "eager" else tf.function(function, jit_compile=mode == "jit", autograph=False)


def distance(actual, exact):
    """How far arrays are from others, all together, in parts of the size of these."""
    actual, exact = (np.concatenate([np.ravel(np.asarray(x, "float64")) for x in each]) for each in (actual, exact))
    return float(np.linalg.norm(actual - exact) / np.linalg.norm(exact))


def to_numpy(x):
    return np.asarray(ops.convert_to_numpy(ops.cast(ops.convert_to_tensor(x), "float32")))
