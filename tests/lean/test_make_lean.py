"""`make_lean` on models of Keras and KerasHub: the same step before and after, and the way back."""

import gc
import weakref

import keras
import numpy as np
import own_blocks
import pytest
from keras import layers
from same_step import assert_same_step, compiled, lean_of, optimizer, step
from thirds import thirds

import keras_mp
from keras_mp.rebuild.walk import Walk

pytest.importorskip("keras_hub")

import causal_models
from twins import twin

pytestmark = pytest.mark.usefixtures("float32_policy")
LENGTH = 8
# Their embeddings belong to another scale, so that logits are far apart.
MODELS = causal_models.DECODERS | causal_models.TWO_SIDED


def data(model, generator):
    """Tokens for each input, their successors, and weights; the first row is padded."""
    tokens = generator.integers(1, causal_models.VOCABULARY, (3, LENGTH))
    padding = np.ones((3, LENGTH), "int32")
    padding[0, 5:] = 0
    x = {tensor.name: padding if "mask" in tensor.name else tokens for tensor in model.inputs}
    return x, np.roll(tokens, -1, 1), padding.astype("float32") * generator.uniform(0.5, 1, padding.shape)


def kinds(model):
    return {row.kind for row in keras_mp.lean.lean_model.lean_parts(Walk(model)) if row.done}


GPT2 = "GPT2CausalLM"
IN_A_GRAPH = pytest.param(GPT2, True, marks=pytest.mark.slow)  # the others eagerly, which is faster than to trace them


@pytest.mark.parametrize(
    "name, graph", [(GPT2, False), IN_A_GRAPH, *thirds((name, False) for name in MODELS if name != GPT2)]
)
def test_a_language_model_makes_the_same_step(name, graph, one_mask):
    model = compiled(causal_models.build(name), run_eagerly=own_blocks.EAGERLY and not graph)
    lean = lean_of(model)
    x, y, weights = data(model, np.random.default_rng())
    # A share of a tenth: T5 does not scale its scores, and gradients of its queries are small sums of large terms.
    assert_same_step(step(lean, x, y, weights), step(model, x, y, weights), least=0.1)
    if name == GPT2:
        lean.set_weights(model.get_weights())
        evaluated = [m.test_on_batch(x, y, sample_weight=weights, return_dict=True) for m in (lean, model)]
        assert evaluated[0] == pytest.approx(evaluated[1], rel=1e-5, abs=1e-6)
    parts = keras_mp.lean.lean_model.lean_parts(Walk(lean))
    assert parts and all(row.done or row.reason for row in parts)


def test_what_is_lean_is_listed_and_its_weights_files_are_plain(tmp_path):
    model = compiled(causal_models.build(GPT2))
    lean = keras_mp.lean.make_lean(twin(model))
    assert kinds(model) == set() and kinds(lean) == {"attention", "gelu", "head"}
    assert "5 of 5 parts are lean" in str(keras_mp.report(lean))
    lean.save_weights(tmp_path / "lean.weights.h5")
    plain = causal_models.build(GPT2)
    plain.load_weights(tmp_path / "lean.weights.h5")
    np.testing.assert_equal(plain.get_weights(), model.get_weights())


@pytest.mark.parametrize(
    "kind, dropout", [pytest.param("multi-head", 0.3, marks=pytest.mark.jax), ("grouped", 0.0), ("grouped", 0.3)]
)
def test_keras_attention_with_masks_makes_the_same_step(kind, dropout, one_mask):
    generator = np.random.default_rng()
    tokens = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(20, 12, mask_zero=True)(tokens)
    seed = int(generator.integers(1000))
    if kind == "grouped":
        attend = layers.GroupQueryAttention(3, 4, 2, dropout=dropout, seed=seed)
    else:
        attend = layers.MultiHeadAttention(4, 3, dropout=dropout, seed=seed)
    x = layers.Dense(6, activation="gelu")(attend(x, x, use_causal_mask=True))
    model = keras.Model(tokens, layers.Lambda(lambda x: keras.ops.mean(x, (1, 2))[:, None])(x))
    model.compile(optimizer(), "mse", run_eagerly=own_blocks.EAGERLY and kind == "grouped")
    lean = lean_of(model)
    assert kinds(lean) == {"attention", "gelu"}
    numbers, targets = generator.integers(0, 20, (4, LENGTH)), generator.normal(size=(4, 1))
    numbers[0, 3:] = 0  # rows that see no key, where a mask of the queries counts too
    assert_same_step(step(lean, numbers, targets), step(model, numbers, targets))


def test_a_model_with_nothing_to_make_lean_says_so():
    model = keras.Sequential([keras.Input((4,)), layers.Dense(3)])
    with pytest.warns(UserWarning, match="nothing in the model can become lean. It has no attention layer, no GELU"):
        new = keras_mp.lean.make_lean(twin(model))
    x = np.random.default_rng().normal(size=(2, 4)).astype("float32")
    np.testing.assert_array_equal(new.predict(x, verbose=0), model.predict(x, verbose=0))


def small_language_model(in_a_dict):
    inputs = keras.Input((LENGTH,))
    logits = layers.Dense(50, name="out")(layers.Dense(8, activation="gelu")(layers.Embedding(50, 8)(inputs)))
    model = keras.Model(inputs, {"out": logits} if in_a_dict else logits)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer(), {"out": loss} if in_a_dict else loss, run_eagerly=own_blocks.EAGERLY)
    return model


def test_a_model_whose_one_output_is_in_a_dict_keeps_the_dict():
    tokens = np.random.default_rng().integers(0, 50, (4, LENGTH))
    plain = small_language_model(in_a_dict=True)
    lean = keras_mp.lean.make_lean(twin(plain))
    expected, got = plain.predict_on_batch(tokens), lean.predict_on_batch(tokens)
    assert got.keys() == expected.keys()
    np.testing.assert_allclose(got["out"], expected["out"], rtol=1e-5, atol=1e-6)
    assert_same_step(step(lean, tokens, {"out": tokens}), step(plain, tokens, {"out": tokens}))
    assert "in a dict" in str(keras_mp.report(lean))


def test_logits_of_a_call_without_a_loss_are_not_kept():
    tokens = np.random.default_rng().integers(0, 50, (4, LENGTH))
    lean = keras_mp.lean.make_lean(small_language_model(in_a_dict=False))
    logits = weakref.ref(lean(tokens))
    gc.collect()
    assert logits() is None
    kept = lean(tokens)
    assert lean._calls.features_of(kept) is not None  # while the caller holds them, their loss can be in chunks


@pytest.mark.slow
@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="logits of a whole step are seen in its graph")
def test_a_step_with_metrics_makes_no_logits():
    model = keras_mp.lean.make_lean(compiled(causal_models.build(GPT2)))
    x, y, weights = data(model, np.random.default_rng())
    called = []
    original = keras.metrics.SparseCategoricalAccuracy.update_state
    keras.metrics.SparseCategoricalAccuracy.update_state = lambda *args, **kwargs: called.append(1)
    try:
        model.train_on_batch(x, y, weights)
    finally:
        keras.metrics.SparseCategoricalAccuracy.update_state = original
    assert not called
