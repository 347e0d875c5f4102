"""A step jitted for an accelerator chooses between new values and old ones, and has no branch for it."""

import re

import keras
import numpy as np
import pytest
from overflows import BAD, batches_with_overflow

import keras_mp
from keras_mp import backend
from keras_mp.backend.common.device import TracedChip

engine = backend.engine_of("keras_mp.lowering")

pytestmark = [pytest.mark.slow, pytest.mark.jax]
OPTIMIZERS = {
    "clip, decay": dict(global_clipnorm=0.5, weight_decay=0.1),
    "averages": dict(use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=3),
    "accumulation": dict(gradient_accumulation_steps=3),
}


def build(name, loss_scale=None):
    keras.utils.set_random_seed(1)
    inputs = [keras.Input((4,)), keras.layers.BatchNormalization()]
    model = keras.Sequential([*inputs, keras.layers.Dense(1)])
    optimizer = keras.optimizers.Adam(0.01, **OPTIMIZERS[name])
    model.compile(keras_mp.LossScaleOptimizer(optimizer, loss_scale), "mse", jit_compile=True)
    model.optimizer.build(model.trainable_variables)
    return keras_mp.loss_scaling.atomic_skip(model)


def state_of(model):
    return [np.asarray(v) for v in (*model.trainable_variables, *model.optimizer.inner_optimizer.variables)]


@pytest.mark.parametrize(
    "name, platform", [("clip, decay", "tpu"), ("averages", "gpu"), ("accumulation", "tpu")], ids=str
)
def test_it_trains_as_on_a_cpu_and_a_skipped_step_keeps_every_bit(name, platform):
    here, there = build(name), build(name)
    for step, (x, y) in enumerate(batches_with_overflow(12, BAD)):
        before = state_of(there)
        here.train_on_batch(x, y)
        with backend.traced_for(TracedChip(platform)):
            there.train_on_batch(x, y)
        for old, new, expected in zip(before, state_of(there), state_of(here), strict=True):
            if step in BAD:
                np.testing.assert_array_equal(new, old)
            # Adam divides by the root of a mean square, so a sum's last bit is worth more where that is small.
            np.testing.assert_allclose(new, expected, rtol=1e-4, atol=1e-6)
    assert int(there.optimizer.skipped_steps) == len(BAD)
    assert float(there.optimizer.dynamic_scale) == float(here.optimizer.dynamic_scale)


def count(operations, model, platform):
    pytest.importorskip("jax", reason="JAX reads the lowered step")
    from keras_mp.planner.read.program import read_module

    batch = (keras.KerasTensor((8, 4), "float32"), keras.KerasTensor((8, 1), "float32"))
    lowered = engine.lower(model, batch, {"": model}, training=True, chip=TracedChip(platform), plan=None)
    module = read_module(lowered.module)
    return len(re.findall(rf"stablehlo\.(?:{operations})\b", str(module)))


BRANCHES, LOOPS = "case|if", "while"


def test_an_accelerators_step_has_no_branch_but_that_of_an_accumulation():
    for platform in ("gpu", "tpu"):
        assert count(BRANCHES, build("clip, decay"), platform) == count(LOOPS, build("clip, decay"), platform) == 0
        # On JAX loops that run once or never, since XLA writes a loop's results in place of its arguments: for a step
        # that is not skipped, and within it the update, and the wait for more micro-batches.
        branches, loops = (count(kind, build("accumulation"), platform) for kind in (BRANCHES, LOOPS))
        assert (branches == 0 and loops >= 3) if keras.backend.backend() == "jax" else branches >= 2
    assert count(BRANCHES, build("clip, decay"), "cpu") > 0
    assert count(BRANCHES, build("accumulation"), "cpu") > 0
