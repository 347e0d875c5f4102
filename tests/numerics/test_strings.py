"""Models that take strings: what TextVectorization puts out has a shape that only a run tells."""

import keras
import numpy as np
import pytest

import keras_mp

TENSORFLOW = keras.backend.backend() == "tensorflow"
TEXTS = ["a b c", "b b", "c a a d e f", "d"]
only_tensorflow = pytest.mark.skipif(not TENSORFLOW, reason="Keras trains on strings on TensorFlow alone")


def text_classifier(length):
    vectorize = keras.layers.TextVectorization(12, output_sequence_length=length, name="vectorize")
    vectorize.adapt(TEXTS)
    text = keras.Input((), dtype="string", name="text")
    x = keras.layers.Embedding(12, 4, name="embedding")(vectorize(text))
    outputs = keras.layers.Dense(2, name="head", dtype="float32")(keras.layers.GlobalAveragePooling1D()(x))
    model = keras.Model(text, outputs, name="text_classifier")
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def loss_of(model, texts, labels):
    """NumPy's, from the table of words and the weights."""
    words = model.get_layer("vectorize").get_vocabulary()
    rows = [[words.index(word) for word in text.split()] for text in texts]
    length = model.get_layer("vectorize").get_config()["output_sequence_length"] or max(map(len, rows))
    tokens = np.array([(row + [0] * length)[:length] for row in rows])
    table, kernel, bias = (np.asarray(weight, "float64") for weight in model.get_weights()[-3:])
    logits = table[tokens].mean(1) @ kernel + bias
    return -np.mean(logits[range(len(labels)), labels] - np.log(np.exp(logits).sum(-1)))


@only_tensorflow
@pytest.mark.parametrize("length, policy", [(4, "float32"), (None, "mixed_float16")])
def test_a_model_with_text_vectorization_is_audited(length, policy):
    keras.config.set_dtype_policy(policy)
    model = text_classifier(length)
    rng = np.random.default_rng()
    # Batches of the same size whose texts are longer and shorter: the lengths inside differ by batch.
    batches = [(np.array(TEXTS)[order], rng.integers(0, 2, 2)) for order in ([1, 3], [0, 2], [3, 1])]
    report = keras_mp.audit(model, batches)
    assert np.isclose(report.loss, np.mean([loss_of(model, *each) for each in batches]), rtol=1e-5)
    embedding = next(layer for layer in report.layers if layer.path == "embedding")
    lengths = [length or 2, length or 6, length or 2]
    assert embedding.ranges["output"].values == sum(2 * each * 4 for each in lengths)


@only_tensorflow
def test_strings_come_as_a_list_or_an_array():
    model = text_classifier(4)
    for texts in (TEXTS, np.array(TEXTS), np.array(TEXTS, object), [text.encode() for text in TEXTS]):
        assert keras_mp.numerics.find_nonfinite(model, (texts, np.array([0, 1, 1, 0]))) is None


@only_tensorflow
def test_the_layer_behind_the_text_that_overflows_is_named():
    keras.config.set_dtype_policy("mixed_float16")
    model = text_classifier(None)
    model.get_layer("embedding").embeddings.assign(np.full((12, 4), 1e5))
    found = keras_mp.numerics.find_nonfinite(model, (TEXTS, np.array([0, 1, 1, 0])))
    assert (found.path, found.tensor, found.remedy) == ("embedding", "output", "float32 for this layer")


@pytest.mark.jax
@pytest.mark.skipif(TENSORFLOW, reason="TensorFlow trains on strings")
def test_where_keras_cannot_train_on_strings_that_is_said():
    model, labels = text_classifier(4), np.array([0, 1, 1, 0])
    with pytest.raises(Exception, match="(?i)invalid dtype|string"):
        model.fit(np.array(TEXTS), labels, verbose=0)
    for check in (keras_mp.audit, keras_mp.numerics.find_nonfinite):
        with pytest.raises(ValueError, match="strings, which no step on jax takes; plain Keras fails, too"):
            check(model, (TEXTS, labels))
