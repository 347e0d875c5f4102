"""Optimizer states in the host's memory: the same bits, where they lie, and what is refused."""

import keras
import numpy as np
import pytest
from arrays import values

import keras_mp

JAX = keras.backend.backend() == "jax"
needs_jax = pytest.mark.skipif(not JAX, reason="TensorFlow's XLA has no names for memory of the host")


def model_for(state_memory, state_dtype="float32", inner=None):
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [keras.layers.Input((64,)), keras.layers.Dense(128, "relu"), keras.layers.Dense(64), keras.layers.Dense(3)]
    )
    inner = keras.optimizers.AdamW(1e-2) if inner is None else inner
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return keras_mp.prepare(
        model, inner, loss, state_dtype=state_dtype, state_memory=state_memory, release_gradients=True, jit_compile=True
    )


def data(steps, seed=0):
    generator = np.random.default_rng(seed)
    return generator.normal(size=(8 * steps, 64)).astype("float32"), generator.integers(0, 3, 8 * steps)


def fit(model, steps):
    model.fit(*data(steps), batch_size=8, verbose=0, shuffle=False)
    return model


def kinds(variables):
    return [variable.value.sharding.memory_kind for variable in variables]


def assert_same(first, second):
    np.testing.assert_equal(values(second), values(first))


@needs_jax
@pytest.mark.parametrize("state_dtype", ["float32", "float8"])
def test_10_steps_have_the_bits_of_states_on_the_device(state_dtype):
    device, host = (fit(model_for(memory, state_dtype), 10) for memory in ("device", "host"))
    both = [[*model.weights, *model.optimizer.variables] for model in (device, host)]
    if state_dtype == "float32":  # of another program on the device, where Keras's own variables hold the slots
        for expected, actual in zip(*map(values, both), strict=True):
            np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-6)
    else:
        assert_same(*both)
    # Two moments of the two kernels that have 4,096 values; weights, biases and scales stay.
    assert kinds(host.optimizer.variables).count("pinned_host") == 4
    assert "pinned_host" not in kinds(host.weights)
    assert "pinned_host" not in kinds(device.optimizer.variables)


@needs_jax
def test_a_tpus_program_which_fetches_in_a_loop_trains_the_same(monkeypatch):
    from keras_mp.optimizer import _jax

    expected = fit(model_for("host"), 10)
    monkeypatch.setattr(_jax, "fetches_early", lambda: True)
    monkeypatch.setattr(_jax, "_is_for_cpu", lambda: False)
    trained = fit(model_for("host"), 10)
    for one, other in zip(values(expected.weights), values(trained.weights), strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-4, atol=1e-6)
    assert kinds(trained.optimizer.variables).count("pinned_host") == 4


@needs_jax
def test_what_is_saved_loads_to_the_host_and_goes_on_to_the_same_numbers(tmp_path):
    uninterrupted = model_for("host", "float8")
    x, y = data(6)
    for _ in range(2):
        uninterrupted.fit(x, y, batch_size=8, verbose=0, shuffle=False)
    first = model_for("host", "float8")
    first.fit(x, y, batch_size=8, verbose=0, shuffle=False)
    first.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert loaded.optimizer.state_memory == "host"
    assert kinds(loaded.optimizer.variables).count("pinned_host") == 4
    loaded.fit(x, y, batch_size=8, verbose=0, shuffle=False)
    assert_same(uninterrupted.weights, loaded.weights)
    assert kinds(loaded.optimizer.variables).count("pinned_host") == 4


@needs_jax
def test_inspect_counts_them_apart_and_says_how_long_they_take():
    x, y = data(1)
    sizes = {memory: keras_mp.inspect(model_for(memory), (x, y)).memory for memory in ("device", "host")}
    moments = 2 * 4 * (64 * 128 + 128 * 64)
    assert sizes["host"].host == moments
    assert sizes["device"].host == 0
    assert sizes["device"].optimizer - sizes["host"].optimizer == moments


def test_wrong_use_has_errors_that_say_what_is_right():
    none = keras_mp.LossScale.none()
    with pytest.raises(ValueError, match="state_memory='disk' must be one of 'device', 'host'"):
        keras_mp.LossScaleOptimizer(keras.optimizers.Adam(), none, state_memory="disk")
    with pytest.raises(ValueError, match="are released: release_gradients=True"):
        keras_mp.LossScaleOptimizer(keras.optimizers.Adam(), keras_mp.LossScale.none(), state_memory="host")
    built = keras.optimizers.Adam()
    built.build([keras.Variable(np.ones((64, 64), "float32"))])
    with pytest.raises(ValueError, match="needs JAX" if not JAX else "memory of the device already"):
        keras_mp.LossScaleOptimizer(
            built if JAX else keras.optimizers.Adam(), none, state_memory="host", release_gradients=True
        )
