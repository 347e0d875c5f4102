"""Weights that a pattern of names leaves out of weight decay, in float32 and in bfloat16."""

import keras
import numpy as np
import pytest

import keras_mp

pytestmark = pytest.mark.jax


@pytest.mark.parametrize("policy, pattern", [("float32", "kernel"), ("bfloat16", "kernel"), ("bfloat16", "kept")])
def test_a_pattern_leaves_out_what_it_does_in_plain_keras(policy, pattern):
    """On TensorFlow Keras compares a pattern with a weight's path, on JAX with its short name."""
    keras.config.set_dtype_policy(policy)
    shrunk = []
    for kit in (False, True):
        hidden, kept = keras.layers.Dense(16, name="a"), keras.layers.Dense(16, name="kept")
        hidden.build((None, 8)), kept.build((None, 16))
        weights = [*hidden.trainable_variables, *kept.trainable_variables]
        optimizer = keras.optimizers.AdamW(0.1, weight_decay=0.5)
        optimizer.exclude_from_weight_decay(var_names=[pattern])
        optimizer = keras_mp.LossScaleOptimizer(optimizer, keras_mp.LossScale.none()) if kit else optimizer
        optimizer.build(weights)
        before = [
            np.linalg.norm(keras.ops.convert_to_numpy(layer.kernel).astype("float64")) for layer in (hidden, kept)
        ]
        for _ in range(2):  # no gradient: decay alone moves the weights
            optimizer.apply([keras.ops.zeros(weight.shape, weight.dtype) for weight in weights], weights)
        after = [np.linalg.norm(keras.ops.convert_to_numpy(layer.kernel).astype("float64")) for layer in (hidden, kept)]
        shrunk.append([bool(now < 0.99 * norm) for norm, now in zip(before, after, strict=True)])
    assert shrunk[0] == shrunk[1]
    assert shrunk[0][0] is (pattern == "kept")
