"""What the compilers of a TPU and of a GPU make of an update with states in 8 bits; JAX, with nothing attached."""

import keras
import pytest

import keras_mp

pytestmark = [pytest.mark.ci, pytest.mark.once]
WIDTH = 4096


@pytest.mark.skipif(keras.backend.backend() != "jax", reason="shapes alone make the step on JAX")
@pytest.mark.parametrize("target", ["v5e", "h100"])
def test_the_update_keeps_no_float32_copy_of_a_weights_size(target):
    keras.config.set_dtype_policy("mixed_bfloat16")

    def temporary(state_dtype):
        dense = keras.layers.Dense(WIDTH, use_bias=False, kernel_initializer="zeros")
        model = keras.Sequential([keras.Input((WIDTH,)), dense])
        optimizer = keras.optimizers.AdamW(1e-3, global_clipnorm=1.0)
        model.compile(keras_mp.LossScaleOptimizer(optimizer, keras_mp.NoLossScale(), state_dtype=state_dtype), "mse")
        batch = keras.KerasTensor((8, WIDTH), "float32")
        return keras_mp.inspect(model, (batch, batch), target).memory

    small, plain = temporary("float8"), temporary("float32")
    count = WIDTH * WIDTH
    assert plain.optimizer - small.optimizer == pytest.approx(6 * count, rel=0.01)
    assert (small.optimizer_dtype, plain.optimizer_dtype) == ("float8", "float32")
    assert small.temporary < plain.temporary + 0.5 * count
