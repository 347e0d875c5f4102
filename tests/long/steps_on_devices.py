"""200 steps on several devices, in a process of their own; test_200_steps.py starts it."""

import dataclasses
import sys
from pathlib import Path

import keras
import numpy as np
import pytest

sys.path.append(str(Path(__file__).parents[1] / "parallel"))
import on_several_devices as devices

devices.CONFIG = dataclasses.replace(devices.CONFIG, layers=2)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16", "mixed_float16"])
def test_language_model_equals_one_device(policy):
    devices.check_language_model(policy, devices.LAYOUTS, steps=200)


@devices.only_jax
@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
def test_weights_gathered_in_fewer_bits(policy):
    keras.utils.set_random_seed(3)
    before = devices.values(devices.build(devices.CONFIG).trainable_variables)
    (one, _), (reordered, _) = devices.language_model(policy, steps=200, orders=(None, np.random.default_rng()))
    moved, noise = devices.distance(before, one), devices.distance(one, reordered)
    print(f"{policy}: 200 steps move the weights by {moved:.2e}, reordered {noise:.2e}")
    sums = {"reduce_dtype": "bfloat16"}
    for settings in ({}, {"gather_dtype": "float8"}, {"gather_dtype": "float8"} | sums, sums):
        weights, _ = devices.language_model(policy, "fully_sharded", 8, steps=200, **settings)
        print(f"{policy} {settings or '16 bits'}: from one {devices.distance(one, weights):.2e}")
        # Rounding in the forward pass alone leaves the weights nearer to one another than to where they began.
        assert devices.distance(one, weights) < (moved / 4 if settings else 4 * noise)
