"""A model with several optimizers, as a GAN has: each scales its loss, and a step is made by all of them or by none."""

import keras
import numpy as np
import pytest
from keras import layers, ops

import keras_mp

TENSORFLOW = keras.backend.backend() == "tensorflow"


class Two(keras.Model):
    """Two parts that share a loss, each trained by an optimizer of its own."""

    def __init__(self, unit=1.0, policy="mixed_float16"):
        super().__init__()
        self.first = layers.Dense(8, "relu", dtype=policy)
        self.norm = layers.BatchNormalization(dtype="float32")
        self.second = layers.Dense(1, dtype=policy)
        self.tracker, self.unit = keras.metrics.Mean(name="loss"), unit

    def call(self, x, training=False):
        return self.second(self.norm(self.first(x), training=training))

    def compile(self, first_optimizer, second_optimizer, **arguments):
        super().compile(**arguments)
        self.first_optimizer, self.second_optimizer = first_optimizer, second_optimizer

    @property
    def metrics(self):
        return [self.tracker]

    def train_step(self, data):
        import tensorflow as tf

        x, y = data
        first, second = self.first.trainable_variables, self.second.trainable_variables
        with tf.GradientTape(persistent=True) as tape:
            loss = ops.mean(ops.square(y - ops.cast(self(x, training=True), "float32"))) * self.unit
            of_first = self.first_optimizer.scale_loss(loss)
            of_second = self.second_optimizer.scale_loss(loss)
        self.first_optimizer.apply(tape.gradient(of_first, first), first)
        self.second_optimizer.apply(tape.gradient(of_second, second), second)
        self.tracker.update_state(loss / self.unit)
        return {"loss": self.tracker.result()}


def adam():
    return keras.optimizers.Adam(1e-2, epsilon=1e-12)


def data():
    x = np.random.default_rng().normal(size=(128, 6)).astype("float32")
    return x, x.sum(axis=1, keepdims=True)


def losses(policy, x, y, weights=None):
    model = Two(1e-7, policy)
    model(x[:1])
    if weights is not None:
        model.set_weights(weights)
    weights = model.get_weights()
    keras_mp.prepare(model, None, first_optimizer=adam(), second_optimizer=adam())
    return weights, model, model.fit(x, y, epochs=4, shuffle=False, verbose=0).history["loss"]


@pytest.mark.skipif(not TENSORFLOW, reason="on JAX a step of fit has the variables of one optimizer")
@pytest.mark.filterwarnings("ignore:stabilize")
def test_gradients_below_float16_train_as_in_float32():
    x, y = data()
    weights, _, expected = losses("float32", x, y)
    _, model, actual = losses("mixed_float16", x, y, weights)
    np.testing.assert_allclose(actual, expected, rtol=5e-3)
    assert all(isinstance(o, keras_mp.LossScaleOptimizer) for o in (model.first_optimizer, model.second_optimizer))
    assert int(model.second_optimizer.inner_optimizer.iterations) == 16


@pytest.mark.skipif(not TENSORFLOW, reason="on JAX a step of fit has the variables of one optimizer")
@pytest.mark.filterwarnings("ignore:stabilize")
@pytest.mark.parametrize("mode", [{}, {"run_eagerly": True}, {"jit_compile": True}])
def test_where_one_skips_the_others_step_is_undone(mode):
    """The scale of the second overflows: the first has made its update by then, in its very first step, too."""
    x, y = data()
    model = Two()
    model(x[:1])
    optimizers = [
        keras_mp.LossScaleOptimizer(adam(), initial_scale=scale, max_scale=scale) for scale in (8.0, 2.0**126)
    ]
    keras_mp.prepare(model, None, first_optimizer=optimizers[0], second_optimizer=optimizers[1], **mode)
    before = model.get_weights()
    model.fit(x, y, batch_size=128, verbose=0)
    assert [int(optimizer.skipped_steps) for optimizer in optimizers] == [0, 1]
    np.testing.assert_equal(model.get_weights(), before)  # the moving statistics among them
    inner = optimizers[0].inner_optimizer
    assert int(inner.iterations) == 0 and int(optimizers[0].step_counter) == 1
    assert all(not np.any(slot.numpy()) for slot in inner._momentums)
    optimizers[1].dynamic_scale.assign(8.0)
    model.fit(x, y, batch_size=128, verbose=0)
    assert int(inner.iterations) == 1 and not np.array_equal(model.get_weights()[0], before[0])


@pytest.mark.jax
@pytest.mark.filterwarnings("ignore:stabilize")
def test_optimizers_that_do_not_scale_in_float16_are_refused_by_name():
    class Holds(layers.Dense):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.own = [adam()]

    model = keras.Sequential([keras.Input((6,)), Holds(4, dtype="mixed_float16", name="holder"), layers.Dense(1)])
    with pytest.raises(ValueError, match=r"own code made do not scale the loss: holder_own_0 \(Adam\)\. Make each"):
        keras_mp.prepare(model, "adam", "mse")


@pytest.mark.skipif(not TENSORFLOW, reason="on JAX a step of fit has the variables of one optimizer")
def test_the_default_of_compile_is_not_named():
    model = Two()
    model(np.zeros((1, 6), "float32"))
    model.compile(adam(), keras.optimizers.SGD())
    with pytest.raises(ValueError) as error:
        keras_mp.loss_scaling.atomic_skip(model)
    assert "first_optimizer (Adam) and second_optimizer (SGD), none says" in str(error.value)
    assert "RMSprop" not in str(error.value)
