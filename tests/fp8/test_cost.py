"""What FP8 is predicted to gain, and what is chosen by it."""

import keras
import numpy as np
import pytest
from keras import layers
from twins import twin

import keras_mp
from keras_mp import convert
from keras_mp.fp8 import Scalings
from keras_mp.fp8.convert import decisions
from keras_mp.fp8.layers import Float8Layer
from keras_mp.fp8.selection import chip_for, step_cost
from keras_mp.precision.chips import CHIPS

SHAPE = (8192, 4096, 16384)


def test_by_hand():
    """(8192, 4096, 16384) on an H200: all products are bound by the rate; element counts in units of 2^25."""
    x, w, g = 1, 2, 4
    element = 2**25 / 4.8e12
    flops = 3 * 2 * np.prod(np.array(SHAPE, "float64"))
    bfloat16 = flops / 989.4e12 + w * 6 * element
    products = flops / 1978.9e12
    for recipe, moved in [
        (Scalings.named("current"), (x + g) * (2 + 2 + 1 + 1) + w * (4 + 4 + 1 + 1)),
        (Scalings.named("delayed"), (x + g) * (2 + 1 + 1) + w * (4 + 1 + 1)),
        (Scalings.named("rowwise"), 2 * ((x + g) * (2 + 2 + 1) + w * (4 + 4 + 1))),
    ]:
        cost = step_cost(*SHAPE, CHIPS["h200"], recipe)
        np.testing.assert_allclose(cost, (bfloat16, products + moved * element), rtol=1e-12)


def test_products_of_a_few_rows_are_bound_by_memory():
    cost = step_cost(1, 1024, 1024, CHIPS["h100"], Scalings.named("delayed"))
    elements = np.array([1024, 2**20, 1024], "float64")
    operands = elements[[0, 1]].sum() + elements[[2, 1]].sum() + elements[[0, 2]].sum()
    results = 2 * elements[2] + 2 * elements[0] + 4 * elements[1]
    moved = operands + results + elements @ [2 + 1 + 1, 4 + 1 + 1, 2 + 1 + 1]
    np.testing.assert_allclose(cost.fp8, moved / 3350e9, rtol=1e-12)


@pytest.mark.parametrize("name, published", [("current", 1.58), ("delayed", 1.69)])
def test_beside_what_transformer_engine_measured(name, published):
    """On an H200, hidden size 4096 and 16384: Transformer Engine's documentation. Peaks are never reached."""
    assert published <= step_cost(*SHAPE, CHIPS["h200"], Scalings.named(name)).gain <= 1.1 * published


def test_the_order_of_the_recipes():
    for chip in [chip for chip in CHIPS.values() if "fp8" in chip.peak]:
        recipes = Scalings.named("delayed"), Scalings.named("current"), Scalings.named("rowwise")
        delayed, current, rowwise = (step_cost(*SHAPE, chip, recipe) for recipe in recipes)
        assert delayed.fp8 < current.fp8 < rowwise.fp8
        assert delayed.gain <= chip.peak["fp8"] / chip.peak["bfloat16"]


def network():
    keras.config.set_dtype_policy("mixed_bfloat16")
    x = inputs = keras.Input((512, 2048))
    for name, size in [("first", 2048), ("up", 8192), ("down", 2048), ("narrow", 64), ("wide", 2048), ("last", 2048)]:
        x = layers.Dense(size, kernel_initializer="zeros", name=name)(x)
    return keras.Model(inputs, x)


def test_layers_are_chosen_by_what_is_predicted():
    model = network()
    converted = convert(twin(model), "delayed", target="h100")
    assert [layer.name for layer in converted.layers if isinstance(layer, Float8Layer)] == ["up", "down"]
    rows = {each.path: each for each in decisions(model, target="h100", scaling="delayed")}
    report = keras_mp.report(model, target="h100", scaling="delayed")
    printed = " ".join(f"{report} {report.details()}".split())
    assert rows["up"].cost == step_cost(8 * 512, 2048, 8192, CHIPS["h100"], Scalings.named("delayed"))
    assert rows["narrow"].cost.gain < 1 < rows["up"].cost.gain
    assert rows["first"].reason.startswith("it is the model's first layer: ")
    assert f"{rows['up'].cost.gain:.2f}" in printed and "does not gain" in printed
    assert "Predicted from peak rates for h100, batches of 8" in printed
    assert "keras_mp.convert(model, scaling='delayed', target='h100')" in printed
    after = {each.path: each for each in decisions(converted, target="h200")}
    assert after["up"].reason.startswith("it computes in FP8 with Scalings.named('delayed'): ")
    assert after["up"].cost == step_cost(8 * 512, 2048, 8192, CHIPS["h200"], Scalings.named("delayed"))


def test_projections_of_attention():
    inputs = keras.Input((1024, 2048))
    x = layers.MultiHeadAttention(16, 128, name="attention")(inputs, inputs)
    rows = decisions(keras.Model(inputs, layers.Dense(16)(x)), target="v7x")
    assert [each.path for each in rows if each.cost] == [
        *(f"attention/{name}" for name in ("query", "key", "value", "attention_output")),
        rows[-1].path,
    ]
    assert all(each.cost == rows[3].cost for each in rows[:4])


def test_bad_input():
    model = network()
    with pytest.raises(ValueError, match="target='a100': A100 SXM4 80GB has no FP8 units.*With: .*h100"):
        decisions(model, target="a100")
    with pytest.raises(ValueError, match="Did you mean 'h100'"):
        decisions(model, target="h1000")
    with pytest.raises(ValueError, match="batch_size=0 must be a whole number, 1 or more"):
        convert(model, target="h100", batch_size=0)
    with pytest.raises(ValueError, match="target='h100' chooses the layers, and so does select"):
        convert(model, select=lambda path, layer: True, target="h100")
    inputs = keras.Input((None, 64))
    unknown = keras.Model(inputs, layers.Dense(64, name="dense")(inputs))
    with pytest.raises(ValueError, match=r"layer 'dense' takes inputs of unknown length, \(None, None, 64\)"):
        decisions(unknown, target="h100")


@pytest.mark.jax
@pytest.mark.skipif(keras.backend.backend() != "jax", reason="TensorFlow has no product in blocks, and says so")
def test_four_bits_on_chips_that_have_their_rate():
    with pytest.raises(ValueError, match="H100 SXM5 has no NVFP4 units.*With: b200, b300, rtx5090"):
        chip_for("h100", Scalings.named("nvfp4"))
    chip, (m, k, n) = chip_for("b200", Scalings.named("nvfp4")), SHAPE
    cost = step_cost(m, k, n, chip, Scalings.named("nvfp4"))
    bandwidth = chip.bandwidth / chip.devices
    # Each number is read for three amaxes and for the copies; of a copy a number takes 4 bits, a scale 8 for 16.
    passes = (m * k + m * n) * (4 * 2 + 2 * 9 / 16) + k * n * (4 * 4 + 2 * 9 / 16)
    least = 3 * 2 * m * k * n / (chip.peak["fp4"] / chip.devices)
    np.testing.assert_allclose(cost.fp8, least + passes / bandwidth, rtol=1e-12)
