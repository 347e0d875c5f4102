import keras
import numpy as np
import pytest
from keras import layers
from test_optimizer import MODES

import keras_mp

TENSORFLOW = keras.backend.backend() == "tensorflow"


def build(mode, loss_scale=None, model_class=keras.Model):
    inputs = keras.Input((4,))
    x = layers.Dropout(0.5)(layers.BatchNormalization()(layers.Dense(6)(inputs)))
    model = model_class(inputs, layers.Dense(1)(x))
    optimizer = keras_mp.LossScaleOptimizer(keras.optimizers.Adam(0.01), loss_scale)
    model.compile(optimizer, "mse", metrics=["mae"], weighted_metrics=["mse"], **MODES[mode])
    return model


def batch(bad=False):
    rng = np.random.default_rng()
    x, y = rng.normal(size=(8, 4)).astype("float32"), rng.normal(size=(8, 1)).astype("float32")
    return (np.full_like(x, np.inf) if bad else x), y


def values(variables):
    return {variable.path: keras.ops.convert_to_numpy(variable).copy() for variable in variables}


def is_seed(path):
    return path.endswith("seed_generator_state")


def assert_only_the_scale_moved(model, before, after):
    scaler = {id(variable) for variable in model.optimizer.state}
    free = {variable.path for variable in model.optimizer.variables if id(variable) in scaler}
    for path in before.keys() - free:
        if is_seed(path):
            assert not np.array_equal(before[path], after[path]), path
        else:
            np.testing.assert_array_equal(before[path], after[path], err_msg=path)


CASES = [
    pytest.param("jit", keras_mp.LossScale(), marks=pytest.mark.jax),
    pytest.param(
        "graph", keras_mp.LossScale.none(), marks=pytest.mark.skipif(not TENSORFLOW, reason="JAX has no graph")
    ),
]


@pytest.mark.parametrize("mode, loss_scale", CASES)
def test_a_skipped_step_changes_nothing_but_scale_and_seeds(mode, loss_scale):
    model = keras_mp.loss_scaling.atomic_skip(build(mode, loss_scale))
    model.train_on_batch(*batch())
    everything = [*model.variables, *model.metrics_variables, *model.optimizer.variables]
    before = values(everything)
    assert any("moving_mean" in path for path in before) and any(is_seed(path) for path in before)
    model.reset_metrics = lambda: None  # so that the metrics can be compared
    model.train_on_batch(*batch(bad=True))
    after = values(everything)
    assert_only_the_scale_moved(model, before, after)
    assert int(model.optimizer.skipped_steps) == 1
    for path, value in after.items():
        assert np.isfinite(value).all(), path
    logs = model.train_on_batch(*batch(), return_dict=True)
    assert np.isfinite(list(logs.values())).all()
    assert not all(np.array_equal(after[v.path], v.numpy()) for v in model.trainable_variables)


def test_without_it_a_forward_overflow_ruins_the_moving_statistics():
    model = build("eager")
    model.train_on_batch(*batch(bad=True))
    assert not np.isfinite(model.layers[2].moving_mean.numpy()).all()


def test_twice_is_once_and_recompiling_keeps_it():
    model = build("eager")
    assert keras_mp.loss_scaling.atomic_skip(keras_mp.loss_scaling.atomic_skip(model)) is model
    model.compile(keras_mp.LossScaleOptimizer(keras.optimizers.SGD()), "mse", run_eagerly=True)
    model.train_on_batch(*batch(bad=True))
    assert np.isfinite(model.layers[2].moving_mean.numpy()).all()


def test_an_optimizer_that_does_not_check_is_refused():
    model = build("eager")
    keras_mp.loss_scaling.atomic_skip(model)
    model.compile("sgd", "mse", run_eagerly=True)
    for action in (lambda: keras_mp.loss_scaling.atomic_skip(model), lambda: model.train_on_batch(*batch())):
        with pytest.raises(ValueError, match=r"optimizer \(SGD\), none says whether it skipped.*LossScale.none"):
            action()
    with pytest.raises(ValueError, match="not compiled with an optimizer yet"):
        keras_mp.loss_scaling.atomic_skip(keras.Sequential([layers.Dense(1)]))


@pytest.mark.jax
def test_a_metric_may_return_a_number_of_pythons():
    class Steps(keras.metrics.Metric):
        def update_state(self, y_true, y_pred, sample_weight=None):
            pass

        def result(self):
            return 0.5

    model = keras.Sequential([keras.Input((4,)), layers.Dense(1)])
    model.compile(keras_mp.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=8.0), "mse", metrics=[Steps()])
    keras_mp.loss_scaling.atomic_skip(model)
    history = model.fit(np.ones((4, 4)), np.ones((4, 1)), verbose=0).history
    assert history["steps"] == [0.5] and np.isfinite(history["loss"][0])
