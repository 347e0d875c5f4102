"""The chosen experts alone on eight devices, in a process of their own; test_distribute.py starts it."""

import contextlib

import keras
import numpy as np
import pytest
from devices import only_jax

import keras_mp
from keras_mp.lean.expert_blocks import EXPERTS
from keras_mp.planner.read.collectives import collectives
from keras_mp.planner.read.hlo import parse
from keras_mp.treatment.change import undo

keras_hub = pytest.importorskip("keras_hub")
SIZES = {
    "vocabulary_size": 32, "num_layers": 1, "num_query_heads": 2, "num_key_value_heads": 2, "hidden_dim": 16,
    "head_dim": 8, "intermediate_dim": 32, "moe_intermediate_dim": 16, "num_experts": 16, "top_k": 2,
}  # fmt: skip


def trained(strategy, weights, x):
    """The weights before some steps, the losses of these, and the weights after."""
    scope = keras_mp.parallel.distribute(strategy, 8) if strategy else contextlib.nullcontext()
    with scope:
        model = keras_hub.models.Qwen3MoeBackbone(**SIZES, router_aux_loss_coefficient=0.0)
        model.set_weights(weights or model.get_weights())
        start = model.get_weights()
        keras_mp.lean.make_lean(model)
        model.compile(keras.optimizers.SGD(0.1), "mse")
        losses = model.fit(x, np.ones((64, 8, 16)), batch_size=32, shuffle=False, epochs=2, verbose=0)
        return start, losses.history["loss"], [np.asarray(value) for value in model.get_weights()]


@only_jax
@pytest.mark.slow
def test_values_are_those_of_one_device():
    random = np.random.default_rng()
    x = {"token_ids": random.integers(0, 32, (64, 8)), "padding_mask": np.ones((64, 8), "int32")}
    start, losses, weights = trained(None, None, x)
    _, others, after = trained("fully_sharded", start, x)
    np.testing.assert_allclose(others, losses, rtol=1e-5)
    for one, right in zip(after, weights, strict=True):
        np.testing.assert_allclose(one, right, rtol=0, atol=1e-5)


def sent(chosen_only):
    """What the devices send to each other in a compiled step, and the bytes of the weights."""
    import jax

    x = {name: np.ones((32, 8), "int32") for name in ("token_ids", "padding_mask")}
    with keras_mp.parallel.distribute("fully_sharded", 8):
        model = keras_mp.lean.make_lean(keras_hub.models.Qwen3MoeBackbone(**SIZES, router_aux_loss_coefficient=0.0))
        model.compile(keras.optimizers.SGD(0.1), "mse")
        if not chosen_only:
            undo(model, (EXPERTS,))
        model.optimizer.build(model.trainable_variables)
        # Private, as Keras's trainer hands its state over.
        state = model._get_jax_state(
            trainable_variables=True, non_trainable_variables=True, optimizer_variables=True, metrics_variables=True
        )
        batch = x, np.ones((32, 8, SIZES["hidden_dim"]), "float32")
        layout = keras.distribution.distribution().get_data_layout
        batch = jax.tree.map(lambda array: jax.device_put(array, layout(array.shape).backend_layout), batch)
        step = jax.jit(lambda state, batch: model.train_step(state, batch)).lower(state, batch)
        found = collectives(parse(step.compile().as_text()), 8)
    read = [variable for variable in model.trainable_variables if "reverse" not in variable.path]  # of logits alone
    return found, sum(4 * int(np.prod(variable.shape)) for variable in read)


@only_jax
@pytest.mark.slow
def test_devices_send_the_bytes_of_own_code():
    own, weights = sent(chosen_only=False)
    chosen, _ = sent(chosen_only=True)
    assert chosen == own
    # On a ring a device sends 7/8 of the weights to gather them, and as much to sum their gradients into parts.
    kinds = {collective.kind: collective.wire for collective in own if collective.bytes > 4}
    share = weights * 7 // 8
    assert kinds == pytest.approx({"all-gather": share, "reduce-scatter": share}, abs=8)
