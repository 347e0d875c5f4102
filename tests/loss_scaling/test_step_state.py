"""Variables that no list of a model has, after a step that was skipped."""

import keras
import numpy as np
import pytest
from keras import layers, ops
from test_optimizer import MODES

import keras_mp

TENSORFLOW = keras.backend.backend() == "tensorflow"


def variable(**keywords):
    return keras.Variable(1.0, dtype="float32", **keywords)


def follow(state, x):
    state.assign(0.9 * state + 0.1 * ops.mean(ops.abs(ops.cast(x, "float32"))))


class Loss(keras.losses.Loss):
    def __init__(self):
        super().__init__()
        self.state = variable()  # of which Keras says that it is trainable, unless it is told otherwise

    def call(self, y_true, y_pred):
        error = ops.mean(ops.square(y_true - ops.cast(y_pred, "float32")), axis=-1)
        follow(self.state, error)
        return error / ops.stop_gradient(self.state)


class Plain:
    def __init__(self):
        self.state = variable()


class Layer(layers.Layer):
    def __init__(self, state, **keywords):
        super().__init__(**keywords)
        self.held = [{"in a list": state}]

    def call(self, inputs):
        state = self.held[0]["in a list"]
        follow(state.state if isinstance(state, Plain) else state, inputs)
        return inputs


class Regularizer(keras.regularizers.Regularizer):
    def __init__(self):
        self.state = variable(trainable=False)

    def __call__(self, x):
        follow(self.state, x)
        return 1e-6 * ops.sum(x)


of_this_module = variable(trainable=False)


def loss_with_global_state(y_true, y_pred):
    follow(of_this_module, y_pred)
    return ops.mean(ops.square(y_true - ops.cast(y_pred, "float32")), axis=-1)


def closed_over():
    state = variable(trainable=False)

    def loss(y_true, y_pred):
        follow(state, y_pred)
        return ops.mean(ops.square(y_true - ops.cast(y_pred, "float32")), axis=-1)

    return loss, state


def native():
    import tensorflow as tf

    return tf.Variable(1.0, trainable=False)


def model_with(kind, mode):
    """A model with state of a kind, and a function that reads the state."""
    plain, loss, regularizer = Plain(), "mse", None
    layer = layers.Identity()
    state, metrics = None, []
    if kind == "loss":
        loss = Loss()
        state = loss.state
    elif kind == "function":
        loss, state = closed_over()
    elif kind == "module":
        of_this_module.assign(1.0)
        loss, state = loss_with_global_state, of_this_module
    elif kind == "regularizer":
        regularizer = Regularizer()
        state = regularizer.state
    elif kind == "object":
        layer, state = Layer(plain), plain.state
    elif kind == "native":
        state = native()
        layer = Layer(state)
    elif kind == "metric":
        metrics = [keras.metrics.MeanAbsoluteError()]
        state = metrics[0].total
    inputs = keras.Input((4,))
    x = layer(layers.Dense(3, activity_regularizer=regularizer)(inputs))
    model = keras.Model(inputs, layers.Dense(1)(x))
    # Without slots: whose creation would trace the step twice, the second time with metrics that are built.
    optimizer = keras_mp.LossScaleOptimizer(keras.optimizers.SGD(0.01), keras_mp.LossScale())
    model.compile(optimizer, loss, metrics=metrics, **MODES[mode])
    return keras_mp.loss_scaling.atomic_skip(model), state


KINDS = ["loss", "function", "module", "regularizer", "object", "metric"]
# How a state is seen does not depend on the mode, and how it is given back not on the kind: on TensorFlow each once.
CASES = [
    *(
        pytest.param(kind, "graph" if TENSORFLOW and index % 2 else "jit", marks=pytest.mark.jax)
        for index, kind in enumerate(KINDS)
    ),
    pytest.param("native", "graph", marks=pytest.mark.skipif(not TENSORFLOW, reason="a variable of TensorFlow")),
]


@pytest.mark.parametrize("kind, mode", CASES)
def test_a_skipped_step_gives_back_what_no_list_of_the_model_has(kind, mode):
    model, state = model_with(kind, mode)
    x, y = np.random.default_rng().random((2, 16, 4)).astype("float32")
    bad = x.copy()
    bad[8:] = np.inf
    model.fit(x[:8], y[:8, :1], batch_size=8, verbose=0)
    history = model.fit(bad, y[:, :1], batch_size=8, shuffle=False, verbose=0).history
    assert int(model.optimizer.skipped_steps) == 1
    after = float(ops.convert_to_numpy(state))
    assert np.isfinite(after)
    assert np.isfinite([values[0] for values in history.values()]).all()
    # On JAX, Keras itself changes nothing that it does not list.
    assert after != 1.0 or not TENSORFLOW
    assert all(np.isfinite(ops.convert_to_numpy(weight)).all() for weight in model.trainable_variables)
    history = model.fit(x[:8], y[:8, :1], batch_size=8, verbose=0).history
    assert int(model.optimizer.skipped_steps) == 1 and np.isfinite(history["loss"]).all()


@pytest.mark.skipif(not TENSORFLOW, reason="a variable of TensorFlow")
def test_a_step_jitted_for_an_accelerator_gives_it_back_too(monkeypatch):
    monkeypatch.setattr("keras_mp.optimizer._tensorflow._is_jitted_for_an_accelerator", lambda: True)
    test_a_skipped_step_gives_back_what_no_list_of_the_model_has("native", "jit")
