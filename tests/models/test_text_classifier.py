"""The text classifier: that padding does not count, its size against the published one, and its checks."""

import keras
import numpy as np
import pytest
from shapes_alone import shapes_alone

from models.text_classifier import PADDING, text_classifier
from models.transformer import Size

TINY = Size(1, 128, 2)
TEXTS = np.array([[5, 6, 7, 8, 9, 1, 2, 3], [5, 6, 7, PADDING, PADDING, PADDING, PADDING, PADDING]], "int32")


def test_base_has_the_encoder_of_bert():
    # BERT-base without pooler, 108,891,648: less the 2 segments and the normalization of the embeddings; our final
    # normalization is as large as that one, and the classifier has 768 x 2 + 2.
    with shapes_alone():
        model = text_classifier("base", vocabulary_multiple=1)
    assert model.count_params() == 108_891_648 - 2 * 768 + 768 * 2 + 2


def test_padding_does_not_count():
    model = text_classifier(TINY, 3, 100, 8)
    before = model.predict_on_batch(TEXTS)
    embedding = model.get_layer("tokens_embedding").embeddings
    embedding.assign(np.concatenate([np.full((1, 128), 7, "float32"), np.asarray(embedding)[1:]]))
    np.testing.assert_array_equal(model.predict_on_batch(TEXTS), before)
    shorter = text_classifier(TINY, 3, 100, 3)
    for ours, theirs in zip(shorter.weights, model.weights, strict=True):
        ours.assign(np.asarray(theirs)[: ours.shape[0]])  # the positions that are left
    np.testing.assert_allclose(shorter.predict_on_batch(TEXTS[1:, :3]), before[1:], atol=1e-6)


def test_a_text_without_a_token_gives_finite_logits():
    model = text_classifier(TINY, 3, 100, 8)
    assert np.isfinite(model.predict_on_batch(np.full((1, 8), PADDING, "int32"))).all()


@pytest.mark.slow
@pytest.mark.jax
def test_remat_trains_to_the_same_weights_with_a_mask():
    """On JAX the mask was lost between the forward pass and the gradient."""
    found = []
    for remat in (False, True):
        keras.utils.set_random_seed(0)
        model = text_classifier(TINY, 3, 100, 8, dropout=0.0, remat=remat)
        model.compile(
            keras.optimizers.SGD(0.01), keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=True
        )
        losses = [float(model.train_on_batch(TEXTS, np.array([0, 2]))) for _ in range(3)]
        found.append((losses, model.get_weights()))
    np.testing.assert_allclose(found[0][0], found[1][0], rtol=1e-5)
    assert found[0][0][-1] < found[0][0][0]
    for plain, recomputed in zip(found[0][1], found[1][1], strict=True):
        np.testing.assert_allclose(recomputed, plain, atol=1e-5)
