"""The GPT-2 recipe at a small size, on an embedded text and on sentences that are made up."""

import dataclasses
import json

import keras
import numpy as np
import pytest
from bits import bits_of
from mocked_data import mocked

from models.transformer import Size
from recipes import gpt2 as recipe
from recipes.datasets import corpus, lm1b

tokenizers = pytest.importorskip("tokenizers", reason="tokenizers, which learns the vocabulary, is not installed")
QUICK = dataclasses.replace(
    recipe.gpt2(),
    size="micro",
    vocabulary=300,
    sequence_length=16,
    batch_size=8,
    generate=5,
    learning_rate=4e-3,
    export=False,
)


@pytest.fixture(autouse=True)
def shallow(monkeypatch):
    monkeypatch.setitem(recipe.SIZES, "micro", Size(1, 128, 2))


@pytest.fixture(scope="module")
def text_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("corpus") / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog. é\n" * 150)
    return str(path)


@pytest.mark.slow
def test_a_short_training_measures_bits_per_byte(tmp_path, text_file, capsys):
    config = dataclasses.replace(QUICK, corpus=text_file, policy="float32", epochs=2, output=str(tmp_path))
    result = recipe.train(config)
    folder = tmp_path / "gpt2"
    names = {path.name for path in folder.iterdir()}
    assert names >= {"model.keras", "history.csv", "generated.txt", "tokenizer.json", "summary.json"}

    # Anew from the files of the run, in NumPy and float64.
    model = keras.saving.load_model(folder / "model.keras")
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    validation = corpus.read(text_file, config.vocabulary, None, False).validation
    inputs, targets = (part.astype("int32") for part in corpus.sequences(validation, 16))
    predicted = tokenizer.decode(targets.ravel().tolist(), skip_special_tokens=False)
    assert result.metric == "validation bits per byte"
    # A sequence may end within a character, which the decoder then replaces.
    assert result.value == pytest.approx(bits_of(model, inputs, targets) / len(predicted.encode()), rel=0.01)
    assert result.value < 3  # 8 is a guess without a model
    assert json.loads((folder / "summary.json").read_text())["config"]["corpus"] == text_file
    assert (folder / "generated.txt").read_text().startswith("The ")
    assert "The " in capsys.readouterr().out


def test_the_benchmark_is_encoded_once(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(lm1b, "folder", lambda builder: tmp_path / "tokens")
    with mocked(60):
        first = corpus.read("lm1b", 280, None, True)
        assert "encoding the train set" in capsys.readouterr().out
        monkeypatch.setattr(lm1b, "sentences", lambda builder, split: pytest.fail("read again"))
        again = corpus.read("lm1b", 280, None, True)
    assert capsys.readouterr().out == ""
    np.testing.assert_array_equal(first.train, again.train)
    assert first.tokenizer.to_str() == again.tokenizer.to_str()
    assert np.count_nonzero(first.train == 0) == 60  # a sentence's end
    assert isinstance(again.train, np.memmap)
    assert not any("partial" in path.name for path in (tmp_path / "tokens").iterdir())


@pytest.mark.slow
def test_it_trains_on_the_benchmark_in_fp8(tmp_path, monkeypatch):
    monkeypatch.setattr(lm1b, "folder", lambda builder: tmp_path / "tokens")
    options = {"policy": "fp8", "remat": True, "accumulate": 2, "download": True, "output": str(tmp_path)}
    with mocked(100):
        assert np.isfinite(recipe.train(dataclasses.replace(QUICK, **options)).value)
