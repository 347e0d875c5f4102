"""Sizes that no model has are named, with what would be right."""

import pytest

from models.gpt import gpt
from models.llama import LlamaSize, llama
from models.resnet import resnet_cifar, resnet_imagenet
from models.text_classifier import text_classifier
from models.transformer import Size
from models.vit import vit

LLAMA = LlamaSize(1, 128, 4, 2, 256, 100)


@pytest.mark.parametrize(
    "build, arguments, message",
    [
        (gpt, {"size": "gpt3"}, "micro, mini, gpt2, or a Size.*got 'gpt3'"),
        (gpt, {"size": Size(2, 128, 3)}, "multiple of heads, got width 128 and 3 heads"),
        (gpt, {"size": (0, 128, 2)}, "layers must be at least 1, got 0"),
        (gpt, {"vocabulary_multiple": -128}, "vocabulary_multiple must be at least 1, got -128"),
        (llama, {"size": "llama4"}, "llama2-7b, llama3-8b, llama3.2-1b, or a LlamaSize, got 'llama4'"),
        (llama, {"size": LLAMA._replace(heads=3)}, "multiple of twice the heads, got width 128, 3 heads"),
        (llama, {"size": LLAMA._replace(key_heads=3)}, "heads must be a multiple of key_heads, got 4 and 3"),
        (llama, {"size": LLAMA._replace(hidden=0)}, "hidden must be at least 1, got 0"),
        (resnet_cifar, {"depth": 18}, r"6n \+ 2.*got 18"),
        (resnet_cifar, {"classes": 0}, "classes must be at least 1, got 0"),
        (resnet_cifar, {"input_shape": (None, 32, 3)}, "height, width, channels"),
        (resnet_imagenet, {"depth": 20}, "18, 34, 50, 101, 152, got 20"),
        (text_classifier, {"size": "large"}, "tiny, mini, small, medium, base, or a Size.*got 'large'"),
        (text_classifier, {"length": -1}, "length must be at least 1, got -1"),
        (vit, {"size": "huge"}, "tiny, small, base, or a Size.*got 'huge'"),
        (vit, {"input_shape": (224, 200, 3)}, r"multiple of patch 16 in height and width, got \(224, 200, 3\)"),
    ],
)
def test_bad_sizes_are_named(build, arguments, message):
    with pytest.raises(ValueError, match=message):
        build(**arguments)
