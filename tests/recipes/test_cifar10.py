"""The CIFAR-10 recipe on images that are made up; the paper's numbers are in its docstring."""

import dataclasses
import json

import keras
import numpy as np
import pytest
from mocked_data import mocked

from recipes import cifar10 as recipe

ON_TENSORFLOW = keras.backend.backend() == "tensorflow"
QUICK = dataclasses.replace(recipe.cifar10(), download=True, epochs=2, width=4, depth=8, batch_size=8)


@pytest.mark.slow
def test_a_short_training_leaves_whole_files(tmp_path):
    config = dataclasses.replace(
        QUICK,
        policy="mixed_float16",
        accumulate=2,
        eval_policy="float32",
        tensorboard=ON_TENSORFLOW,
        export=ON_TENSORFLOW,
        output=str(tmp_path),
    )
    with mocked(50):
        result = recipe.train(config)
    folder = tmp_path / "cifar10"
    names = {path.name for path in folder.iterdir()}
    assert names >= {"model.keras", "history.csv", "curves.png", "summary.json"}
    assert result.policy == "mixed_float16" and result.metric == "test accuracy" and 0 <= result.value <= 1
    assert set(result.evaluated) == {"accuracy", "loss"}
    assert json.loads((folder / "summary.json").read_text())["config"]["accumulate"] == 2
    if ON_TENSORFLOW:
        assert result.low_precision_ops == 0 and result.max_difference <= 1e-5
        assert any((folder / "tensorboard").rglob("events*"))
    header, row, _ = (folder / "history.csv").read_text().splitlines()
    values = dict(zip(header.split(","), row.split(","), strict=True))
    assert float(values["train_loss_scale"]) >= 1 and "train_skipped_steps" in values


def test_pixels_are_normalized_as_the_set_is_and_not_augmented_when_serving():
    model = recipe.build(QUICK)
    images = np.random.default_rng(0).integers(0, 256, (3, 32, 32, 3), dtype=np.uint8)
    normalized = np.asarray(model.layers[0](images))
    expected = (images - np.array(recipe.MEAN)) / np.array(recipe.DEVIATION)
    np.testing.assert_allclose(normalized, expected, atol=1e-5)
    np.testing.assert_array_equal(model(images, training=False), model(images, training=False))


@pytest.mark.parametrize("name", ["cifar10", "gpt2", "imdb", pytest.param("imagenet", marks=pytest.mark.slow)])
def test_a_step_of_the_recipe_can_be_lowered(name):
    """What `keras-mp inspect` and `audit` ask a recipe for, at its full size, without its data."""
    import importlib

    module = importlib.import_module(f"recipes.{name}")
    small = {"imagenet": {"image_size": 32, "batch_size": 2}, "gpt2": {"size": "micro", "sequence_length": 16}}
    config = dataclasses.replace(getattr(module, name)(), policy="float32", **small.get(name, {}))
    model, (inputs, targets) = module.step(config)
    assert model.compiled and inputs.shape[0] == targets.shape[0] == config.batch_size
