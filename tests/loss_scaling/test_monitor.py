import warnings

import keras
import numpy as np
import pytest
from keras import layers

import keras_mp


def build(loss_scale=None, inner=None, policy="float32", run_eagerly=True, **settings):
    model = keras.Sequential(
        [keras.Input((2,)), layers.Dense(1, use_bias=False, kernel_initializer="ones", dtype=policy)]
    )
    optimizer = keras_mp.LossScaleOptimizer(inner or keras.optimizers.SGD(0.0), loss_scale, **settings)
    model.compile(optimizer, loss=lambda _, y: y, run_eagerly=run_eagerly)  # the gradient is the mean of x
    return model


def fit(model, rows, *callbacks, epochs=1, verbose=0, **settings):
    x = np.array(rows, "float32")
    monitor = keras_mp.PrecisionMonitor(**settings)
    return model.fit(
        x, x[:, :1], batch_size=1, shuffle=False, verbose=verbose, epochs=epochs, callbacks=[monitor, *callbacks]
    ).history


GOOD, BAD = [3.0, 4.0], [np.inf, 0.0]


@pytest.mark.jax
def test_history_has_scale_skips_norm_and_underflow():
    inner = keras.optimizers.SGD(0.0, global_clipnorm=1.0)
    history = fit(build(inner=inner, run_eagerly=False), [GOOD, BAD, GOOD], epochs=2)
    assert history["loss_scale"] == [2.0**14, 2.0**13]
    assert history["skipped_steps"] == [1, 2]
    assert history["gradient_norm"] == [5.0, 5.0]  # as it is before clipping
    assert history["gradient_underflow"] == [0.0, 0.0]


def test_underflow_is_the_share_of_nonzero_values_below_the_normal_range_of_float16():
    scale = keras_mp.LossScale.static(2.0**10)
    assert fit(build(scale), [[2.0**-25, 2.0**-24]])["gradient_underflow"] == [0.5]
    assert fit(build(scale), [[2.0**-25, 0.0]])["gradient_underflow"] == [1.0]
    assert fit(build(scale), [[2.0**-24, 0.0]])["gradient_underflow"] == [0.0]


def test_gradients_are_not_measured_when_not_asked_for():
    assert fit(build(), [GOOD], measure_gradients=False).keys() == {"loss", "loss_scale", "skipped_steps"}


def test_the_norm_is_that_of_the_mean_of_micro_batches():
    inner = keras.optimizers.SGD(0.0, gradient_accumulation_steps=2)
    assert fit(build(inner=inner), [[3.0, 0.0], [3.0, 8.0]])["gradient_norm"] == [5.0]


def test_a_few_skips_at_the_start_are_calibration(capsys):
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        fit(build(), [BAD, BAD, GOOD, GOOD], epochs=2)
    said = capsys.readouterr().out
    for scales in ("32768 to 8192", "8192 to 2048"):
        assert f"2 steps skipped in this epoch while the loss scale went from {scales}" in said


def test_too_many_in_a_row_are_a_failure():
    with pytest.warns(
        UserWarning, match="3 steps in a row were skipped, and the loss scale is 4096.*No loss scale helps"
    ):
        fit(build(), [GOOD, BAD, BAD, BAD, BAD], max_consecutive_skips=3)
    model = build()
    with pytest.raises(FloatingPointError, match="3 steps in a row were skipped"):
        fit(model, [BAD, BAD, BAD, BAD, GOOD], max_consecutive_skips=3, on_limit="raise")
    assert int(model.optimizer.skipped_steps) == 3


def test_skips_that_are_not_in_a_row_are_no_failure():
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        fit(build(), [BAD, BAD, GOOD] * 3, max_consecutive_skips=3, on_limit="raise")


class Batches(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.skipped = []

    def on_train_batch_end(self, batch, logs=None):
        self.skipped.append(logs["skipped_steps"])


def test_between_two_reads_the_logs_have_the_last_values():
    seen = Batches()
    history = fit(build(), [BAD, GOOD, BAD, GOOD, GOOD, BAD, BAD], seen, epochs=2, every=3)
    assert seen.skipped == [0, 0, 2, 2, 2, 3, 3, 4, 4, 6, 6, 6, 7, 7]
    assert history["skipped_steps"] == [4, 8]
    with pytest.warns(UserWarning, match="5 steps in a row were skipped"):
        fit(build(), [GOOD, BAD, BAD, BAD, BAD, BAD, GOOD], every=3, max_consecutive_skips=4)


def test_epochs_shorter_than_every_are_judged_at_their_end():
    with pytest.raises(FloatingPointError, match="8 steps in a row were skipped"):
        fit(build(), [BAD] * 4, every=20, epochs=3, max_consecutive_skips=5, on_limit="raise")


def test_a_step_that_was_read_is_not_judged_again_at_the_end_of_the_epoch():
    scale = keras_mp.LossScale(initial_scale=2.0, min_scale=1.0, hysteresis=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        fit(build(scale), [GOOD, BAD], every=2)  # it overflowed on the way to the floor, and not there


def test_an_overflow_at_the_floor_is_a_failure():
    scale = keras_mp.LossScale(initial_scale=2.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        fit(build(scale), [BAD, GOOD])  # reaches the floor
    with pytest.warns(UserWarning, match="while the loss scale was at its floor, 1"):
        fit(build(scale), [BAD, GOOD, BAD])


@pytest.mark.parametrize(
    ("loss_scale", "releases", "says"),
    [
        (keras_mp.LossScale.static(8.0), False, "a step overflowed while the loss scale was constant, 8"),
        (keras_mp.LossScale.none(), False, "a gradient was not finite, the step was skipped, and nothing scales"),
        (keras_mp.LossScale.none(), True, "a gradient was not finite, its weight stayed as it was, and nothing scales"),
    ],
    ids=["static", "none", "released"],
)
def test_an_overflow_that_no_scale_answers_is_a_failure(loss_scale, releases, says, capsys):
    with pytest.warns(UserWarning, match=says):
        fit(build(loss_scale, release_gradients=releases), [GOOD, BAD, GOOD])
    assert "That is normal" not in capsys.readouterr().out


class Adversarial(keras.Model):
    """Two networks with an optimizer each, as in Keras's examples; their gradients are the mean of what they read."""

    def __init__(self, wrap):
        super().__init__()
        networks = [layers.Dense(1, use_bias=False, kernel_initializer="ones", dtype="float32") for _ in range(2)]
        self.generator, self.discriminator = networks
        self.generator_optimizer, self._d_optimizer = (wrap(keras.optimizers.SGD(0.0)) for _ in networks)

    def call(self, x):
        return self.generator(x) + self.discriminator(x)

    def apply(self, of_generator, of_discriminator):
        self.generator_optimizer.apply([of_generator], self.generator.trainable_variables)
        self._d_optimizer.apply([of_discriminator], self.discriminator.trainable_variables)

    def train_step(self, data):
        x, *_ = keras.utils.unpack_x_y_sample_weight(data)
        self.apply(keras.ops.transpose(x), keras.ops.ones((2, 1)))
        return {"mean": keras.ops.mean(x)}


def adversarial(wrap=keras_mp.LossScaleOptimizer):
    model = Adversarial(wrap)
    model(np.zeros((1, 2), "float32"))
    model.compile(run_eagerly=True)  # compile() itself is given no optimizer
    for optimizer, network in ((model.generator_optimizer, model.generator), (model._d_optimizer, model.discriminator)):
        optimizer.build(network.trainable_variables)
    return model


def test_a_model_with_two_optimizers_is_watched_in_both():
    model, monitor = adversarial(), keras_mp.PrecisionMonitor(max_consecutive_skips=2)
    monitor.set_model(model)
    monitor.on_train_begin()
    monitor.on_epoch_begin(0)
    logs = {}
    scale = 2.0**15
    for batch, value in enumerate([1.0, np.inf]):
        model.apply(keras.ops.full((2, 1), scale), keras.ops.full((2, 1), scale * value))
        monitor.on_train_batch_end(batch, logs)
    assert (logs["generator_optimizer_loss_scale"], logs["d_optimizer_loss_scale"]) == (2.0**15, 2.0**14)
    assert (logs["generator_optimizer_skipped_steps"], logs["d_optimizer_skipped_steps"]) == (0, 1)
    assert logs["generator_optimizer_gradient_norm"] == pytest.approx(2**0.5)
    with pytest.warns(UserWarning, match="d_optimizer: 2 steps in a row were skipped"):
        model.apply(keras.ops.ones((2, 1)), keras.ops.full((2, 1), np.inf))
        monitor.on_train_batch_end(2, logs)


def test_two_optimizers_whose_names_differ_by_an_underscore_have_keys_of_their_own():
    model = keras.Model()
    model.opt, model._opt = (keras_mp.LossScaleOptimizer(keras.optimizers.SGD(0.0)) for _ in range(2))
    monitor, logs = keras_mp.PrecisionMonitor(), {}
    for optimizer, scale in ((model.opt, 2.0**10), (model._opt, 2.0**12)):
        optimizer.build([])
        optimizer.dynamic_scale.assign(scale)
    monitor.set_model(model)
    monitor.on_train_begin()
    monitor.on_epoch_begin(0)
    monitor.on_train_batch_end(0, logs)
    assert (logs["opt_loss_scale"], logs["_opt_loss_scale"]) == (2.0**10, 2.0**12)


def test_two_optimizers_of_which_none_scales_are_named():
    model = adversarial(lambda optimizer: optimizer)
    model.generator.dtype_policy = "mixed_float16"
    with pytest.raises(ValueError, match=r"LossScaleOptimizer.* are generator_optimizer \(SGD\), d_optimizer \(SGD\)"):
        keras_mp.PrecisionMonitor().set_model(model)


def test_scaling_a_bfloat16_model_is_told_to_be_needless():
    model = build(policy="mixed_bfloat16")
    with pytest.warns(UserWarning, match="computes in bfloat16.*scaling the loss gains nothing"):
        fit(model, [GOOD])
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        fit(build(keras_mp.LossScale.none(), policy="mixed_bfloat16"), [GOOD])


def test_bad_arguments_are_refused():
    for settings in ({"max_consecutive_skips": 0}, {"max_consecutive_skips": 2.5}, {"every": 0}, {"on_limit": "stop"}):
        with pytest.raises(ValueError, match=next(iter(settings))):
            keras_mp.PrecisionMonitor(**settings)
    model = build(policy="mixed_float16")
    model.compile("sgd", "mse", run_eagerly=True, auto_scale_loss=False)
    with pytest.raises(ValueError, match=r"the optimizers of model .* are optimizer \(SGD\)"):
        fit(model, [GOOD])


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
def test_where_nothing_scales_the_loss_the_logs_say_so(policy, capsys):
    model = build(policy=policy)
    keras_mp.prepare(model, keras.optimizers.SGD(0.0), loss=lambda _, y: y)
    history = fit(model, [GOOD, GOOD], epochs=2)
    assert history["loss_scale"] == [1.0, 1.0] and history["skipped_steps"] == [0, 0]
    assert "gradient_norm" not in history
    assert "nothing scales the loss, and no step is skipped: loss_scale is 1" in capsys.readouterr().out
