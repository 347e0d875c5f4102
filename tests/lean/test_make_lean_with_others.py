"""Lean models beside the kit's other changes: FP8, `stabilize`, LoRA, checkpoints, exports, `generate`."""

import warnings

import keras
import numpy as np
import pytest
from keras import layers
from marks import few, slow_on

import keras_mp
from keras_mp import fp8
from keras_mp.fp8.layers import Float8Layer
from keras_mp.rebuild import layers_by_path

pytest.importorskip("keras_hub")

import causal_models
import keras_hub
from test_make_lean import assert_same_step, changes, compiled, data, kinds

pytestmark = [pytest.mark.ci, slow_on("jax"), pytest.mark.usefixtures("float32_policy")]
EVERY = {"attention", "gelu", "head"}


def gpt2(dropout=0.0):
    _, arguments = causal_models.DECODERS["GPT2CausalLM"]
    backbone = keras_hub.models.GPT2Backbone(**arguments, dropout=dropout)
    return compiled(keras_hub.models.GPT2CausalLM(backbone=backbone, preprocessor=None))


@pytest.mark.parametrize("lean_first", few([True, False], True))
def test_stabilize_before_and_after(lean_first):
    keras.config.set_dtype_policy("mixed_bfloat16")
    model = gpt2()
    x, y, weights = data(model, np.random.default_rng())
    stable = keras_mp.stabilize(model)
    both = keras_mp.stabilize(keras_mp.make_lean(model)) if lean_first else keras_mp.make_lean(stable)
    assert kinds(both) == EVERY and keras_mp.sensitive_layers(both) == []
    plain = keras_mp.undo_lean(both)
    assert kinds(plain) == set() and keras_mp.sensitive_layers(plain) == []
    # Both have their logits and softmax in float32.
    assert_same_step(changes(both, x, y, weights), changes(stable, x, y, weights), tolerance=2e-2)


@pytest.mark.parametrize("lean_first", few([True, False], True))
def test_fp8_before_and_after(lean_first):
    model = gpt2()
    x, y, weights = data(model, np.random.default_rng())

    def converted(model):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # float32 layers in FP8
            return fp8.convert(model, select=lambda path, layer: "feedforward" in path)

    expected = converted(model)
    both = converted(keras_mp.make_lean(model)) if lean_first else keras_mp.make_lean(expected)
    assert kinds(both) == EVERY
    in_fp8 = [sum(isinstance(x, Float8Layer) for x in layers_by_path(m).values()) for m in (both, expected)]
    assert in_fp8[0] == in_fp8[1] > 0
    assert_same_step(changes(both, x, y, weights), changes(expected, x, y, weights), tolerance=1e-3)
    reverted = fp8.revert(both)
    assert kinds(reverted) == EVERY
    assert not any(isinstance(layer, Float8Layer) for layer in layers_by_path(reverted).values())


@pytest.mark.parametrize("lean_first", few([True, False], True))
def test_lora_before_and_after(lean_first):
    model = gpt2()
    x, y, weights = data(model, np.random.default_rng())
    if lean_first:
        lean = keras_mp.make_lean(model)
        for each in (model, lean):
            each.backbone.enable_lora(2)
        for ours, theirs in zip(lean.weights, model.weights, strict=True):
            ours.assign(keras.ops.convert_to_numpy(theirs))
        compiled(lean), compiled(model)
    else:
        model.backbone.enable_lora(2)
        lean = keras_mp.make_lean(compiled(model))
    assert kinds(lean) == EVERY
    assert len(lean.trainable_weights) == len(model.trainable_weights) < len(model.weights)
    assert_same_step(changes(lean, x, y, weights), changes(model, x, y, weights))


def test_generate_gives_the_same_tokens():
    model = gpt2(dropout=0.1)
    model.compile(sampler="greedy")
    lean = keras_mp.make_lean(model)
    prompt, _, _ = data(model, np.random.default_rng())
    prompt["padding_mask"] = np.repeat(np.arange(8) < 3, 3).reshape(8, 3).T.astype("int32")
    lean.sampler = model.sampler
    ours, theirs = (np.asarray(m.generate(prompt, stop_token_ids=None)["token_ids"]) for m in (lean, model))
    np.testing.assert_array_equal(ours, theirs)


def test_a_killed_fit_goes_on(tmp_path):
    model = keras_mp.make_lean(gpt2())
    x, y, _ = data(model, np.random.default_rng())
    saves = keras_mp.TrainingCheckpoint(tmp_path)
    model.fit(x, y, epochs=1, callbacks=[saves], verbose=0)
    again = keras_mp.make_lean(gpt2())
    again.fit(x, y, epochs=2, callbacks=[keras_mp.TrainingCheckpoint(tmp_path)], verbose=0)
    model.fit(x, y, epochs=2, initial_epoch=1, verbose=0)
    for ours, theirs in zip(again.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)


def test_an_export_holds_the_plain_layers(tmp_path):
    keras.config.set_dtype_policy("mixed_bfloat16")
    tokens = keras.Input((6,), dtype="int32")
    x = layers.Embedding(20, 8)(tokens)
    x = layers.Dense(8, activation="gelu")(layers.MultiHeadAttention(2, 4)(x, x))
    lean = keras_mp.make_lean(keras.Model(tokens, layers.Dense(3)(x)))
    assert kinds(lean) == {"attention", "gelu"}
    tokens = np.random.default_rng().integers(0, 20, (2, 6)).astype("int32")
    keras_mp.export_float32(lean, tmp_path / "exported", verify=tokens)  # looks for 16-bit numbers itself


def whisper():
    backbone = keras_hub.models.WhisperBackbone(
        vocabulary_size=30, num_layers=1, num_heads=2, hidden_dim=16, intermediate_dim=32, num_mels=4, dropout=0.0,
        max_encoder_sequence_length=8, max_decoder_sequence_length=8,
    )  # fmt: skip
    generator = np.random.default_rng()
    x = {
        "encoder_features": generator.normal(size=(2, 8, 4)).astype("float32"),
        "decoder_token_ids": generator.integers(0, 30, (2, 6)), "decoder_padding_mask": np.ones((2, 6), "int32"),
    }  # fmt: skip
    return backbone, x


def bert():
    backbone = keras_hub.models.BertBackbone(
        vocabulary_size=30, num_layers=2, num_heads=2, hidden_dim=16, intermediate_dim=32, max_sequence_length=8
    )
    padding = np.ones((2, 8), "int32")
    padding[0, 4:] = 0
    tokens = np.random.default_rng().integers(0, 30, (2, 8))
    return backbone, {"token_ids": tokens, "segment_ids": tokens * 0, "padding_mask": padding}


def vit():
    backbone = keras_hub.models.ViTBackbone(
        image_shape=(16, 16, 3), patch_size=4, num_layers=2, num_heads=2, hidden_dim=16, mlp_dim=32
    )
    return backbone, np.random.default_rng().normal(size=(2, 16, 16, 3)).astype("float32")


@pytest.mark.parametrize("build", few([whisper, bert, vit], bert))
def test_an_encoder_makes_the_same_step(build):
    backbone, x = build()
    inputs = {tensor.name: keras.Input(tensor.shape[1:], dtype=tensor.dtype) for tensor in backbone.inputs}
    outputs = keras.tree.flatten(backbone(inputs if isinstance(x, dict) else list(inputs.values())[0]))
    sums = [keras.ops.mean(keras.ops.square(output), axis=tuple(range(1, len(output.shape)))) for output in outputs]
    model = keras.Model(list(inputs.values()), keras.ops.stack(sums, axis=-1))
    model.compile(keras.optimizers.SGD(1.0), "mse")
    lean = keras_mp.make_lean(model)
    assert {"attention", "gelu"} <= kinds(lean)
    x = [x[tensor.name] for tensor in backbone.inputs] if isinstance(x, dict) else x
    y = np.random.default_rng().normal(size=(2, len(outputs))).astype("float32")
    assert_same_step(changes(lean, x, y), changes(model, x, y))


def test_bfloat16_is_no_farther_from_float32():
    generator = np.random.default_rng()
    model = gpt2()
    keras.config.set_dtype_policy("mixed_bfloat16")
    low = gpt2()
    models, start = (model, low, keras_mp.make_lean(low)), model.get_weights()
    ratios = []
    for _ in range(12):  # of one draw alone the ratio varies by 0.07
        values = [value + generator.normal(0, 0.2, value.shape) for value in start]  # logits far apart enough to round
        x, y, weights = data(model, generator)
        for each in models:
            each.set_weights(values)
        exact, plain, ours = (changes(each, x, y, weights)[1] for each in models)
        errors = [
            np.sqrt(sum(np.square(a - b).sum() for a, b in zip(each, exact, strict=True))) for each in (ours, plain)
        ]
        ratios.append(np.log(errors[0] / errors[1]))
    assert np.exp(np.mean(ratios)) <= 1.1  # five standard deviations of the mean above 1


@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="logits of a whole step are seen in its graph")
def test_a_step_with_metrics_makes_no_logits():
    model = keras_mp.make_lean(gpt2())
    x, y, weights = data(model, np.random.default_rng())
    called = []
    original = keras.metrics.SparseCategoricalAccuracy.update_state
    keras.metrics.SparseCategoricalAccuracy.update_state = lambda *args, **kwargs: called.append(1)
    try:
        model.train_on_batch(x, y, weights)
    finally:
        keras.metrics.SparseCategoricalAccuracy.update_state = original
    assert not called
