"""A KerasHub backbone's adapters, in a file: of a model that was made ready for training, into a fresh backbone."""

import keras
import numpy as np
import pytest

import keras_mp

pytestmark = pytest.mark.slow

hub = pytest.importorskip("keras_hub")


def backbone():
    # Without biases, which enable_lora() leaves trainable and save_lora_weights() leaves out.
    sizes = dict(vocabulary_size=20, num_layers=2, num_query_heads=2, num_key_value_heads=1, hidden_dim=16)
    return hub.models.Llama3Backbone(**sizes, intermediate_dim=32)


def test_adapters_of_a_prepared_model_are_saved_and_fit_the_backbone_anywhere(tmp_path):
    model = hub.models.Llama3CausalLM(backbone(), preprocessor=None)
    fresh = backbone()
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
