"""The IMDB recipe on reviews that are made up."""

import dataclasses

import keras
import numpy as np
import pytest
from mocked_data import mocked

from keras_mp.training.training_recipe import run_recipe as main
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


@pytest.mark.parametrize(
    "options, message",
    [
        ({"vocabulary": 256}, "vocabulary must be at least 257, got 256"),
        ({"size": "huge"}, "size must be one of tiny, mini, small, medium, base, got 'huge'"),
        ({"sequence_length": 0}, "sequence_length must be above 0, got 0"),
    ],
)
def test_a_config_names_its_bad_field(options, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(recipe.imdb(), **options)


def test_what_is_missing_or_too_large_is_told(tmp_path):
    output = ["--output", str(tmp_path / "runs"), "--data-dir", str(tmp_path)]
    with pytest.raises((ValueError, OSError), match="imdb_reviews is not prepared.*--download.*80 MiB"):
        main(["imdb", *output])
    with mocked(5), pytest.raises(ValueError, match="batch_size is 64, but there are only 5"):
        main(["imdb", *output, "--download", "--vocabulary", "300"])
    assert not (tmp_path / "runs").exists()
