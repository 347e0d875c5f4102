"""KerasHub's language models, whose logits come from an embedding inside the backbone, called the other way round."""

import warnings

import keras
import numpy as np
import pytest
from arrays import numpy, rounded, values

import keras_mp

pytest.importorskip("keras_hub")

import causal_models
from twins import twin

from keras_mp.rebuild.walk import precision_of_layer

TENSORFLOW = keras.backend.backend() == "tensorflow"

SOFT_CAP = {"GemmaCausalLM": 3.0}


@pytest.fixture(autouse=True)
def mixed_float16(float32_policy):
    keras.config.set_dtype_policy("mixed_float16")


def stabilized(model):
    """The stabilized model, which nothing must be missing from."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="(?s).*could not change some layers.*")
        return keras_mp.stabilize(model)


def spread(model):
    """Moves the weights so far from where they begin that logits rounded to float16 are not the exact ones."""
    for weight in model.weights:
        if keras.backend.is_float_dtype(weight.dtype):
            noise = np.random.default_rng().normal(0, 0.3, tuple(weight.shape))
            weight.assign(keras.ops.convert_to_numpy(weight) + noise.astype("float32"))


def logits_in_float64(model, x, cap, precision):
    """The product of the 16-bit features and the 16-bit embeddings, exactly."""
    embedding = model.backbone.token_embedding
    kernel = numpy(embedding.embeddings).T if embedding.tie_weights else numpy(embedding.reverse_embeddings)
    logits = numpy(model.backbone(x)).astype("float64") @ rounded(kernel, precision)
    return logits if cap is None else cap * np.tanh(logits / cap)


# On JAX, KerasHub's Llama does not run in float16 on a CPU: jax.nn has no such attention there.
@pytest.mark.parametrize(
    "name,precision",
    [
        ("GPT2CausalLM", "float16"),
        ("Llama3CausalLM", "bfloat16"),
        ("GemmaCausalLM", "float16"),
    ],
)
def test_the_logits_of_a_causal_language_model_are_float32(name, precision):
    keras.config.set_dtype_policy(f"mixed_{precision}")
    model = causal_models.build(name)
    spread(model)
    x = causal_models.batch(model)
    assert any("token_embedding" in each.path for each in keras_mp.stability.sensitive.sensitive_layers(model))
    new = stabilized(twin(model))
    assert keras_mp.stability.sensitive.sensitive_layers(new) == []
    assert new.output.dtype == "float32"
    assert keras.backend.standardize_dtype(new(x).dtype) == "float32"
    # Eagerly, as the features of the reference: a compiled program rounds these elsewhere.
    exact = logits_in_float64(new, x, SOFT_CAP.get(name), precision)
    np.testing.assert_allclose(numpy(new(x)), exact, rtol=1e-5, atol=1e-5)
    assert np.abs(numpy(model(x)) - logits_in_float64(model, x, SOFT_CAP.get(name), precision)).max() > 1e-4
    embedding = new.backbone.token_embedding
    assert precision_of_layer(embedding) == precision, "the operands of the product"
    if embedding.tie_weights:
        assert [weight.path.split("/")[-1] for weight in embedding.weights] == ["embeddings"]
    np.testing.assert_equal(values(new.weights), values(model.weights))


def test_a_tied_llama_stays_tied():
    """Its get_config() forgets tie_word_embeddings, so that Keras's own copy has a second matrix of random numbers."""
    model = causal_models.build("Llama3CausalLM")
    assert model.backbone.token_embedding.tie_weights
    copy = type(model).from_config(model.get_config())
    assert not copy.backbone.token_embedding.tie_weights, "KerasHub has mended this: with_left_out may be dropped"
    assert stabilized(model).backbone.token_embedding.tie_weights


@pytest.mark.slow
def test_it_generates():
    model = stabilized(causal_models.build("GPT2CausalLM"))
    x = causal_models.batch(model)
    model.compile(sampler="greedy", run_eagerly=TENSORFLOW)
    prompt = {**x, "padding_mask": np.repeat([[1] * 4 + [0] * 4], 4, axis=0)}
    generated = model.generate(prompt, stop_token_ids=None)["token_ids"]
    # Greedy: each token is the one with the largest logit after those before it.
    again = model.predict_on_batch({**x, "token_ids": generated})
    ranks = (again[:, 3:-1] > np.take_along_axis(again[:, 3:-1], generated[:, 4:, None], -1)).sum(-1)
    assert ranks.max() <= 1, "largest, but for a tie in the cached path's 16-bit attention"
