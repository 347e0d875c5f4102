"""A compiled model whose optimizer gets other states: the rest of what it was compiled with stays."""

import keras
import numpy as np
import pytest

import keras_mp

ROWS, WIDTH = 16, 64


def model(optimizer=None, **arguments):
    layers = [keras.Input((WIDTH,)), keras.layers.Dense(WIDTH, "tanh"), keras.layers.Dense(WIDTH)]
    built = keras.Sequential(layers)
    built.compile(optimizer or keras.optimizers.AdamW(0.01), "mse", run_eagerly=True, **arguments)
    return built


def data():
    rng = np.random.default_rng()
    return tuple(rng.normal(size=(ROWS, WIDTH)).astype("float32") for _ in range(2))


def stored(optimizer):
    """The dtypes of the variables of a matrix's shape."""
    return {str(variable.dtype) for variable in optimizer.variables if tuple(variable.shape) == (WIDTH, WIDTH)}


def test_it_trains_as_a_model_compiled_with_such_an_optimizer():
    x, y = data()
    by_hand = model(
        keras_mp.LossScaleOptimizer(keras.optimizers.AdamW(0.01), keras_mp.LossScale.none(), state_dtype="float8")
    )
    ours = model(metrics=["mae"])
    ours.set_weights(by_hand.get_weights())
    before = ours.optimizer
    assert keras_mp.loss_scaling.change_optimizer(ours, state_dtype="float8") is ours
    assert not before.built
    for trained in (by_hand, ours):
        for _ in range(3):
            logs = trained.train_on_batch(x, y, return_dict=True)
    assert stored(ours.optimizer) == {"float8_e4m3fn"} and "mae" in logs
    for one, other in zip(by_hand.variables, ours.variables, strict=False):
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes(), one.path


def test_an_optimizer_that_scales_the_loss_keeps_its_settings():
    scaled = keras_mp.LossScaleOptimizer(keras.optimizers.Lion(0.5), keras_mp.LossScale.static(8.0), rounding_seed=3)
    ours = keras_mp.loss_scaling.change_optimizer(model(scaled), state_dtype="bfloat16").optimizer
    assert (ours.state_dtype, ours.rounding_seed, float(ours.inner_optimizer.learning_rate)) == ("bfloat16", 3, 0.5)
    assert ours.loss_scale == keras_mp.LossScale.static(8.0) and type(ours.inner_optimizer) is keras.optimizers.Lion
    kerass = keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.5), 4.0, dynamic_growth_steps=7)
    ours = keras_mp.loss_scaling.change_optimizer(model(kerass), state_dtype="float8").optimizer
    assert ours.loss_scale == keras_mp.LossScale(initial_scale=4.0, growth_interval=7)
    assert ours.state_dtype == "float8" and float(ours.inner_optimizer.learning_rate) == 0.5
    again = keras_mp.loss_scaling.change_optimizer(model(ours), state_dtype="float32").optimizer
    assert again.state_dtype == "float32" and again.loss_scale == ours.loss_scale


@pytest.mark.parametrize(
    "changes", [({"state_dtype": "float8"}, {"accumulate": 2}), ({"accumulate": 2}, {"state_dtype": "float8"})]
)
def test_with_accumulated_gradients_in_either_order(changes):
    ours = model()
    for change in changes:
        keras_mp.loss_scaling.change_optimizer(ours, **change)
    ours.fit(*data(), batch_size=ROWS // 2, verbose=0)
    assert stored(ours.optimizer) == {"float8_e4m3fn", "float32"}  # states, and sums of gradients
    assert int(ours.optimizer.iterations) == 1


class OwnAdamW(keras.optimizers.AdamW):
    """Not registered with Keras."""


def excluding(**excluded):
    optimizer = OwnAdamW(0.1, weight_decay=0.5)
    optimizer.exclude_from_weight_decay(**excluded)
    return optimizer


@pytest.mark.parametrize("by, wrapped", [("name", False), ("variable", True)])
def test_what_was_left_out_of_weight_decay_stays_out(by, wrapped):
    """No config has it. Gradients are zero, so that weight decay alone moves a weight."""
    ours = model(keras.optimizers.SGD())
    kernels = [layer.kernel for layer in ours.layers]
    optimizer = excluding(var_names=["kernel"]) if by == "name" else excluding(var_list=kernels[:1])
    wrapper = keras_mp.LossScaleOptimizer(optimizer) if wrapped else optimizer
    ours.compile(wrapper, "mse")
    before = [np.asarray(kernel) for kernel in kernels]
    keras_mp.loss_scaling.change_optimizer(
        keras_mp.loss_scaling.change_optimizer(ours, state_dtype="bfloat16"), accumulate=2
    )
    for _ in range(2):
        ours.optimizer.apply(
            [keras.ops.zeros_like(v.value) for v in ours.trainable_variables], ours.trainable_variables
        )
    moved = [not np.array_equal(one, np.asarray(kernel)) for one, kernel in zip(before, kernels, strict=True)]
    assert moved == [False, by == "variable"]


def test_it_releases_gradients():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    model.compile(keras.optimizers.Adam(clipnorm=1.0), "mse")
    keras_mp.loss_scaling.change_optimizer(model, state_dtype="float8", release_gradients=True)
    assert model.optimizer.release_gradients
    keras_mp.loss_scaling.change_optimizer(model, state_dtype="float32")  # leaves what it does not name
    assert model.optimizer.release_gradients
    keras_mp.loss_scaling.change_optimizer(model, release_gradients=False)
    assert not model.optimizer.release_gradients
    model.compile(keras_mp.LossScaleOptimizer(keras.optimizers.Adam()), "mse")
    with pytest.raises(ValueError, match="scales the loss"):
        keras_mp.loss_scaling.change_optimizer(model, state_dtype="float8", release_gradients=True)


def test_wrong_use():
    untouched = model()
    optimizer = untouched.optimizer
    assert keras_mp.loss_scaling.change_optimizer(untouched, state_dtype="float32").optimizer is optimizer
    with pytest.raises(ValueError, match="state_dtype='int8' must be one of 'float32', 'bfloat16', 'float8'"):
        keras_mp.loss_scaling.change_optimizer(model(), state_dtype="int8")
    with pytest.raises(ValueError, match="accumulate=0 must be a whole number"):
        keras_mp.loss_scaling.change_optimizer(model(), accumulate=0)
    bare, trained = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)]), model()
    trained.train_on_batch(*data())
    for change in ({"state_dtype": "float8"}, {"accumulate": 2}):
        with pytest.raises(ValueError, match="not compiled with an optimizer"):
            keras_mp.loss_scaling.change_optimizer(bare, **change)
        with pytest.raises(ValueError, match="was trained for 1 steps.*call change_optimizer before fit"):
            keras_mp.loss_scaling.change_optimizer(trained, **change)
    assert keras_mp.loss_scaling.change_optimizer(trained, state_dtype="float32") is trained
