"""The vision transformer: its sizes against the published ones, and that they are checked."""

import numpy as np
import pytest
from shapes_alone import shapes_alone

from models.transformer import Size
from models.vit import vit

TINY = Size(1, 128, 2)


# The counts of the models released with DeiT (timm's deit_*_patch16_224): 5.7, 22 and 86 million in its table 1.
@pytest.mark.parametrize("size, parameters", [("tiny", 5_717_416), ("small", 22_050_664), ("base", 86_567_656)])
def test_parameters_are_those_published(size, parameters):
    with shapes_alone():
        assert vit(size).count_params() == parameters


def test_patches_are_told_apart_by_their_place():
    model = vit(TINY, 5, (8, 8, 1), 4)
    image = np.random.default_rng(0).normal(size=(8, 8, 1)).astype("float32")
    upside_down = np.concatenate([image[4:], image[:4]])  # the same patches, elsewhere
    first, second = model.predict_on_batch(np.stack([image, upside_down]))
    assert np.abs(first - second).max() > 1e-4
