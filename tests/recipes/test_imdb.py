"""The IMDB recipe on reviews that are made up."""

import dataclasses

import keras
import numpy as np
import pytest
from mocked_data import mocked

from models.transformer import Size
from recipes import imdb as recipe
from recipes.datasets import imdb as dataset

pytest.importorskip("tokenizers", reason="tokenizers, which learns the vocabulary, is not installed")
ON_TENSORFLOW = keras.backend.backend() == "tensorflow"
QUICK = dataclasses.replace(
    recipe.imdb(), download=True, epochs=1, batch_size=8, size="tiny", sequence_length=16, vocabulary=300
)


@pytest.fixture(autouse=True)
def shallow(monkeypatch):
    monkeypatch.setitem(recipe.SIZES, "tiny", Size(1, 128, 2))


@pytest.mark.slow
def test_it_learns_reviews_that_a_word_gives_away_and_leaves_its_tokenizer(tmp_path, monkeypatch):
    """Not made up by tensorflow-datasets, whose labels have nothing to do with the texts."""
    import tokenizers

    def reviews(split, data_dir, download):
        generator = np.random.default_rng(0 if split == "train" else 1)
        labels = generator.integers(0, 2, 256)
        words = generator.choice(["the", "film", "was", "of", "its", "time"], (256, 8))
        return [f"{' '.join(row)} {('bad', 'good')[label]}" for row, label in zip(words, labels, strict=True)], labels

    monkeypatch.setattr(recipe, "load", reviews)
    options = {"policy": "mixed_bfloat16", "remat": True, "export": ON_TENSORFLOW, "output": str(tmp_path)}
    result = recipe.train(dataclasses.replace(QUICK, epochs=6, learning_rate=2e-3, batch_size=32, **options))
    assert result.metric == "test accuracy" and result.value > 0.95
    folder = tmp_path / "imdb"
    assert {path.name for path in folder.iterdir()} >= {"model.keras", "history.csv", "curves.png", "tokenizer.json"}
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.decode(tokenizer.encode("abc jig").ids) == "abc jig"


def test_reviews_are_text_with_a_label():
    with mocked(5):
        texts, labels = dataset.load("train", None, True)
    assert len(texts) == len(labels) == 5 and all(isinstance(text, str) and text for text in texts)
    assert labels.dtype == np.int64 and set(labels) <= {0, 1}
