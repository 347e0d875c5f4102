"""LoRA on an int4 Gemma under mixed precision: it learns, goes on after a crash, and is exported merged."""

import adapted_models
import keras
import numpy as np
import pytest
from resumable import Act, Crash

import keras_mp
from keras_mp.conversion.to_float32 import merged_float32
from keras_mp.fp8.convert import decisions

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("float32_policy")]

STEPS, EPOCHS = 4, 3


class Planted(keras_mp.training.Batches):
    """The same text in each step."""

    def __init__(self):
        super().__init__(examples=2 * STEPS, batch_size=2, seed=0)

    def batch(self, epoch, step):
        return adapted_models.tokens(rows=2)


def build(policy, state_dtype=None, **sizes):
    """LoRA on an int4 base, prepared for training."""
    model = adapted_models.gemma(policy, **sizes)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return keras_mp.prepare(model, keras.optimizers.Adam(0.03), loss, state_dtype=state_dtype)


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


def test_lora_on_int4_learns_a_text_and_its_merged_export_knows_it(tmp_path):
    model = build("mixed_bfloat16")
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
    merged = merged_float32(model)
    assert continued(merged, adapted_models.PLANTED[:1], len(adapted_models.PLANTED)) == list(adapted_models.PLANTED)


def test_a_crashed_training_on_int4_ends_bit_for_bit_like_one_that_was_not(tmp_path):
    """Trained by one model, which gets the values of another seed in between: int4 codes, too."""
    model, other = build("mixed_float16"), build("mixed_float16", seed=4)
    for each in (model, other):
        each.optimizer.build(each.trainable_variables)
    start, other_start = values(model), values(other)

    def train(folder, start, *actions):
        model._initial_epoch, batches = None, Planted()
        for variable, value in zip([*model.variables, *model.optimizer.variables], start, strict=True):
            variable.assign(value)
        checkpoint = keras_mp.TrainingCheckpoint(folder, batches, every=2)
        # KerasHub's own fit, which preprocesses text, takes no PyDataset.
        callbacks = [*actions, checkpoint]
        keras.Model.fit(model, batches, epochs=EPOCHS, shuffle=False, verbose=0, callbacks=callbacks)
        return values(model)

    def crash(callback):
        raise Crash

    whole = train(tmp_path / "whole", start)
    place = divmod(int(np.random.default_rng().integers(2, EPOCHS * STEPS - 1)), STEPS)
    print(f"crashed after epoch {place[0]}, step {place[1]}")
    with pytest.raises(Crash):
        train(tmp_path / "crashed", start, Act(place, crash))
    for one, two in zip(whole, train(tmp_path / "crashed", other_start), strict=True):
        np.testing.assert_array_equal(two, one)


def test_only_what_trains_has_states_in_8_bits():
    # Of a rank at which LoRA's weights have so many values that they are stored in 8 bits.
    model = build("mixed_bfloat16", state_dtype="float8", rank=64)
    x, y = adapted_models.tokens(rows=2)
    losses = model.fit(x, y, batch_size=2, epochs=60, verbose=0).history["loss"]
    assert losses[-1] < losses[0] / 4
    trainable = sum(int(np.prod(v.shape)) for v in model.trainable_variables)
    stored = [v for v in model.optimizer.variables if "float8" in str(v.dtype)]
    assert 0 < sum(int(np.prod(v.shape)) for v in stored) <= 2 * trainable
    assert sum(int(np.prod(v.shape)) for v in model.optimizer.variables) < 3 * trainable


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


def test_8_bit_states_of_a_model_that_trains_nothing():
    model = adapted_models.gemma("mixed_float16", rank=0)
    model.trainable = False
    x, y = adapted_models.tokens(rows=2)
    model = keras_mp.prepare(model, "adam", "sparse_categorical_crossentropy", state_dtype="float8")
    before = [keras.ops.convert_to_numpy(v) for v in model.weights]
    assert np.isfinite(model.fit(x, y, verbose=0).history["loss"][0])
    for variable, value in zip(model.weights, before, strict=True):
        np.testing.assert_array_equal(keras.ops.convert_to_numpy(variable), value)
