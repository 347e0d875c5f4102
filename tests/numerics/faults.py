"""Small models with one fault each."""

import keras
import numpy as np
from keras import layers, ops
from zoo import normal as normal

import keras_mp
from keras_mp.numerics.ranges import Range


def measure(x, name, scale=1.0):
    values = Range({name: scale})
    values.update(x)
    return values.loss(name)


@keras.saving.register_keras_serializable("faults")
class Norm(layers.Layer):
    """Adds the norm, whose derivative at 0 divides by zero."""

    def call(self, x):
        return x + ops.sqrt(ops.sum(x * x, -1, keepdims=True))


def compiled(model, optimizer="sgd", loss="mse"):
    model.compile(optimizer, loss=loss)
    return model


def sequential(*middle, features=8, dtype=None, optimizer="sgd"):
    model = keras.Sequential([keras.Input((features,)), *middle, layers.Dense(1, dtype="float32", name="head")])
    return compiled(model, optimizer)


def large_activations(dtype="float32"):
    """The middle layer's activations reach 70,000; the layer behind it takes float32."""
    model = sequential(
        layers.Dense(8, dtype=dtype, name="first"),
        layers.Dense(8, dtype=dtype, name="large", kernel_initializer="zeros"),
        layers.LayerNormalization(dtype="float32", name="normalization"),
    )
    bias = np.zeros(8, "float32")
    bias[3] = 70_000
    model.get_layer("large").bias.assign(bias)
    return model, (normal(16, 8), normal(16, 1))


def large_logits(dtype="float32"):
    """A softmax over logits of 1e5."""
    model = sequential(layers.Softmax(dtype=dtype, name="softmax"), layers.Dense(4, dtype=dtype, name="dense"))
    return model, (1e5 * np.sign(normal(16, 8)), normal(16, 1))


@keras.saving.register_keras_serializable("faults")
class Brake(layers.Layer):
    """Hands its input on, and back only a small part of the gradient."""

    def call(self, x):
        fixed = ops.stop_gradient(x)
        return fixed + 1e-8 * (x - fixed)


def small_gradients():
    """The gradients of layer "small" are of size 1e-9, those of the others of size 0.1."""
    inputs = keras.Input((8,))
    small = Brake(name="brake")(layers.Dense(8, name="small")(inputs))
    large = layers.Dense(8, name="large")(inputs)
    outputs = layers.Dense(1, name="head")(layers.Add(name="add")([small, large]))
    return compiled(keras.Model(inputs, outputs)), (normal(16, 8), normal(16, 1))


def nan_weight(dtype="float32"):
    model = sequential(layers.Dense(8, dtype=dtype, name="first"), layers.Dense(8, dtype=dtype, name="second"))
    kernel = normal(8, 8)
    kernel[2, 5] = np.nan
    model.get_layer("second").kernel.assign(kernel)
    return model, (normal(16, 8), normal(16, 1))


def nan_record(dtype="float32"):
    model = sequential(layers.Dense(8, dtype=dtype, name="first"))
    x = normal(64, 8)
    x[37, 4] = np.nan
    return model, (x, normal(64, 1))


def infinite_label(dtype="float32"):
    model, (x, y) = healthy(dtype)
    y[3] = np.inf
    return model, (x, y)


def backward_only(dtype="float32"):
    """A division by zero in the backward pass: record 5 makes the norm's argument zero."""
    model = sequential(
        layers.Dense(8, dtype=dtype, name="first", use_bias=False),
        Norm(dtype=dtype, name="norm"),
        layers.Dense(8, dtype=dtype, name="second"),
    )
    x = normal(16, 8)
    x[5] = 0.0
    return model, (x, normal(16, 1))


def scale_only():
    """Gradients that float16 holds, but not times 2**15."""
    optimizer = keras_mp.LossScaleOptimizer(keras.optimizers.SGD(1e-3), initial_scale=2.0**15)
    model = sequential(layers.Dense(8, dtype="mixed_float16", name="first"), optimizer=optimizer)
    return model, (normal(16, 8), 1e3 * (1 + np.abs(normal(16, 1))))


def healthy(dtype="float32"):
    model = sequential(
        layers.Dense(8, activation="relu", dtype=dtype, name="first"), layers.Dense(8, dtype=dtype, name="second")
    )
    return model, (normal(16, 8), normal(16, 1))


def normalized(dtype, overflowing):
    """Three dense layers with a BatchNormalization behind each; the kernel of one makes sums past float16."""
    middle = []
    for place in range(3):
        normalization = layers.BatchNormalization(dtype=dtype, name=f"normalization{place}")
        middle += [layers.Dense(8, dtype=dtype, name=f"dense{place}"), normalization]
    model = sequential(*middle)
    model.get_layer(f"dense{overflowing}").kernel.assign(4e4 * np.sign(normal(8, 8)))
    return model, (normal(16, 8), normal(16, 1))


def first_overflow(model, x):
    """The dense layer of `normalized` whose sums float16 cannot hold, by NumPy in float64, rounded after each layer."""
    x = x.astype("float16").astype("float64")
    for place in range(3):
        dense, normalization = (model.get_layer(f"{name}{place}") for name in ("dense", "normalization"))
        x = x @ np.asarray(dense.kernel).astype("float16").astype("float64") + np.asarray(dense.bias)
        if np.abs(x).max() > 65504:
            return dense.name
        x = (x - x.mean(0)) / np.sqrt(x.var(0) + normalization.epsilon)
        x = x.astype("float16").astype("float64")
    return None
