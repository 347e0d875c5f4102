"""A KerasHub backbone's adapters, in a file: of a model that was made ready for training, into a fresh backbone."""

import causal_models
import keras
import numpy as np
import pytest

import keras_mp


@pytest.mark.slow
def test_adapters_of_a_prepared_model_are_saved_and_fit_the_backbone_anywhere(tmp_path):
    # Without biases, which enable_lora() leaves trainable and save_lora_weights() leaves out.
    model, fresh = (causal_models.build("Llama3CausalLM", tie_word_embeddings=False) for _ in range(2))
    fresh = fresh.backbone
    fresh.set_weights(model.backbone.get_weights())
    model.backbone.enable_lora(2)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model = keras_mp.prepare(model, keras.optimizers.SGD(1.0), loss)
    tokens = np.random.default_rng().integers(1, 20, (4, 8))
    x = {"token_ids": tokens, "padding_mask": np.ones_like(tokens)}
    for _ in range(2):
        model.train_on_batch(x, tokens)
    model.backbone.save_lora_weights(tmp_path / "adapters.lora.h5")

    before = np.asarray(fresh(x))
    fresh.load_lora_weights(tmp_path / "adapters.lora.h5")
    trained = np.asarray(model.backbone(x))
    np.testing.assert_allclose(np.asarray(fresh(x)), trained, atol=1e-5)
    assert np.abs(before - trained).max() > 1e-3
