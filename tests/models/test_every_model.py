"""What every model must do: stabilized, its blocks stay in 16 bits and its results are float32. Recipes train them."""

import keras
import numpy as np
import pytest

import keras_mp
from keras_mp.stability.sensitive import sensitive_layers
from models.gpt import gpt
from models.llama import LlamaSize, llama
from models.resnet import resnet_cifar
from models.text_classifier import PADDING, text_classifier
from models.transformer import Size
from models.vit import vit

TINY, TINY_LLAMA = Size(1, 128, 2), LlamaSize(1, 128, 4, 2, 256, 100)
TOKENS = np.arange(32, dtype="int32").reshape(2, 16)
TEXTS = np.array([[5, 6, 7, 8, 9, 1, 2, 3], [5, 6, 7, PADDING, PADDING, PADDING, PADDING, PADDING]], "int32")
IMAGES = np.random.default_rng(0).normal(size=(2, 8, 8, 3)).astype("float32")
# Each has `Add` layers on its residual path.
MODELS = {
    "gpt": (lambda: gpt(TINY, 100, 16, dropout=0.1), TOKENS, "float16"),
    "llama": (lambda: llama(TINY_LLAMA, 16), TOKENS, "bfloat16"),
    "resnet": (lambda: resnet_cifar(8, 5, (8, 8, 3), 4), IMAGES, "float16"),
    "vit": (lambda: vit(TINY, 5, (8, 8, 3), 4, dropout=0.1), IMAGES, "bfloat16"),
    "text classifier": (lambda: text_classifier(TINY, 3, 100, 8), TEXTS, "bfloat16"),
}


@pytest.mark.parametrize("name", MODELS)
def test_its_blocks_compute_in_16_bits_and_its_results_are_float32(name):
    build, batch, compute = MODELS[name]
    keras.config.set_dtype_policy(f"mixed_{compute}")
    model = build()
    assert sensitive_layers(model)
    keras_mp.stabilize(model)
    assert not sensitive_layers(model)
    assert {layer.output.dtype for layer in model.layers if isinstance(layer, keras.layers.Add)} == {compute}
    assert {variable.dtype for variable in model.weights} == {"float32"}
    results = keras.ops.convert_to_numpy(model(batch))
    assert results.dtype == "float32" and np.isfinite(results).all()
