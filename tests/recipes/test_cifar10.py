"""The CIFAR-10 recipe on images that are made up; the paper's numbers are in its docstring."""

import dataclasses
import json

import keras
import numpy as np
import pytest
from mocked_data import mocked

from keras_mp.training.training_recipe import run_recipe as main
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


def test_augmentation_moves_whole_pixels_by_up_to_four_and_mirrors():
    model = recipe.build(QUICK)
    translation, flip = model.layers[1:3]
    image = np.random.default_rng(0).normal(size=(1, 32, 32, 3)).astype("float32")
    padded = np.pad(image[0], ((4, 4), (4, 4), (0, 0)))
    places = set()
    for _ in range(30):
        moved = np.asarray(translation(image, training=True))[0]
        fits = [
            (down, across)
            for down in range(9)
            for across in range(9)
            if np.array_equal(padded[down : down + 32, across : across + 32], moved)
        ]
        assert len(fits) == 1
        places |= set(fits)
    assert len(places) > 15
    mirrored = {np.asarray(flip(image, training=True)).tobytes() for _ in range(20)}
    assert mirrored == {image.tobytes(), np.ascontiguousarray(image[:, :, ::-1]).tobytes()}


def test_what_is_missing_or_too_large_is_told_and_leaves_no_folder(tmp_path):
    output = ["--output", str(tmp_path / "runs"), "--data-dir", str(tmp_path)]
    with pytest.raises((ValueError, OSError), match="cifar10 is not prepared.*--download.*162 MiB"):
        main(["cifar10", *output])
    with mocked(50), pytest.raises(ValueError, match="batch_size is 64, but there are only 50"):
        main(["cifar10", *output, "--download", "--batch-size", "64"])
    with pytest.raises(ValueError, match="policy fp8 is for dense layers"):
        main(["cifar10", *output, "--policy", "fp8"])
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("name", ["cifar10", "gpt2", "imdb", pytest.param("imagenet", marks=pytest.mark.slow)])
def test_a_step_of_the_recipe_can_be_lowered(name):
    """What `keras-mp inspect` and `audit` ask a recipe for, at its full size, without its data."""
    import importlib

    module = importlib.import_module(f"recipes.{name}")
    small = {"imagenet": {"image_size": 32, "batch_size": 2}, "gpt2": {"size": "micro", "sequence_length": 16}}
    config = dataclasses.replace(getattr(module, name)(), policy="float32", **small.get(name, {}))
    model, (inputs, targets) = module.step(config)
    assert model.compiled and inputs.shape[0] == targets.shape[0] == config.batch_size
