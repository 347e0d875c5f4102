"""A lean model with a vocabulary and its loss, beside the plain model with Keras's loss."""

import warnings

import keras
import numpy as np
import pytest
from keras import layers

import keras_mp

VOCABULARY, WIDTH, LENGTH = 40, 16, 6


def language_model(tokens, logits):
    return keras_mp.lean.make_lean(keras.Model(tokens, logits))


def build(kind=language_model, tied=True, dense=False):
    keras.utils.set_random_seed(0)
    tokens = keras.Input((LENGTH,), dtype="int32")
    embedding = layers.ReversibleEmbedding(VOCABULARY, WIDTH, tie_weights=tied)
    x = layers.LayerNormalization()(layers.Dense(WIDTH)(embedding(tokens)))
    logits = layers.Dense(VOCABULARY)(x) if dense else embedding(x, reverse=True)
    return kind(tokens, layers.Activation("linear", dtype="float32")(logits))


def draw():
    generator = np.random.default_rng()
    tokens, targets = generator.integers(0, VOCABULARY, (2, 5, LENGTH)).astype("int32")
    return tokens, targets, generator.random((5, LENGTH)).astype("float32")


@pytest.mark.parametrize(
    ("head", "weights", "mode"),
    [
        ({}, "token", {"jit_compile": True}),
        ({"tied": False}, "sequence", {"run_eagerly": True}),
        ({"dense": True}, "none", {"jit_compile": False}),
    ],
    ids=str,
)
def test_it_trains_as_the_plain_model(head, weights, mode):
    tokens, targets, given = draw()
    given = {"none": None, "sequence": given[:, :1], "token": given}[weights]
    plain, ours = build(keras.Model, **head), build(**head)
    plain.compile(keras.optimizers.SGD(0.5), keras.losses.SparseCategoricalCrossentropy(from_logits=True), **mode)
    ours.compile(keras.optimizers.SGD(0.5), keras_mp.lean.ChunkedCrossEntropy(rows=7), **mode)
    for _ in range(2):
        both = [float(m.train_on_batch(tokens, targets, sample_weight=given)) for m in (ours, plain)]
        np.testing.assert_allclose(*both, rtol=1e-5)
    for a, b in zip(ours.weights, plain.weights, strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-4, atol=1e-5)


@pytest.mark.jax
@pytest.mark.parametrize("padding", [None, 0])
def test_perplexity_is_that_of_whole_logits(padding):
    """KerasHub's, by the definition, in chunks of 7 of 30 rows: exp of the mean over the tokens that are no padding."""
    hub = pytest.importorskip("keras_hub", reason='the metric is KerasHub\'s: pip install "keras-mp[test]"')
    tokens, targets, weights = draw()
    targets[:, -1] = 0
    model = build()
    metric = hub.metrics.Perplexity(from_logits=True, mask_token_id=padding)
    model.compile(loss=keras_mp.lean.ChunkedCrossEntropy(rows=7), weighted_metrics=[metric])
    found = model.evaluate(tokens, targets, sample_weight=weights, batch_size=2, verbose=0)[1]
    logits = build(keras.Model).predict(tokens, verbose=0).astype("float64")
    losses = np.log(np.exp(logits).sum(-1)) - np.take_along_axis(logits, targets[..., None], -1)[..., 0]
    counts = weights if padding is None else weights * (targets != padding)
    np.testing.assert_allclose(found, np.exp((losses * counts).sum() / counts.sum()), rtol=1e-5)


@pytest.mark.jax
def test_targets_outside_the_vocabulary_are_as_in_keras():
    """In loss, metrics and gradients, of one chunk and of several: 0 on JAX; on TensorFlow NaN, or an error."""
    tokens, targets, _ = draw()
    targets[np.random.default_rng().random(targets.shape) < 0.5] = -100
    targets[0, :3] = -1, VOCABULARY, 0

    def trained(kind, loss, jit):
        model = build(kind)
        metrics = ["accuracy", keras.metrics.SparseCategoricalCrossentropy(from_logits=True)]
        how = {"jit_compile": True} if jit else {"run_eagerly": True}
        model.compile(keras.optimizers.SGD(0.5), loss, metrics=metrics, **how)
        return [np.asarray(x) for x in (*model.train_on_batch(tokens, targets), *model.get_weights())], model

    keras_own, _ = trained(keras.Model, keras.losses.SparseCategoricalCrossentropy(from_logits=True), True)
    assert np.isfinite(keras_own[0]) == (keras.backend.backend() == "jax")
    for rows in (7, None):
        ours, _ = trained(language_model, keras_mp.lean.ChunkedCrossEntropy(rows=rows), True)
        for a, b in zip(ours, keras_own, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    # From logits, as any other model has it.
    ours, _ = trained(keras.Model, keras_mp.lean.ChunkedCrossEntropy(), True)
    np.testing.assert_allclose(ours[0], keras_own[0], rtol=1e-5)
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        for kind, loss in (
            (keras.Model, keras.losses.SparseCategoricalCrossentropy(from_logits=True)),
            (language_model, keras_mp.lean.ChunkedCrossEntropy(rows=7)),
            (keras.Model, keras_mp.lean.ChunkedCrossEntropy()),
        ):
            with pytest.raises(tf.errors.InvalidArgumentError, match=r"(?s)-1.*\[0, ?40\)"):
                trained(kind, loss, False)


@pytest.mark.parametrize("lean_first", [True, False])
def test_a_head_in_fp8_stays_in_fp8(lean_first):
    """The update is that of the FP8 layer, which no chunk of logits in float32 makes."""
    tokens, targets, _ = draw()

    def update(*changes):
        model = build(keras.Model, dense=True)
        for change in changes:
            change(model)
        model.compile(keras.optimizers.SGD(1.0), keras_mp.lean.ChunkedCrossEntropy(rows=7))
        before = model.get_weights()
        model.train_on_batch(tokens, targets)
        return np.concatenate([np.ravel(a - b) for a, b in zip(model.get_weights(), before, strict=True)])

    def convert(model):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # layers in float32, and small ones
            keras_mp.convert(model, "current", select=lambda path, layer: layer is model.layers[-2])

    def lean(model):
        assert keras_mp.lean.make_lean(model) is model

    changes = [lean, convert] if lean_first else [convert, lean]
    expected = update(*[change for change in changes if change is not lean])
    np.testing.assert_allclose(update(*changes), expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("from_features", [True, False])
def test_ignored_targets(from_features):
    tokens, targets, weights = draw()
    targets[0, :4] = 7
    arguments = {"ignore_class": 7, "rows": 4}
    model = build()
    model.compile("sgd", keras_mp.lean.ChunkedCrossEntropy(**arguments))
    logits = model.predict(tokens, verbose=0)
    log_softmax = logits - np.log(np.exp(logits.astype("float64")).sum(-1, keepdims=True))
    at_target = np.take_along_axis(log_softmax, targets[..., None], -1)[..., 0]
    counts = targets != 7
    exact = -(at_target * weights * counts).sum() / counts.sum()
    if from_features:
        ours = model.evaluate(tokens, targets, sample_weight=weights, verbose=0)
    else:
        ours = float(keras_mp.lean.ChunkedCrossEntropy(**arguments)(targets, logits, weights))
    np.testing.assert_allclose(ours, exact, rtol=1e-5)


def test_it_is_saved_loaded_and_stabilized(tmp_path):
    tokens, targets, _ = draw()
    keras.config.set_dtype_policy("mixed_bfloat16")
    model = keras_mp.stabilize(build())
    model.compile("adam", keras_mp.lean.ChunkedCrossEntropy(rows=4), run_eagerly=True)
    model.train_on_batch(tokens, targets)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert loaded.chunked_loss() is not None and loaded.loss.get_config() == model.loss.get_config()
    np.testing.assert_allclose(loaded.test_on_batch(tokens, targets), model.test_on_batch(tokens, targets), rtol=1e-5)


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match="rows=0 must be a whole number, 1 or more"):
        keras_mp.lean.ChunkedCrossEntropy(rows=0)
    with pytest.raises(ValueError, match="reduction='none' must be one of 'sum_over_batch_size'"):
        keras_mp.lean.ChunkedCrossEntropy(reduction="none")
    model = build()
    model.compile("sgd", keras_mp.lean.ChunkedCrossEntropy())
    with pytest.raises(ValueError, match="sample_weight must broadcast from the left"):
        keras_mp.lean.ChunkedCrossEntropy()(np.zeros((5, 6), "int32"), np.zeros((5, 6, 9), "float32"), np.ones((6, 5)))
