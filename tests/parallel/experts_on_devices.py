"""The chosen experts alone on eight devices, in a process of their own; test_distribute.py starts it."""

import contextlib

import keras
import numpy as np
import pytest
from devices import only_jax

import keras_mp

keras_hub = pytest.importorskip("keras_hub")
SIZES = {
    "vocabulary_size": 32, "num_layers": 1, "num_query_heads": 2, "num_key_value_heads": 2, "hidden_dim": 16,
    "head_dim": 8, "intermediate_dim": 32, "moe_intermediate_dim": 16, "num_experts": 16, "top_k": 2,
}  # fmt: skip


def trained(strategy, weights, x, policy="float32"):
    """The losses of three steps, the weights behind them, and whether experts are lean."""
    scope = keras_mp.parallel.distribute(strategy, 8) if strategy else contextlib.nullcontext()
    with scope, keras_mp.set_global_policy(policy):
        model = keras_hub.models.Qwen3MoeBackbone(**SIZES, router_aux_loss_coefficient=0.0)
        model.set_weights(weights or model.get_weights())
        start = model.get_weights()
        keras_mp.lean.make_lean(model)
        model.compile(keras.optimizers.SGD(0.1), "mse")
        losses = model.fit(x, np.ones((64, 8, 16)), batch_size=32, shuffle=False, epochs=2, verbose=0)
        return start, losses.history["loss"], [np.asarray(value) for value in model.get_weights()]


@only_jax
def test_values_are_those_of_one_device():
    random = np.random.default_rng()
    x = {"token_ids": random.integers(0, 32, (64, 8)), "padding_mask": np.ones((64, 8), "int32")}
    start, losses, weights = trained(None, None, x)
    for strategy in ("data", "fully_sharded"):
        _, others, after = trained(strategy, start, x)
        np.testing.assert_allclose(others, losses, rtol=1e-5)
        for one, right in zip(after, weights, strict=True):
            np.testing.assert_allclose(one, right, rtol=0, atol=1e-5)
