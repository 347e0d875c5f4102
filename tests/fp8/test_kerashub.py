"""A KerasHub backbone, whose layers no config shows: converted, fine-tuned with LoRA, saved, reloaded, exported."""

import keras
import numpy as np
import pytest
from reference import to_numpy

import keras_mp
from keras_mp.fp8.layers import Float8Layer
from keras_mp.rebuild import layers_by_path

pytestmark = [pytest.mark.once, pytest.mark.usefixtures("mixed_bfloat16")]

hub = pytest.importorskip("keras_hub")


def backbones():
    encoder = dict(vocabulary_size=40, num_layers=2, num_heads=2, hidden_dim=16, intermediate_dim=32)
    decoder = dict(
        vocabulary_size=40, num_layers=2, num_query_heads=4, num_key_value_heads=2, hidden_dim=16, intermediate_dim=32
    )
    return {
        "GPT2Backbone": lambda: hub.models.GPT2Backbone(**encoder, max_sequence_length=8),
        "LlamaBackbone": lambda: hub.models.LlamaBackbone(**decoder),
    }


def batch():
    tokens = np.random.default_rng().integers(1, 40, (4, 8))
    return {"token_ids": tokens, "padding_mask": np.ones_like(tokens)}


def converted(model):
    return [layer for layer in layers_by_path(model).values() if isinstance(layer, Float8Layer)]


@pytest.mark.parametrize("name", ["LlamaBackbone", pytest.param("GPT2Backbone", marks=pytest.mark.slow)])
@pytest.mark.ci
def test_a_backbone_all_the_way(name, tmp_path):
    plain = backbones()[name]()
    x = batch()
    model = keras_mp.fp8.convert(keras_mp.stabilize(plain), select=lambda path, layer: True)
    products = [
        layer
        for layer in layers_by_path(plain).values()
        if isinstance(layer, (keras.layers.Dense, keras.layers.EinsumDense))
    ]
    assert len(converted(model)) == len(products) >= 12
    before = to_numpy(model(x))
    reference = to_numpy(plain(x))
    assert np.linalg.norm(before - reference) <= 0.2 * np.linalg.norm(reference) and np.any(before != reference)

    model.enable_lora(2)
    tuned = [layer for layer in converted(model) if layer.lora_enabled]
    assert tuned
    frozen = [np.array(layer._kernel) for layer in tuned]
    model.compile(keras.optimizers.Adam(0.02), lambda y, p: keras.ops.mean(keras.ops.square(p - y)))
    targets = np.zeros_like(before)
    losses = model.fit(x, targets, epochs=8, verbose=0).history["loss"]
    assert losses[-1] < losses[0]
    for layer, kernel in zip(tuned, frozen, strict=True):
        np.testing.assert_array_equal(np.array(layer._kernel), kernel)
    assert all(np.any(np.array(layer.lora_kernel_b)) for layer in tuned)

    after = to_numpy(model(x))
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras", compile=False)
    assert len(converted(loaded)) == len(products)
    # Saving merges LoRA into the kernels, in float32 where the live layer rounds the merged kernel to bfloat16.
    restored = to_numpy(loaded(x))
    assert np.linalg.norm(restored - after) <= 0.05 * np.linalg.norm(after)
    assert np.linalg.norm(restored - after) < 0.5 * np.linalg.norm(before - after)

    report = keras_mp.export_float32(loaded, tmp_path / "saved", verify=x)
    assert report.low_precision_ops == 0 and report.max_difference <= 1e-5
