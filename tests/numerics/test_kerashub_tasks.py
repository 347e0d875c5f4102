"""KerasHub's tasks, as they come: compiled by themselves, through a compile() of their own, in mixed precision."""

import keras
import numpy as np
import pytest

import keras_mp
from keras_mp.loss_scaling.optimizer import LossScaleOptimizer

pytestmark = pytest.mark.slow

hub = pytest.importorskip("keras_hub")
JAX = keras.backend.backend() == "jax"


def bert_text_classifier():
    sizes = dict(vocabulary_size=20, num_layers=1, num_heads=2, hidden_dim=8, intermediate_dim=16, dropout=0)
    backbone = hub.models.BertBackbone(**sizes, max_sequence_length=8)
    model = hub.models.BertTextClassifier(backbone, num_classes=2, dropout=0)
    tokens = np.random.default_rng().integers(1, 20, (4, 8))
    x = {"token_ids": tokens, "segment_ids": np.zeros_like(tokens), "padding_mask": np.ones_like(tokens)}
    return model, x, tokens[:, 0] % 2


def llama3_causal_lm():
    sizes = dict(vocabulary_size=20, num_layers=1, num_query_heads=2, num_key_value_heads=1, hidden_dim=8)
    model = hub.models.Llama3CausalLM(hub.models.Llama3Backbone(**sizes, intermediate_dim=16))
    tokens = np.random.default_rng().integers(1, 20, (4, 8))
    return model, {"token_ids": tokens, "padding_mask": np.ones_like(tokens)}, tokens


def vit_image_classifier():
    sizes = dict(image_shape=(8, 8, 3), patch_size=4, num_layers=1, num_heads=2, hidden_dim=8, mlp_dim=16)
    model = hub.models.ViTImageClassifier(hub.models.ViTBackbone(**sizes), num_classes=2)
    rng = np.random.default_rng()
    return model, rng.random((4, 8, 8, 3), dtype="float32"), rng.integers(0, 2, 4)


TASKS = (bert_text_classifier, llama3_causal_lm, vit_image_classifier)


def cross_entropy(logits, labels):
    logits = np.asarray(logits, "float64")
    logits -= logits.max(-1, keepdims=True)
    log_probabilities = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return -np.take_along_axis(log_probabilities, labels[..., None], -1).mean()


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("policy", ["mixed_float16"])
def test_a_compiled_task_in_mixed_precision_is_audited(task, policy):
    keras.config.set_dtype_policy(policy)
    model, x, y = task()
    weights = [np.array(weight) for weight in model.get_weights()]
    report = keras_mp.audit(model, (x, y))

    keras.config.set_dtype_policy("float32")
    plain, *_ = task()
    plain.set_weights(weights)
    assert np.isclose(report.loss, cross_entropy(keras.ops.convert_to_numpy(plain(x)), y), rtol=1e-5)
    assert all(np.array_equal(now, before) for now, before in zip(model.get_weights(), weights, strict=True))


def test_a_compiled_task_is_searched_and_built_again_with_its_loss_and_its_scaler():
    task = llama3_causal_lm
    # On JAX neither Keras nor the compiler has float16 attention on a CPU, and plain Keras cannot train there.
    low = "mixed_bfloat16" if JAX else "mixed_float16"
    keras.config.set_dtype_policy(low)
    model, x, y = task()
    search = keras_mp.search_policy(model, [(x, y), (x, y)], [low, "float32"], tolerance=0.5, steps=1, held_out=1)
    assert search.shares[low] > 0
    built = search.apply(lambda: task()[0])
    assert built.compiled and built.loss is not None
    assert isinstance(built.optimizer, LossScaleOptimizer) == (not JAX)
    assert np.isfinite(built.fit(x, y, batch_size=4, verbose=0).history["loss"]).all()


@pytest.mark.jax
@pytest.mark.skipif(not JAX, reason="TensorFlow has float16 attention on a CPU")
def test_float16_attention_that_jax_has_not_is_said_to_be_kerass_own_failure():
    keras.config.set_dtype_policy("mixed_float16")
    model, x, y = vit_image_classifier()
    with pytest.raises(ValueError, match="F16_F16_F32"):  # on a model of its own: a fit that fails on JAX ruins it
        vit_image_classifier()[0].fit(x, y, batch_size=4, verbose=0)
    with pytest.raises(ValueError, match="step in float16.* plain Keras fails, too: .*F16_F16_F32"):
        keras_mp.numerics.find_nonfinite(model, (x, y))
