"""The logs of an epoch in which every step was skipped: nothing was counted, and nothing may look good."""

import warnings

import keras
import numpy as np
import pytest

import keras_mp

TENSORFLOW = keras.backend.backend() == "tensorflow"
pytestmark = pytest.mark.jax


def model_and_data(scale=2.0**126):
    rng = np.random.default_rng()
    scale = keras_mp.LossScale(initial_scale=scale, max_scale=scale)
    model = keras.Sequential([keras.Input((4,)), keras.layers.BatchNormalization(), keras.layers.Dense(1)])
    optimizer = keras_mp.LossScaleOptimizer(keras.optimizers.SGD(0.01), scale)
    model.compile(optimizer, "mse", metrics=["mae"])
    x = rng.normal(size=(24, 4)).astype("float32")
    return keras_mp.loss_scaling.atomic_skip(model), x, 100 * x[:, :1]


def test_an_epoch_without_a_step_is_nan_with_one_warning():
    model, x, y = model_and_data()
    x[:] = np.nan
    with pytest.warns(UserWarning, match="all steps were skipped.*PrecisionMonitor.*NonFiniteFinder") as told:
        history = model.fit(x, y, batch_size=8, epochs=1, verbose=0).history
    assert len([w for w in told if "all steps were skipped" in str(w.message)]) == 1
    assert np.isnan(history["loss"]).all() and np.isnan(history["mae"]).all()


def test_the_first_steps_show_their_own_finite_loss_until_one_counts():
    """A scale of 2^126 overflows the gradients of finite losses: so does a healthy float16 training begin."""
    model, x, y = model_and_data()
    each = []
    log = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: each.append(dict(logs)))
    model.fit(x[:8], y[:8], batch_size=8, verbose=0)
    own = model.evaluate(x[:8], y[:8], verbose=0)[0]
    assert int(model.optimizer.skipped_steps) == 1 and np.isfinite(own)
    stop = keras.callbacks.TerminateOnNaN()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.fit(x, y, batch_size=8, epochs=4, verbose=0, shuffle=False, callbacks=[log, stop])
    assert len(each) == 12 and all(np.isfinite(list(logs.values())).all() for logs in each)
    skipped = int(model.optimizer.skipped_steps)
    assert 1 < skipped < 13 and (each[0]["loss"] != each[1]["loss"])  # other rows, and not a mean of both


def test_steps_that_count_are_the_epoch_s_mean():
    model, x, y = model_and_data(scale=2.0**10)
    x[8:16] = np.inf
    model.optimizer.learning_rate = 0.0
    outputs = [keras.ops.convert_to_numpy(model(part, training=True)) for part in (x[:8], x[16:])]
    expected = np.mean([np.mean((out - target) ** 2) for out, target in zip(outputs, (y[:8], y[16:]), strict=True)])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        history = model.fit(x, y, batch_size=8, verbose=0, shuffle=False).history
    np.testing.assert_allclose(history["loss"], expected, rtol=1e-5)


class Zero(keras.metrics.Metric):
    """The number of values above a limit that none reaches: rightly 0."""

    def __init__(self, name="above"):
        super().__init__(name=name)
        self.total = self.add_weight(name="total", initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.total.assign_add(keras.ops.sum(keras.ops.cast(y_pred > 1e6, "float32")))

    def result(self):
        return keras.ops.convert_to_tensor(self.total)


class OwnStep(keras.Model):
    """A step of one's own, whose logs are all of the model's metrics; Keras's loss tracker counts nothing."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)
        self.above, self.rows = Zero(), keras.metrics.Sum(name="rows")

    def call(self, x):
        return self.dense(x)

    def build(self, shape):
        self.dense.build(shape)
        self.built = True

    def logs(self):
        return {metric.name: metric.result() for metric in self.metrics if metric.name != "compile_metrics"}

    def count(self, x, y):
        self.above.update_state(x, y)
        self.rows.update_state(keras.ops.ones(keras.ops.shape(y)[0]))

    if TENSORFLOW:

        def train_step(self, data):
            import tensorflow as tf

            with tf.GradientTape() as tape:
                y = self(data[0], training=True)
                loss = self.optimizer.scale_loss(keras.ops.mean(keras.ops.cast(y, "float32") ** 2))
            self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
            self.count(data[0], y)
            return self.logs()

        def test_step(self, data):
            self.count(data[0], self(data[0]))
            return self.logs()

    else:

        def _counted(self, metrics, x, y):
            mapping = list(zip(self.metrics_variables, metrics, strict=True))
            with keras.StatelessScope(state_mapping=mapping) as scope:
                self.count(x, y)
                logs = self.logs()
            return logs, [scope.get_current_value(variable) for variable in self.metrics_variables]

        def train_step(self, state, data):
            import jax

            trainable, passive, optimizer, metrics = state

            def loss_of(trainable):
                y, _ = self.stateless_call(trainable, passive, data[0])
                mapping = list(zip(self.optimizer.variables, optimizer, strict=True))
                with keras.StatelessScope(state_mapping=mapping):
                    return self.optimizer.scale_loss(keras.ops.mean(keras.ops.cast(y, "float32") ** 2)), y

            gradients, y = jax.grad(loss_of, has_aux=True)(trainable)
            trainable, optimizer = self.optimizer.stateless_apply(optimizer, gradients, trainable)
            logs, metrics = self._counted(metrics, data[0], y)
            return logs, (trainable, passive, optimizer, metrics)

        def test_step(self, state, data):
            trainable, passive, metrics = state
            y, _ = self.stateless_call(trainable, passive, data[0])
            logs, metrics = self._counted(metrics, data[0], y)
            return logs, (trainable, passive, metrics)


def own_model_and_data():
    model = OwnStep()
    model.build((None, 4))
    model.compile(keras_mp.LossScaleOptimizer(keras.optimizers.SGD(0.01), initial_scale=8.0))
    return keras_mp.loss_scaling.atomic_skip(model), np.random.default_rng().normal(size=(24, 4)).astype("float32")


def test_a_metric_that_is_rightly_0_is_0_in_fit_and_evaluate():
    model, x = own_model_and_data()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        history = model.fit(x, x, batch_size=8, epochs=2, validation_data=(x[:8], x[:8]), verbose=0).history
        evaluated = model.evaluate(x, x, batch_size=8, verbose=0, return_dict=True)
    assert history["above"] == history["val_above"] == [0.0, 0.0] and evaluated["above"] == 0.0
    assert history["rows"] == [24.0, 24.0] and history["val_rows"] == [8.0, 8.0] and evaluated["rows"] == 24.0
    assert history["loss"] == [0.0, 0.0]  # what Keras says of a tracker that the step does not update
    assert int(model.optimizer.skipped_steps) == 0


def test_a_skipped_step_among_others_shows_what_counts():
    """Rows 8 to 15 overflow: the logs of that step are those of the step before, though a metric there is 0."""
    model, x = own_model_and_data()
    x[8:16] = np.inf
    seen = []
    log = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(dict(logs)))
    history = model.fit(x, x, batch_size=8, shuffle=False, verbose=0, callbacks=[log]).history
    assert [float(logs["rows"]) for logs in seen] == [8.0, 8.0, 16.0] and history["rows"] == [16.0]
    assert [float(logs["above"]) for logs in seen] == [0.0, 0.0, 0.0] and int(model.optimizer.skipped_steps) == 1
