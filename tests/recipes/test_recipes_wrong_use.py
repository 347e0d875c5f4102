"""Wrong use of the recipes: each error names the field or the file, before anything is written."""

import dataclasses
import importlib
import re

import pytest
from mocked_data import mocked

from keras_mp.cli.training_recipe import run_recipe as main


def config_of(recipe):
    return getattr(importlib.import_module(f"recipes.{recipe}"), recipe)()


@pytest.mark.parametrize(
    "recipe, fields, message",
    [
        ("digits", {"epochs": 0}, "epochs must be above 0"),
        ("digits", {"seed": -1}, "seed must be at least"),
        ("gpt2", {"vocabulary": 256}, "vocabulary must be at least 257, got 256"),
        ("gpt2", {"size": "huge"}, "size must be one of micro, mini, gpt2, got 'huge'"),
        ("gpt2", {"prompt": ""}, "prompt must hold at least one character"),
        ("imagenet", {"model": "resnet18"}, "model must be resnet50 or vit, got 'resnet18'"),
        ("imagenet", {"model": "vit", "vit_size": "huge"}, "vit_size must be one of tiny, small, base, got 'huge'"),
        ("imagenet", {"policy": "fp8"}, "policy fp8 is for dense layers"),
        ("imagenet", {"remat": True}, "remat and dropout are for the blocks of --model vit"),
        ("imdb", {"size": "huge"}, "size must be one of tiny, mini, small, medium, base, got 'huge'"),
        ("language_model", {"temperature": -0.5}, "temperature must be at least 0, got -0.5"),
        ("language_model", {"dropout": 1.0}, "dropout must be at least 0 and below 1, got 1.0"),
        ("language_model", {"model": "bert"}, "model must be gpt or llama, got 'bert'"),
        ("language_model", {"state_dtype": "int8"}, "state_dtype.* must be one of .*float32.*bfloat16.*float8"),
        ("language_model", {"model": "llama", "dropout": 0.1}, "dropout must be 0 for the model llama"),
    ],
)
def test_a_config_names_its_bad_field(recipe, fields, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(config_of(recipe), **fields)


@pytest.mark.parametrize(
    "command, messages",
    [
        ("cifar10", ["cifar10 is not prepared", "--download", "162 MiB"]),
        ("cifar10 --download --batch-size 64", ["batch_size is 64, but there are only 50"]),
        ("cifar10 --policy fp8", ["policy fp8 is for dense layers"]),
        ("imagenet", ["imagenet2012 is not prepared", "--download", "144 GiB", "ILSVRC2012_img_train.tar"]),
        ("imdb", ["imdb_reviews is not prepared", "--download", "80 MiB"]),
        ("imdb --download --vocabulary 300 --batch-size 64", ["batch_size is 64, but there are only 50"]),
        ("gpt2", ["lm1b is not prepared", "--download gets and prepares it (1.7 GiB)"]),
        ("gpt2 --corpus nowhere.txt", ["there is no file 'nowhere.txt'"]),
        ("gpt2 --vocabulary 300 --corpus TEXT --sequence-length 16 --batch-size 900", ["batch_size is 900, but there"]),
        ("gpt2 --vocabulary 300 --corpus TEXT --sequence-length 10000", ["sequence_length must be below"]),
        ("language_model --corpus nowhere.txt", ["there is no file 'nowhere.txt'"]),
        ("language_model --corpus EMPTY", ["empty.txt' is empty"]),
        ("language_model --corpus TEXT --sequence-length 1000", ["sequence_length must be at most 405"]),
        ("language_model --corpus TEXT --batch-size 1000", ["batch_size is 1000, but there are only"]),
        ("language_model --corpus TEXT --heads 3", ["width must be a multiple of heads", "and 3 heads"]),
    ],
)
def test_what_is_missing_or_too_large_is_told_and_leaves_no_folder(command, messages, corpus, tmp_path):
    (tmp_path / "empty.txt").touch()
    words = command.replace("TEXT", corpus).replace("EMPTY", str(tmp_path / "empty.txt")).split()
    if words[0] == "gpt2":
        pytest.importorskip("tokenizers", reason="tokenizers, which learns the vocabulary, is not installed")
    data = [] if words[0] == "language_model" else ["--data-dir", str(tmp_path)]
    with pytest.raises((ValueError, OSError)) as error:
        if "--download" in words:
            with mocked(50):
                main([*words, "--output", str(tmp_path / "runs")])
        main([*words, "--output", str(tmp_path / "runs"), *data])
    for message in messages:
        assert re.search(re.escape(message), str(error.value))
    assert not (tmp_path / "runs").exists()
