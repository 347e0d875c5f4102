import itertools
import math
import warnings

import keras
import numpy as np
import pytest
from arrays import values
from hypothesis import given, settings
from keras import layers
from overflows import BAD, batches_with_overflow
from test_loss_scale import gradients, loss_scales, reference

import keras_mp
from keras_mp import backend

TENSORFLOW = keras.backend.backend() == "tensorflow"
MODES = {"eager": {"run_eagerly": True}, "jit": {"jit_compile": True}}
if TENSORFLOW:
    MODES["graph"] = {"jit_compile": False}
MODES_OF_A_STEP = ["eager", pytest.param("jit", marks=pytest.mark.jax)]


def stepper(optimizer, weight, mode):
    """A function from a gradient to nothing that makes a step, as the backend's trainer would."""
    optimizer.build([weight])
    if TENSORFLOW:
        import tensorflow as tf

        def step(gradient):
            optimizer.apply([gradient], [weight])

        compiled = step if mode == "eager" else tf.function(step, jit_compile=mode == "jit")
        return lambda gradient: compiled(tf.constant(gradient, "float32"))
    import jax

    def step(state, gradient):
        weights, variables = optimizer.stateless_apply(state[1], [gradient], [state[0]])
        return weights[0], variables

    compiled = step if mode == "eager" else jax.jit(step)

    def assign(gradient):
        value, variables = compiled((weight.value, [v.value for v in optimizer.variables]), np.float32(gradient))
        weight.assign(value)
        for variable, value in zip(optimizer.variables, variables, strict=True):
            variable.assign(value)

    return assign


def weight_of(*values):
    return keras.Variable(np.array(values, "float32"))


def state_of(optimizer):
    return tuple(float(value) for value in optimizer.state)


@pytest.mark.parametrize("mode", MODES_OF_A_STEP)
@settings(max_examples=2, deadline=None)  # test_loss_scale.py has more of them
@given(loss_scales(), gradients)
def test_the_scale_moves_as_the_reference_says(mode, loss_scale, gradients):
    weight = weight_of(1.0, 1.0)
    optimizer = keras_mp.LossScaleOptimizer(keras.optimizers.SGD(1.0), loss_scale)
    step = stepper(optimizer, weight, mode)
    moves = 0.0
    for gradient, expected in zip(gradients, reference(loss_scale, gradients), strict=True):
        moves += 1.0 if math.isfinite(gradient) else 0.0
        step([gradient * float(optimizer.dynamic_scale), 0.0])
        assert state_of(optimizer) == expected
        np.testing.assert_array_equal(weight.numpy(), [1.0 - moves, 1.0])
        assert int(optimizer.iterations) == moves


def model_and_data(optimizer, mode, **compile_arguments):
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [keras.Input((4,)), layers.Dense(8, activation="gelu"), layers.BatchNormalization(), layers.Dense(1)]
    )
    model.compile(optimizer, "mse", **MODES[mode], **compile_arguments)
    return model


@pytest.mark.jax
def test_float32_training_is_the_same_with_and_without_scaling():
    """Overflow comes at steps 0, 2 and 7; the control does not see those batches."""
    mode = "graph" if TENSORFLOW else "jit"
    control = model_and_data(keras.optimizers.Adam(0.01, global_clipnorm=0.5), mode)
    scaled = model_and_data(keras_mp.LossScaleOptimizer(keras.optimizers.Adam(0.01, global_clipnorm=0.5)), mode)
    # A jitted update rounds a last bit otherwise, and Keras's optimizer by itself has none.
    with backend.without_islands():
        for step, (x, y) in enumerate(batches_with_overflow(12, BAD)):
            scaled.train_on_batch(x, y)
            if step not in BAD:
                control.train_on_batch(x, y)
    # Moving averages see every batch: they are what atomic_skip is for.
    np.testing.assert_equal(values(scaled.trainable_variables), values(control.trainable_variables))
    assert int(scaled.optimizer.skipped_steps) == 3
    assert int(scaled.optimizer.iterations) == int(control.optimizer.iterations) == 9
    assert float(scaled.optimizer.dynamic_scale) == 2.0**12


def test_accumulation_by_4_with_a_bad_micro_batch_is_that_without_it():
    values = [np.array([1.0, -2.0]), np.array([0.3, 5.0]), np.array([7.0, 0.1]), np.array([-1.0, 3.0])] * 2
    bad = np.array([np.inf, 1.0])
    weight = weight_of(1.0, 2.0)
    optimizer = keras_mp.LossScaleOptimizer(keras.optimizers.Adam(0.1, gradient_accumulation_steps=4, clipnorm=1.0))
    step = stepper(optimizer, weight, "eager")
    for value in [values[0], bad, *values[1:6], bad, bad, *values[6:]]:
        step(value * float(optimizer.dynamic_scale))
    reference = weight_of(1.0, 2.0)
    alone = keras.optimizers.Adam(0.1, clipnorm=1.0)
    for accumulated in (values[:4], values[4:]):
        mean = sum(value.astype("float32") for value in accumulated) / np.float32(4)
        alone.apply([keras.ops.convert_to_tensor(mean, "float32")], [reference])
    np.testing.assert_array_equal(weight.numpy(), reference.numpy())
    assert int(optimizer.iterations) == 2


def test_16_bit_gradients_are_unscaled_in_float32():
    weight = keras.Variable(np.zeros(1, "float32"))
    optimizer = keras_mp.LossScaleOptimizer(keras.optimizers.SGD(1.0), initial_scale=2.0**15)
    optimizer.build([weight])
    unscaled = optimizer.unscale([keras.ops.convert_to_tensor([2.0**-10], "float16")])[0]
    assert keras.backend.standardize_dtype(unscaled.dtype) == "float32"
    assert float(unscaled[0]) == 2.0**-25  # float16 would hold zero


def test_the_parts_of_a_custom_loop_make_the_same_step_as_apply():
    weights = weight_of(1.0, 2.0), weight_of(1.0, 2.0)
    optimizers = [keras_mp.LossScaleOptimizer(keras.optimizers.Adam(0.1)) for _ in weights]
    gradient = keras.ops.convert_to_tensor([3.0, -4.0]) * 2.0**15
    optimizers[0].apply([gradient], [weights[0]])
    optimizers[1].apply_unscaled(optimizers[1].unscale([gradient], [weights[1]]), [weights[1]])
    np.testing.assert_array_equal(weights[0].numpy(), weights[1].numpy())
    assert float(optimizers[0].scale_loss(2.0)) == 2.0**16


@pytest.mark.parametrize("scales", [True, False])
def test_a_loop_that_scales_no_loss_is_told_so_once_and_another_is_not(scales):
    optimizer = keras_mp.LossScaleOptimizer(keras.optimizers.SGD(0.1))
    optimizer.build([keras.Variable(np.ones(2, "float32"))])
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):
            if scales:
                optimizer.scale_loss(keras.ops.ones(()))
            optimizer.apply([keras.ops.ones(2)])
    told = [warning for warning in said if "never multiplied a loss" in str(warning.message)]
    assert len(told) == (0 if scales else 1)


def test_what_a_scale_below_1_makes_infinite_is_an_overflow():
    weight = weight_of(1.0)
    optimizer = keras_mp.LossScaleOptimizer(keras.optimizers.SGD(1.0), initial_scale=0.25, min_scale=0.25)
    optimizer.apply([keras.ops.convert_to_tensor([3e38])], [weight])
    assert int(optimizer.skipped_steps) == 1
    assert weight.numpy()[0] == 1.0


def test_no_scale_and_a_static_one_stay_and_overflows_are_skipped():
    for loss_scale, scale in ((keras_mp.LossScale.none(), 1.0), (keras_mp.LossScale.static(8.0), 8.0)):
        weight = weight_of(1.0)
        optimizer = keras_mp.LossScaleOptimizer(keras.optimizers.SGD(1.0), loss_scale)
        step = stepper(optimizer, weight, "eager")
        assert float(optimizer.scale_loss(3.0)) == 3.0 * scale
        for gradient in (math.inf, math.nan, 0.25 * scale):
            step([gradient])
        assert weight.numpy()[0] == 0.75
        assert int(optimizer.skipped_steps) == 2 and float(optimizer.dynamic_scale) == scale


def test_some_gradients_may_be_none_but_not_all():
    weights = [weight_of(1.0), weight_of(1.0), weight_of(0.0)]
    optimizer = keras_mp.LossScaleOptimizer(keras.optimizers.SGD(1.0, gradient_accumulation_steps=2), initial_scale=1.0)
    for last in (3.0, 5.0, None, 7.0):  # of the second window one micro-batch has none: its sum begins anew
        given = None if last is None else keras.ops.convert_to_tensor([last])
        optimizer.apply([None, keras.ops.convert_to_tensor([0.5]), given], weights)
    assert [float(weight.numpy()[0]) for weight in weights] == [1.0, 0.0, -4.0 - 3.5]
    with pytest.raises(ValueError, match="no gradient for any of the 3 trainable variables"):
        optimizer.apply([None, None, None], weights)


@pytest.mark.parametrize("steps", [None, 2])
def test_variables_marked_to_be_overwritten_are_not_unscaled(steps):
    weight, amax = weight_of(1.0), weight_of(0.0)
    amax.overwrite_with_gradient = True
    optimizer = keras_mp.LossScaleOptimizer(keras.optimizers.SGD(1.0, gradient_accumulation_steps=steps))
    for value in (7.0, 5.0) if steps else (7.0,):
        gradients = [keras.ops.convert_to_tensor([0.25 * 2.0**15]), keras.ops.convert_to_tensor([value])]
        optimizer.apply(gradients, [weight, amax])
    assert [float(weight.numpy()[0]), float(amax.numpy()[0])] == [0.75, 7.0]


def test_state_is_not_read_in_16_bits():
    keras.config.set_dtype_policy("mixed_bfloat16")
    weight = weight_of(1.0)
    optimizer = keras_mp.LossScaleOptimizer(keras.optimizers.SGD(1.0), keras_mp.LossScale.none())
    step = stepper(optimizer, weight, "jit")
    for _ in range(300):
        step([math.nan])
    assert int(optimizer.skipped_steps) == 300  # bfloat16 would stay at 256

    class ReadsTheScale(layers.Layer):
        def call(self, inputs):
            return keras.ops.convert_to_tensor(optimizer.dynamic_scale)

    assert keras.backend.standardize_dtype(ReadsTheScale()(keras.ops.ones((1, 1))).dtype) == "float32"


@pytest.mark.skipif(not TENSORFLOW, reason="JAX has no sparse gradients here")
@pytest.mark.parametrize("mode, steps", [("eager", None), ("graph", 2), ("jit", None)])
def test_sparse_rows_are_summed_before_the_check(mode, steps):
    import tensorflow as tf

    weight = keras.Variable(np.zeros((4, 1), "float32"))
    inner = keras.optimizers.SGD(1.0, gradient_accumulation_steps=steps)
    optimizer = keras_mp.LossScaleOptimizer(inner, initial_scale=1.0)
    optimizer.build([weight])

    def apply(values):
        optimizer.apply([tf.IndexedSlices(values, tf.constant([2, 0, 2]), tf.constant([4, 1]))], [weight])

    step = apply if mode == "eager" else tf.function(apply, jit_compile=mode == "jit")
    step(tf.constant([[3e38], [1.0], [3e38]]))  # finite, each of them
    assert int(optimizer.skipped_steps) == 1
    for _ in range(steps or 1):
        step(tf.constant([[3.0], [1.0], [5.0]]))
    np.testing.assert_array_equal(weight.numpy().ravel(), [-1.0, 0.0, -8.0, 0.0])


def test_weights_go_to_the_inner_optimizer_and_back():
    weight = weight_of(1.0, 2.0)
    optimizers = [keras_mp.LossScaleOptimizer(keras.optimizers.Adam(0.1)) for _ in range(2)]
    optimizers[0].apply([keras.ops.convert_to_tensor([1e9, math.inf])], [weight])
    optimizers[0].apply([keras.ops.convert_to_tensor([1e9, 1e8])], [weight])
    optimizers[1].build([weight])
    optimizers[1].set_weights([variable.numpy() for variable in optimizers[0].variables])
    np.testing.assert_equal(values(optimizers[1].variables), values(optimizers[0].variables))
    with pytest.raises(ValueError, match="weights has 1 arrays"):
        optimizers[1].set_weights([np.zeros(1)])


def test_weight_decay_is_excluded_in_the_inner_optimizer():
    weight = weight_of(1.0)
    optimizer = keras_mp.LossScaleOptimizer(keras.optimizers.SGD(1.0, weight_decay=0.5))
    optimizer.exclude_from_weight_decay(var_list=[weight])
    optimizer.apply([keras.ops.zeros(1)], [weight])
    assert weight.numpy()[0] == 1.0


@pytest.mark.skipif(not hasattr(keras.optimizers, "MultiOptimizer"), reason="this release of Keras has none")
@pytest.mark.parametrize("steps", [None, 2])
def test_several_optimizers_under_one_scale(steps):
    weights = [keras.Variable(np.ones(1, "float32"), name=name) for name in ("slow", "fast")]
    settings = {"gradient_accumulation_steps": steps}
    chosen = keras.optimizers.OptimizerMap(keras.optimizers.SGD(0.5, **settings))
    chosen["fast"] = keras.optimizers.SGD(1.0, **settings)
    optimizer = keras_mp.LossScaleOptimizer(keras.optimizers.MultiOptimizer(chosen), initial_scale=1.0)
    for gradient in (0.5, math.inf, 0.5)[: 3 if steps else 2]:
        optimizer.apply([keras.ops.convert_to_tensor([gradient])] * 2, weights)
    assert [float(weight.numpy()[0]) for weight in weights] == [0.75, 0.5]


@pytest.mark.parametrize(
    "arguments",
    [
        {"initial_scale": 2.0, "growth_interval": 5, "hysteresis": 2, "max_scale": 64.0},
        {"loss_scale": keras_mp.LossScale.static(8.0)},
        {"loss_scale": keras_mp.LossScale.none()},
    ],
)
def test_survives_serialization(arguments):
    optimizer = keras_mp.LossScaleOptimizer(keras.optimizers.Adam(0.1, gradient_accumulation_steps=3), **arguments)
    again = keras.optimizers.deserialize(keras.optimizers.serialize(optimizer))
    assert type(again) is keras_mp.LossScaleOptimizer
    assert again.loss_scale == optimizer.loss_scale
    assert again.get_config() == optimizer.get_config()
    assert again.inner_optimizer.gradient_accumulation_steps == 3


def test_a_saved_model_keeps_its_scaler_under_another_global_policy(tmp_path):
    keras.config.set_dtype_policy("mixed_float16")
    inner = keras.optimizers.Adam(0.01, gradient_accumulation_steps=2)
    model = model_and_data(keras_mp.LossScaleOptimizer(inner), "eager")
    for x, y in batches_with_overflow(4, {0}):
        model.train_on_batch(x, y)
    model.save(tmp_path / "model.keras")
    keras.config.set_dtype_policy("float32")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert type(loaded.optimizer) is keras_mp.LossScaleOptimizer
    assert state_of(loaded.optimizer) == state_of(model.optimizer)
    assert int(loaded.optimizer.skipped_steps) >= 1
    for x, y in itertools.islice(batches_with_overflow(6), 4, 6):
        losses = [each.train_on_batch(x, y) for each in (model, loaded)]
        assert losses[0] == losses[1]
    np.testing.assert_equal(
        values(loaded.optimizer.variables), values(model.optimizer.variables)
    )  # the micro-batch too


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        ({"inner_optimizer": "adam"}, TypeError, "inner_optimizer='adam' must be a Keras optimizer"),
        ({"loss_scale": 8.0}, TypeError, "loss_scale=8.0 must be LossScale"),
        (
            {"loss_scale": keras_mp.LossScale.none(), "initial_scale": 2.0},
            ValueError,
            "comes with {'initial_scale': 2.0}",
        ),
        ({"growth_interval": 3, "dynamic_growth_steps": 3}, ValueError, "two names of one setting"),
        ({"min_scale": 2.0, "max_scale": 1.0}, ValueError, "floor"),
        ({"clipnorm": 1.0}, ValueError, "on the `inner_optimizer`"),
        ({"groth": 1.0}, ValueError, "groth"),
        *(
            ({"inner_optimizer": scaler(keras.optimizers.SGD())}, ValueError, "is a LossScaleOptimizer already")
            for scaler in (keras_mp.LossScaleOptimizer, keras.optimizers.LossScaleOptimizer)
        ),
    ],
)
def test_bad_arguments_are_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        keras_mp.LossScaleOptimizer(**{"inner_optimizer": keras.optimizers.SGD(), **arguments})


def test_bad_gradients_are_refused():
    weight = weight_of(1.0)
    optimizer = keras_mp.LossScaleOptimizer(keras.optimizers.SGD())
    with pytest.raises(ValueError, match="is not built"):
        optimizer.apply([keras.ops.ones(1)])
    with pytest.raises(ValueError, match="grads has 2 gradients for 1 variables"):
        optimizer.apply([keras.ops.ones(1)] * 2, [weight])
    with pytest.raises(ValueError, match="Unknown variable"):
        optimizer.apply([keras.ops.ones(1)], [weight_of(2.0)])


def test_scaling_bfloat16_is_told_to_be_needless():
    keras.config.set_dtype_policy("mixed_bfloat16")
    with pytest.warns(UserWarning, match="range of float32: scaling the loss gains nothing"):
        keras_mp.LossScaleOptimizer(keras.optimizers.SGD())
