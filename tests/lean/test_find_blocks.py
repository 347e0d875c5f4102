"""find_blocks: the parts that repeat, in models of every kind; runs of a sequence."""

import causal_models
import keras
import keras_hub
import own_blocks
import pytest
from keras import layers

from keras_mp.lean.blocks import find_blocks


def found(model):
    return [[block.path for block in group] for group in find_blocks(model)]


def names(start, count):
    return [f"{start}{index}" for index in range(count)]


def test_of_a_subclassed_model_and_of_a_custom_layer():
    assert found(own_blocks.mini_gpt(name="gpt")) == [names("block_", 3)]
    (group,) = find_blocks(own_blocks.tower())
    assert [block.name for block in group] == names("residual_", 3)
    assert group[0].kind == "layer" and group[0].path.endswith("/residual_0")
    # Dense 16 x 16 with bias, and the four vectors of the normalization, in float32.
    assert group[0].bytes == 4 * (16 * 16 + 16 + 4 * 16)
    assert len({block.structure for block in group}) == 1


def test_of_a_nested_task_and_of_two_sides():
    task = causal_models.build("GPT2CausalLM")
    assert found(task) == [names(f"{task.backbone.name}/transformer_layer_", 2)]
    task = causal_models.build("BartSeq2SeqLM")
    sides = [f"{task.backbone.name}/transformer_{side}_layer_" for side in ("encoder", "decoder")]
    assert found(task) == [names(side, 2) for side in sides]


def test_of_one_layer_that_is_called_often():
    sizes = {"vocabulary_size": 40, "num_layers": 4, "num_heads": 2, "hidden_dim": 16, "intermediate_dim": 32}
    albert = keras_hub.models.AlbertBackbone(**sizes, embedding_dim=8, max_sequence_length=8)
    assert found(albert) == [["group_0_inner_layer_0"]]


def test_of_a_loop_in_a_function():
    (group,) = find_blocks(own_blocks.vit())
    assert len(group) == 3 and {block.kind for block in group} == {"segment"}
    for block in group:
        kinds = [type(layer).__name__ for layer in block.layers]
        assert kinds == ["LayerNormalization", "MultiHeadAttention", "Add", "LayerNormalization"] + [
            "Dense",
            "Dropout",
        ] * 2 + ["Add"]


def test_of_residual_stages():
    groups = find_blocks(own_blocks.resnet((2, 3)))
    assert [len(group) for group in groups] == [1, 2, 1, 3]
    assert all(type(block.layers[-1]).__name__ == "ReLU" for group in groups for block in group)
    convolutions = [sum("Conv" in type(layer).__name__ for layer in group[0].layers) for group in groups]
    assert convolutions == [3, 2, 3, 2]


def test_of_blocks_in_blocks():
    def tower(name):
        inputs = keras.Input((8,))
        x = inputs
        for index in range(3):
            inner = keras.Sequential([keras.Input((8,)), layers.Dense(16), layers.Dense(8)], name=f"{name}_{index}")
            x = inner(x)
        return keras.Model(inputs, x, name=name)

    # Two towers of three blocks: the blocks inside are more.
    inputs = keras.Input((8,))
    model = keras.Model(inputs, tower("left")(inputs) + tower("right")(inputs))
    assert found(model) == [names(f"{side}/{side}_", 3) for side in ("left", "right")]
    # Four towers of three blocks, one after the other.
    x = inputs
    for name in "abcd":
        x = tower(name)(x)
    assert found(keras.Model(inputs, x)) == [["a", "b", "c", "d"]]


def test_of_sequential_models():
    pairs = [layers.Dense(16), layers.ReLU()] * 1 + [layers.Dense(16), layers.ReLU()]
    model = keras.Sequential([keras.Input((16,)), *pairs, layers.Dense(3)])
    (group,) = find_blocks(model)
    assert [block.name for block in group] == [f"{a.name}..{b.name}" for a, b in (pairs[:2], pairs[2:])]


def test_a_model_without_blocks_has_none():
    plain = keras.Sequential([keras.Input((8,)), *(layers.Dense(8) for _ in range(4))])
    recurrent = keras.Sequential([keras.Input((5, 8)), *(layers.LSTM(8, return_sequences=True) for _ in range(2))])
    assert found(plain) == [] and found(recurrent) == []


def test_a_model_without_weights_is_an_error():
    with pytest.raises(ValueError, match="'mini' has none yet: call it once on a batch"):
        find_blocks(own_blocks.MiniGpt(name="mini"))
