"""Ways out of a training with states in 8 or 16 bits: exports, which hold no states, and TensorFlow's checkpoints."""

import keras
import numpy as np
import pytest

import keras_mp
from keras_mp.optimizer.inner_build import with_dtypes

TENSORFLOW = keras.backend.backend() == "tensorflow"
WIDTH = 64


def trained(state_dtype, steps=3, policy="mixed_bfloat16"):
    keras.config.set_dtype_policy(policy)
    layers = [keras.Input((WIDTH,)), keras.layers.Dense(WIDTH, "tanh"), keras.layers.Dense(WIDTH, dtype="float32")]
    model = keras_mp.prepare(
        keras.Sequential(layers), keras.optimizers.Adam(0.01), "mse", state_dtype=state_dtype, run_eagerly=True
    )
    train(model, steps)
    return model


def train(model, steps):
    for step in range(steps):
        x = np.random.default_rng(step).normal(size=(8, WIDTH)).astype("float32")
        model.train_on_batch(x, np.roll(x, 1, axis=1))


def bits(variables):
    return [(str(v.dtype), np.asarray(keras.ops.convert_to_numpy(v)).tobytes()) for v in variables]


@pytest.mark.skipif(not TENSORFLOW, reason="TensorFlow's own checkpoints")
@pytest.mark.parametrize(
    "state_dtype, when", [("float8", "built"), pytest.param("bfloat16", "before", marks=pytest.mark.slow)]
)
def test_tensorflows_checkpoint_goes_on_bit_for_bit(tmp_path, state_dtype, when):
    """Restored into variables that are there, and, as TensorFlow allows, into variables that come later."""
    import tensorflow as tf

    first = trained(state_dtype)
    saved = tf.train.Checkpoint(model=first, optimizer=first.optimizer).save(str(tmp_path / "checkpoint"))
    second = trained(state_dtype, steps=1 if when == "built" else 0)
    status = tf.train.Checkpoint(model=second, optimizer=second.optimizer).restore(saved)
    if when == "built":
        status.assert_existing_objects_matched()
    for model in (first, second):
        train(model, 2)
    status.assert_existing_objects_matched()
    assert bits(first.weights) == bits(second.weights)
    assert bits(first.optimizer.variables) == bits(second.optimizer.variables)
    assert int(second.optimizer.iterations) == 5


@pytest.mark.skipif(not TENSORFLOW, reason="TensorFlow's own checkpoints")
@pytest.mark.parametrize("dtypes", [("float8", "float32"), ("float32", "bfloat16")], ids=" ".join)
def test_tensorflows_checkpoint_of_another_state_dtype_is_refused(tmp_path, dtypes):
    """It knows variables by their number, and compares dtypes."""
    import tensorflow as tf

    def optimizer(state_dtype):
        inner = keras.optimizers.Adam(0.01)
        return keras_mp.LossScaleOptimizer(inner, keras_mp.LossScale.none(), state_dtype=state_dtype)

    first, second = map(optimizer, dtypes)
    for one in (first, second):
        one.build([keras.Variable(np.ones((WIDTH, WIDTH), "float32"), name="weight")])
    saved = tf.train.Checkpoint(optimizer=first).save(str(tmp_path / "checkpoint"))
    with pytest.raises(tf.errors.InvalidArgumentError, match="expected dtype"):
        tf.train.Checkpoint(optimizer=second).restore(saved)


def test_an_array_of_another_wide_dtype_is_left_to_keras():
    read = with_dtypes({"0": np.ones(3)}, [keras.Variable(np.zeros(3, "float32"))])
    assert read["0"].dtype == "float64"
