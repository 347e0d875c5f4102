"""Gradients that wait for nothing: how many live at once in what a GPU's compiler assigns, and where states lie."""

import keras
import pytest

import keras_mp
from keras_mp.planner.chips.targets import find_target, missing_compiler

pytestmark = [pytest.mark.jax, pytest.mark.slow]
WIDTH, LAYERS = 1024, 8
KERNEL = 2 * WIDTH * WIDTH  # bytes, in bfloat16


def memory(**settings):
    if missing := missing_compiler(find_target("h100")):
        pytest.skip(missing)

    def build():
        layers = [keras.layers.Dense(WIDTH, "gelu", use_bias=False) for _ in range(LAYERS)]
        model = keras.Sequential([keras.layers.Input((WIDTH,)), *layers])
        optimizer = keras.optimizers.AdamW(1e-3)
        return keras_mp.prepare(model, optimizer, "mse", state_dtype="float8", **{"jit_compile": True} | settings)

    with keras_mp.set_global_policy("bfloat16"):
        # Few rows: XLA orders a step by its peak, and where activations make that, gradients may wait.
        batch = keras.KerasTensor((8, WIDTH))
        return keras_mp.inspect(build, (batch, batch), target="h100").memory


only_jax = pytest.mark.skipif(keras.backend.backend() != "jax", reason="a step that JAX traced")


@only_jax
def test_at_most_two_gradients_live_at_once():
    checked, released = memory(), memory(release_gradients=True)
    assert checked.gradients >= LAYERS * KERNEL
    assert 0 < released.gradients <= 2 * KERNEL
    assert checked.temporary - released.temporary > (LAYERS - 3) * KERNEL
    assert released.arguments == checked.arguments
    assert released.host == 0


@only_jax
def test_states_on_the_host_are_not_the_device_s():
    device = memory(release_gradients=True)
    host = memory(release_gradients=True, state_memory="host")
    moments = 2 * LAYERS * WIDTH * WIDTH  # in 8 bits
    assert host.host == moments
    assert abs(device.arguments - host.arguments - moments) < 2**12  # two more alignments
    assert host.gradients <= 2 * KERNEL
    # Slots are fetched one weight after another: of two weights both, old and new, of 16 that there are.
    assert host.temporary - device.temporary < 9 * WIDTH * WIDTH < moments
    assert host.peak < device.peak


@only_jax
def test_a_tpu_does_not_fetch_all_slots_at_once():
    def temporary(state_memory):
        def build():
            layers = [keras.layers.Dense(WIDTH, "gelu", use_bias=False) for _ in range(LAYERS)]
            model = keras.Sequential([keras.layers.Input((WIDTH,)), *layers])
            states = {"state_dtype": "bfloat16", "state_memory": state_memory, "release_gradients": True}
            return keras_mp.prepare(model, keras.optimizers.AdamW(1e-3), "mse", **states)

        batch = keras.KerasTensor((8, WIDTH))
        return keras_mp.inspect(build, (batch, batch), target="v5e").memory.temporary

    with keras_mp.set_global_policy("bfloat16"):
        moments = 4 * LAYERS * WIDTH * WIDTH
        assert temporary("host") - temporary("device") < 0.4 * moments
