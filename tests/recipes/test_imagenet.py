"""The ImageNet recipe on images that are made up; the papers' numbers are in its docstring."""

import dataclasses

import keras
import numpy as np
import pytest
from mocked_data import mocked

from models.transformer import Size
from recipes import imagenet as recipe

ON_TENSORFLOW = keras.backend.backend() == "tensorflow"
QUICK = dataclasses.replace(recipe.imagenet(), download=True, epochs=1, batch_size=4, image_size=32, resnet_width=4)


@pytest.mark.slow
def test_a_short_training_leaves_whole_files(tmp_path, monkeypatch):
    """Of a model with few layers, which is the same otherwise."""
    monkeypatch.setitem(recipe.SIZES, "tiny", Size(1, 64, 2))
    options = {"model": "vit", "vit_size": "tiny", "policy": "mixed_bfloat16", "remat": True, "accumulate": 2}
    options |= {"eval_policy": "float32", "export": ON_TENSORFLOW, "output": str(tmp_path)}
    with mocked(11, images=True):
        result = recipe.train(dataclasses.replace(QUICK, **options))
    names = {path.name for path in (tmp_path / "imagenet").iterdir()}
    assert names >= {"model.keras", "history.csv", "curves.png", "summary.json"}
    assert result.metric == "test accuracy" and 0 <= result.value <= 1 and result.evaluated
    if result.saved_model:
        assert result.low_precision_ops == 0


def test_each_model_has_its_own_defaults_and_what_is_given_stays():
    config = recipe.imagenet()
    assert (recipe.resolved(config).learning_rate, recipe.resolved(config).weight_decay) == (0.1, 1e-3)
    config = dataclasses.replace(config, model="vit", weight_decay=0.3)
    assert (recipe.resolved(config).learning_rate, recipe.resolved(config).weight_decay) == (1e-3, 0.3)


def test_pixels_are_normalized_as_the_set_is():
    images = np.random.default_rng(0).integers(0, 256, (2, 32, 32, 3), dtype=np.uint8)
    expected = (images / 255 - [0.485, 0.456, 0.406]) / [0.229, 0.224, 0.225]
    np.testing.assert_allclose(np.asarray(recipe.build(QUICK).layers[0](images)), expected, atol=1e-5)
