"""Lean models beside the kit's other changes: FP8, `stabilize`, LoRA, int4."""

import warnings

import adapted_models
import keras
import numpy as np
import own_blocks
import pytest

import keras_mp
from keras_mp.fp8.layers import Float8Layer
from keras_mp.lean.lean_model import lean_rows
from keras_mp.rebuild import layers_by_path
from keras_mp.stability.sensitive import sensitive_layers

pytest.importorskip("keras_hub")

import causal_models
import keras_hub
from test_make_lean import assert_same_step, changes, compiled, data, kinds
from twins import twin

pytestmark = pytest.mark.slow
EVERY = {"attention", "gelu", "head"}


def gpt2(run_eagerly=own_blocks.EAGERLY):
    _, arguments = causal_models.DECODERS["GPT2CausalLM"]
    backbone = keras_hub.models.GPT2Backbone(**arguments, dropout=0.0)
    model = keras_hub.models.GPT2CausalLM(backbone=backbone, preprocessor=None)
    return compiled(model, run_eagerly=run_eagerly)


@pytest.mark.parametrize("lean_first", [True, False])
def test_stabilize_before_and_after(lean_first):
    keras.config.set_dtype_policy("mixed_bfloat16")
    model = gpt2()
    x, y, weights = data(model, np.random.default_rng())
    stable = keras_mp.stabilize(twin(model))
    both = keras_mp.stabilize(keras_mp.lean.make_lean(model)) if lean_first else keras_mp.lean.make_lean(twin(stable))
    assert kinds(both) == EVERY and sensitive_layers(both) == []
    plain = keras_mp.revert(twin(both), "make_lean")
    assert kinds(plain) == set() and sensitive_layers(plain) == []
    # Both have their logits and softmax in float32.
    assert_same_step(changes(both, x, y, weights), changes(stable, x, y, weights), tolerance=2e-2)


@pytest.mark.parametrize("lean_first", [True, False])
def test_fp8_before_and_after(lean_first):
    model = gpt2()
    x, y, weights = data(model, np.random.default_rng())

    def converted(model):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # float32 layers in FP8
            return keras_mp.convert(model, select=lambda path, layer: "feedforward" in path)

    expected = converted(twin(model))
    both = converted(keras_mp.lean.make_lean(model)) if lean_first else keras_mp.lean.make_lean(twin(expected))
    assert kinds(both) == EVERY
    in_fp8 = [sum(isinstance(x, Float8Layer) for x in layers_by_path(m).values()) for m in (both, expected)]
    assert in_fp8[0] == in_fp8[1] > 0
    assert_same_step(changes(both, x, y, weights), changes(expected, x, y, weights), tolerance=1e-3)
    reverted = keras_mp.revert(twin(both), "convert")
    assert kinds(reverted) == EVERY
    assert not any(isinstance(layer, Float8Layer) for layer in layers_by_path(reverted).values())


@pytest.mark.parametrize("lean_first", [True, False])
def test_lora_before_and_after(lean_first):
    model = gpt2()
    x, y, weights = data(model, np.random.default_rng())
    if lean_first:
        lean = keras_mp.lean.make_lean(twin(model))
        for each in (model, lean):
            each.backbone.enable_lora(2)
        for ours, theirs in zip(lean.weights, model.weights, strict=True):
            ours.assign(keras.ops.convert_to_numpy(theirs))
        compiled(lean, run_eagerly=own_blocks.EAGERLY), compiled(model, run_eagerly=own_blocks.EAGERLY)
    else:
        model.backbone.enable_lora(2)
        lean = keras_mp.lean.make_lean(twin(compiled(model, run_eagerly=own_blocks.EAGERLY)))
    assert kinds(lean) == EVERY
    assert len(lean.trainable_weights) == len(model.trainable_weights) < len(model.weights)
    assert_same_step(changes(lean, x, y, weights), changes(model, x, y, weights))


def test_lora_on_int4_with_blocks_that_recompute_trains_the_same():
    x, y = adapted_models.tokens(rows=2)
    trained = []
    for remat in (None, True):
        model = adapted_models.gemma("float32", num_layers=2)
        if remat:
            model = keras_mp.lean.make_lean(model, remat=True)
            assert [row.kind for row in lean_rows(model) if row.lean].count("block") == 2
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.5), loss, run_eagerly=own_blocks.EAGERLY)
        losses = [model.train_on_batch(x, y, return_dict=True)["loss"] for _ in range(2)]
        trained.append([np.array(losses), *map(keras.ops.convert_to_numpy, model.trainable_variables)])
    assert trained[0][0][-1] < trained[0][0][0]
    for plain, ours in zip(*trained, strict=True):  # float32, whose sums lean parts order in another way
        np.testing.assert_allclose(ours, plain, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="logits of a whole step are seen in its graph")
def test_a_step_with_metrics_makes_no_logits():
    model = keras_mp.lean.make_lean(gpt2(run_eagerly=False))
    x, y, weights = data(model, np.random.default_rng())
    called = []
    original = keras.metrics.SparseCategoricalAccuracy.update_state
    keras.metrics.SparseCategoricalAccuracy.update_state = lambda *args, **kwargs: called.append(1)
    try:
        model.train_on_batch(x, y, weights)
    finally:
        keras.metrics.SparseCategoricalAccuracy.update_state = original
    assert not called
