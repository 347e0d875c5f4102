"""LoRA on an int4 Gemma under mixed precision: it learns, and is exported merged."""

import adapted_models
import keras
import numpy as np
import pytest

import keras_mp
from keras_mp.conversion.to_float32 import merged_float32
from keras_mp.fp8.convert import decisions

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("float32_policy")]


def continued(model, start, length):
    """The tokens that a model gives after others, greedily."""
    tokens = list(start)
    while len(tokens) < length:
        row = np.array([tokens])
        logits = adapted_models.logits(model, {"token_ids": row, "padding_mask": np.ones_like(row)})
        tokens.append(int(logits[0, -1].argmax()))
    return tokens


def test_lora_on_int4_learns_a_text_and_its_merged_export_knows_it(tmp_path):
    """With states in 8 bits: of a rank at which LoRA's weights have so many values that they are stored so."""
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model = adapted_models.gemma("mixed_bfloat16", rank=64)
    keras_mp.prepare(model, keras.optimizers.Adam(0.03), loss, state_dtype="float8")
    frozen = {v.path: keras.ops.convert_to_numpy(v) for v in model.non_trainable_variables if "seed" not in v.path}
    x, y = adapted_models.tokens(rows=2)
    losses = model.fit(x, y, batch_size=2, epochs=150, verbose=0).history["loss"]
    assert losses[0] > 2 and losses[-1] < 0.02
    assert continued(model, adapted_models.PLANTED[:1], len(adapted_models.PLANTED)) == list(adapted_models.PLANTED)
    for variable in model.non_trainable_variables:
        if variable.path in frozen:
            np.testing.assert_array_equal(keras.ops.convert_to_numpy(variable), frozen[variable.path])
    trainable = sum(int(np.prod(v.shape)) for v in model.trainable_variables)
    stored = [v for v in model.optimizer.variables if "float8" in str(v.dtype)]
    assert 0 < sum(int(np.prod(v.shape)) for v in stored) <= 2 * trainable
    assert sum(int(np.prod(v.shape)) for v in model.optimizer.variables) < 3 * trainable
    report = keras_mp.export_float32(model, tmp_path / "exported", x)
    # `unmerged_float32` is Keras's own quantized model in float32; what is left is the order of float32 sums.
    assert report.max_difference <= 1e-5
    merged = merged_float32(model)
    assert continued(merged, adapted_models.PLANTED[:1], len(adapted_models.PLANTED)) == list(adapted_models.PLANTED)


def test_int4_with_lora_and_an_fp8_layer_train_together():
    layers = [keras.layers.Dense(32, name="first"), keras.layers.Dense(32, name="last")]
    model = keras.Sequential([keras.Input((32,)), *layers])
    adapted_models.adapt(model.layers[0], "int4")
    model = keras_mp.convert(model, select=lambda path, layer: True)
    model = keras_mp.prepare(model, keras.optimizers.Adam(0.01), "mse")
    first, last = model.layers
    codes, kernel = (keras.ops.convert_to_numpy(weight) for weight in (first._kernel, last.kernel))
    x = np.random.default_rng().normal(size=(64, 32)).astype("float32")
    losses = model.fit(x, np.tanh(x[:, ::-1]), epochs=20, verbose=0).history["loss"]
    assert losses[-1] < 0.8 * losses[0]
    np.testing.assert_array_equal(keras.ops.convert_to_numpy(first._kernel), codes)
    assert np.any(keras.ops.convert_to_numpy(last.kernel) != kernel)
    (path,) = [d.path for d in decisions(model) if d.float8]
    assert path == "last" and first.lora_enabled
