"""LoRA on an int4 Gemma under mixed precision: it learns, goes on after SIGKILL, and is exported merged."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import adapted_models
import adapted_training
import keras
import numpy as np
import pytest
from marks import at_least, few, slow_on

import keras_mp
from keras_mp.conversion.merged_float32 import merged_float32

pytestmark = [pytest.mark.ci, pytest.mark.usefixtures("float32_policy")]

POLICIES = ["float32", "mixed_bfloat16", "mixed_float16"]


def values(model):
    return [np.asarray(keras.ops.convert_to_numpy(v)) for v in (*model.variables, *model.optimizer.variables)]


def continued(model, start, length):
    """The tokens that a model gives after others, greedily."""
    tokens = list(start)
    while len(tokens) < length:
        row = np.array([tokens])
        logits = adapted_models.logits(model, {"token_ids": row, "padding_mask": np.ones_like(row)})
        tokens.append(int(logits[0, -1].argmax()))
    return tokens


@pytest.mark.parametrize("policy", few(POLICIES, "mixed_bfloat16"))
def test_lora_on_int4_learns_a_text_and_its_merged_export_knows_it(policy, tmp_path):
    model = adapted_training.build(policy)
    frozen = {v.path: keras.ops.convert_to_numpy(v) for v in model.non_trainable_variables if "seed" not in v.path}
    x, y = adapted_models.tokens(rows=2)
    losses = model.fit(x, y, batch_size=2, epochs=150, verbose=0).history["loss"]
    assert losses[0] > 2 and losses[-1] < 0.02
    assert continued(model, adapted_models.PLANTED[:1], len(adapted_models.PLANTED)) == list(adapted_models.PLANTED)
    for variable in model.non_trainable_variables:
        if variable.path in frozen:
            np.testing.assert_array_equal(keras.ops.convert_to_numpy(variable), frozen[variable.path])
    report = keras_mp.export_float32(model, tmp_path / "exported", x)
    # `unmerged_float32` is Keras's own quantized model in float32; what is left is the order of float32 sums.
    assert report.max_difference <= 1e-5
    if policy == "float32":  # the trained model itself
        assert report.precision_gap <= 1e-5
    merged = merged_float32(model)
    assert continued(merged, adapted_models.PLANTED[:1], len(adapted_models.PLANTED)) == list(adapted_models.PLANTED)


@slow_on("jax")
@pytest.mark.parametrize("policy", at_least(POLICIES, "mixed_float16"))
def test_a_killed_training_on_int4_ends_bit_for_bit_like_one_that_was_not(policy, tmp_path):
    whole = adapted_training.train(policy, tmp_path / "whole")
    done = int(np.random.default_rng().integers(2, adapted_training.EPOCHS * adapted_training.STEPS - 1))
    place = divmod(done, adapted_training.STEPS)
    program = Path(adapted_training.__file__)
    command = [str(word) for word in (sys.executable, program, policy, tmp_path / "killed", *place)]
    environment = os.environ | {"PYTHONPATH": str(program.parents[2]), "KERAS_BACKEND": keras.backend.backend()}
    killed = subprocess.run(command, stderr=subprocess.PIPE, timeout=280, env=environment)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    print(f"killed after epoch {place[0]}, step {place[1]}")
    # Of another seed: what the checkpoint lacked would differ, int4 codes too.
    resumed = adapted_training.train(policy, tmp_path / "killed", seed=4)
    for one, other in zip(values(whole), values(resumed), strict=True):
        np.testing.assert_array_equal(other, one)


def test_only_what_trains_has_states_in_8_bits():
    # Of a rank at which LoRA's weights have so many values that they are stored in 8 bits.
    model = adapted_training.build("mixed_bfloat16", state_dtype="float8", rank=64)
    x, y = adapted_models.tokens(rows=2)
    losses = model.fit(x, y, batch_size=2, epochs=60, verbose=0).history["loss"]
    assert losses[-1] < losses[0] / 4
    trainable = sum(int(np.prod(v.shape)) for v in model.trainable_variables)
    stored = [v for v in model.optimizer.variables if "float8" in str(v.dtype)]
    assert 0 < sum(int(np.prod(v.shape)) for v in stored) <= 2 * trainable
    assert sum(int(np.prod(v.shape)) for v in model.optimizer.variables) < 3 * trainable


def test_lora_after_training_began_is_an_error():
    """The optimizer holds the weights that it was built for."""
    x, y = np.ones((4, 8), "float32"), np.ones((4, 2), "float32")
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(8), keras.layers.Dense(2)])
    model = keras_mp.prepare(model, "adam", "mse")
    model.fit(x, y, verbose=0)
    model.layers[0].enable_lora(2)
    model.train_function = None
    with pytest.raises((ValueError, KeyError), match="(?i)variable"):
        model.fit(x, y, verbose=0)


def test_fp8_leaves_quantized_layers_out_and_says_why():
    model = keras.Sequential(
        [keras.Input((32,)), keras.layers.Dense(32, name="first"), keras.layers.Dense(32, name="last")]
    )
    model.layers[0].quantize("int4")
    new = keras_mp.fp8.convert(model, select=lambda path, layer: True)
    reasons = {decision.path: (decision.float8, decision.reason) for decision in keras_mp.fp8.explain(new)}
    assert reasons["first"] == (False, "it is quantized to int4") and reasons["last"][0] is True
    assert new.layers[0].quantization_mode == "int4"


def test_int4_with_lora_and_an_fp8_layer_train_together():
    layers = [keras.layers.Dense(32, name="first"), keras.layers.Dense(32, name="last")]
    model = keras.Sequential([keras.Input((32,)), *layers])
    adapted_models.adapt(model.layers[0], "int4")
    model = keras_mp.fp8.convert(model, select=lambda path, layer: True)
    model = keras_mp.prepare(model, keras.optimizers.Adam(0.01), "mse")
    first, last = model.layers
    codes, kernel = (keras.ops.convert_to_numpy(weight) for weight in (first._kernel, last.kernel))
    x = np.random.default_rng().normal(size=(64, 32)).astype("float32")
    losses = model.fit(x, np.tanh(x[:, ::-1]), epochs=20, verbose=0).history["loss"]
    assert losses[-1] < 0.8 * losses[0]
    np.testing.assert_array_equal(keras.ops.convert_to_numpy(first._kernel), codes)
    assert np.any(keras.ops.convert_to_numpy(last.kernel) != kernel)
    (path,) = [d.path for d in keras_mp.fp8.explain(model) if d.float8]
    assert path == "last" and first.lora_enabled


def test_8_bit_states_of_a_model_that_trains_nothing():
    model = adapted_models.gemma("mixed_float16", rank=0)
    model.trainable = False
    x, y = adapted_models.tokens(rows=2)
    model = keras_mp.prepare(model, "adam", "sparse_categorical_crossentropy", state_dtype="float8")
    before = [keras.ops.convert_to_numpy(v) for v in model.weights]
    assert np.isfinite(model.fit(x, y, verbose=0).history["loss"][0])
    for variable, value in zip(model.weights, before, strict=True):
        np.testing.assert_array_equal(keras.ops.convert_to_numpy(variable), value)
