"""make_lean(remat=...): blocks of every family recompute; the step, the tokens, files and replicas are as before."""

import re

import causal_models
import keras
import keras_hub
import numpy as np
import own_blocks
import pytest
from keras import layers
from same_step import assert_same_step, compiled, lean_of, step
from thirds import thirds

import keras_mp
from keras_mp.lean.lean_model import lean_parts
from keras_mp.rebuild.walk import Walk

pytestmark = pytest.mark.usefixtures("float32_policy")
_SIZES = {"num_layers": 2, "num_heads": 2, "hidden_dim": 16, "intermediate_dim": 32}


def _bert():
    backbone = keras_hub.models.BertBackbone(**_SIZES, vocabulary_size=40, max_sequence_length=8)
    return keras_hub.models.BertTextClassifier(backbone=backbone, num_classes=3)


def _vit():
    sizes = {"num_layers": 2, "num_heads": 2, "hidden_dim": 16, "mlp_dim": 32, "dropout_rate": 0.1}
    backbone = keras_hub.models.ViTBackbone(image_shape=(8, 8, 3), patch_size=4, **sizes)
    return keras_hub.models.ViTImageClassifier(backbone=backbone, num_classes=3)


def _resnet():
    backbone = keras_hub.models.ResNetBackbone(
        input_conv_filters=[64], input_conv_kernel_sizes=[3], stackwise_num_filters=[64, 128],
        stackwise_num_blocks=[2, 3], stackwise_num_strides=[1, 2], block_type="basic_block", image_shape=(16, 16, 3),
    )  # fmt: skip
    return keras_hub.models.ResNetImageClassifier(backbone=backbone, num_classes=3)


# By family: how it is built, and how many blocks it has.
FAMILIES = {
    "gpt2": (lambda: causal_models.build("GPT2CausalLM"), 2),
    "gemma": (lambda: causal_models.build("GemmaCausalLM"), 2),
    "t5": (lambda: causal_models.build("T5Seq2SeqLM"), 4),
    "bert": (_bert, 2),
    "vit": (_vit, 2),
    "resnet": (_resnet, 5),
    "own gpt, subclassed": (own_blocks.mini_gpt, 3),
    "own vit, a loop": (own_blocks.vit, 3),
    "own resnet": (lambda: own_blocks.resnet(rate=0.1), 6),
    "own blocks in a layer": (own_blocks.tower, 3),
}


def data(model, generator):
    """A batch of three, tokens where the model takes integers, the first row padded; and targets."""

    def of(tensor):
        shape = (3, *(size or 8 for size in tensor.shape[1:]))
        padding = np.ones(shape, "int32")
        padding[0, 5:] = 0
        if "mask" in tensor.name:
            return padding
        if tensor.name.endswith("segment_ids"):
            return np.zeros(shape, "int32")
        is_float = keras.backend.is_float_dtype(tensor.dtype)
        return (
            generator.normal(size=shape).astype("float32") if is_float else generator.integers(1, 40, shape) * padding
        )

    inputs = model._inputs_struct if hasattr(model, "_inputs_struct") else keras.KerasTensor((None, 8), "int32")
    x = keras.tree.map_structure(of, inputs)
    x = x[0] if isinstance(x, list) and len(x) == 1 else x
    outputs = model(x, training=False)
    return x, generator.integers(0, outputs.shape[-1], tuple(outputs.shape[:-1]))


def blocks(model):
    return [row.path for row in lean_parts(Walk(model)) if row.kind == "block"]


def paths(model):
    """The paths of the weights without the numbers that Keras counts up.

    And without the model's own name, which they have where a call has built it, but not where `build` has: so Keras too
    loads a subclassed model.
    """
    return [re.sub(r"_\d+(?=/|$)", "", weight.path.removeprefix(f"{model.name}/")) for weight in model.weights]


IN_A_GRAPH = ("own blocks in a layer", "own vit, a loop")  # the others eagerly, which is faster than to trace them


@pytest.mark.parametrize("name", [IN_A_GRAPH[0], *thirds(name for name in FAMILIES if name != IN_A_GRAPH[0])])
def test_a_step_with_recomputed_blocks_is_the_same(name, recomputed, one_mask):
    build, count = FAMILIES[name]
    keras.utils.set_random_seed(int(np.random.default_rng().integers(1000)))
    model = compiled(build(), run_eagerly=own_blocks.EAGERLY and name not in IN_A_GRAPH)
    ours = lean_of(model, remat=True)
    assert len(blocks(ours)) == count
    assert paths(ours) == paths(model)
    x, y = data(model, np.random.default_rng())
    made = step(ours, x, y)
    assert recomputed and len(recomputed) % count == 0
    assert_same_step(made, step(model, x, y), least=1.0)  # some are zero but for rounding, as of the bias of keys


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma"])
def test_generate_gives_the_same_tokens(name):
    model = FAMILIES[name][0]()
    for weight in model.weights:  # so that the logits are far apart
        weight.assign(weight + np.random.default_rng().normal(size=weight.shape) * 0.2)
    model.compile(sampler="greedy")
    ours = lean_of(model, remat=True)
    x = {key: value[:, :8] for key, value in causal_models.batch(model).items()}
    for key in x:
        if "mask" in key and "encoder" not in key:
            x[key][:, 3:] = 0
    tokens = [each.generate(x, stop_token_ids=None) for each in (model, ours)]
    keras.tree.map_structure(np.testing.assert_array_equal, *tokens)


def test_patterns_name_blocks_and_layers():
    def stack(count):
        x = inputs = keras.Input((4,))
        for index in range(count):
            x = keras.Sequential([layers.Dense(4)], name=f"block_{index}")(x)
        return keras.Model(inputs, x, name="gpt")

    model, one = stack(3), stack(1)  # in which nothing repeats
    assert blocks(lean_of(model, remat=("block_[02]",))) == ["block_0", "block_2"]
    assert blocks(lean_of(one, remat=("block_*",))) == ["block_0"]
    for wrong in ("block_*", 3, (1,)):
        with pytest.raises(TypeError, match="remat takes True, False, or patterns such as"):
            keras_mp.lean.make_lean(one, remat=wrong)
    with pytest.raises(ValueError, match="'gpt' matches 'blok_1'; nearest: 'block_1'"):
        keras_mp.lean.make_lean(model, remat=("block_0", "blok_1"))


@pytest.mark.slow
def test_patterns_name_segments_and_nested_layers():
    model = causal_models.build("GPT2CausalLM")
    path = f"{model.backbone.name}/transformer_layer_1"
    assert blocks(lean_of(model, remat=(path, f"{path}/self_attention"))) == [path]
    flat = own_blocks.vit()
    second = blocks(lean_of(flat, remat=True))[1]
    assert blocks(lean_of(flat, remat=(second,))) == [second]
    again = lean_of(lean_of(model, remat=True), remat=("*_layer_0",))
    assert blocks(again) == [f"{model.backbone.name}/transformer_layer_0"]


def test_a_model_without_blocks_says_so():
    model = keras.Sequential([keras.Input((8,)), *(layers.Dense(8) for _ in range(3))], name="plain")
    with pytest.warns(UserWarning, match="'plain', remat=True.*no part of the model repeats; name the layers"):
        keras_mp.lean.make_lean(model, remat=True)


def test_a_window_that_is_shorter_than_the_tokens_stays():
    plain, lean = (causal_models.build("Qwen3CausalLM", num_layers=1, sliding_window_size=4) for _ in range(2))
    lean.set_weights(plain.get_weights())
    keras_mp.lean.make_lean(lean)
    tokens = np.random.default_rng().integers(0, 40, (2, 9))
    x = {"token_ids": tokens, "padding_mask": np.ones_like(tokens)}
    values = [keras.ops.convert_to_numpy(model(x, training=True)) for model in (plain, lean)]
    np.testing.assert_allclose(*values, rtol=1e-4, atol=1e-5)
    expected = keras.ops.convert_to_numpy(plain({name: value[:, :4] for name, value in x.items()}, training=True))
    np.testing.assert_allclose(values[1][:, :4], expected, rtol=1e-4, atol=1e-5)
