"""convert, revert and explain; on models of every kind: tests/promises."""

import keras
import numpy as np
import pytest
import zoo
from reference import to_numpy
from twins import twin

import keras_mp
from keras_mp import convert
from keras_mp.fp8 import Scalings
from keras_mp.fp8.convert import decisions, without_float8
from keras_mp.fp8.layers import Float8Layer
from keras_mp.fp8.selection import decide, end_layers
from keras_mp.layers import Float8Dense
from keras_mp.rebuild.walk import Walk, layers_by_path, treatments_of

# Layers that a custom layer creates take the policy from here, as ever in Keras, also when a file is loaded.
pytestmark = pytest.mark.usefixtures("mixed_bfloat16")

layers = keras.layers
PRODUCTS = (layers.Dense, layers.EinsumDense)


def everything(path, layer):
    return True


def products(model):
    return [layer for layer in layers_by_path(model).values() if isinstance(layer, PRODUCTS)]


def converted(model):
    return [layer for layer in products(model) if isinstance(layer, Float8Layer)]


def outputs(model, batch):
    return [to_numpy(each) for each in keras.tree.flatten(model(batch, training=False))]


def assert_near(actual, expected):
    """Within what FP8 costs: its last bit is 6%, and a few products follow one another.

    Rounding errors are relative to the terms of a sum, which are of order 1 in these models, and not to the sum: where
    terms cancel, as in front of a GELU, a quarter of that order stands for the terms.
    """
    for a, e in zip(actual, expected, strict=True):
        assert np.linalg.norm(a - e) <= 0.2 * max(np.linalg.norm(e), 0.25 * np.sqrt(e.size))
        assert np.any(a != e)


def dense(units, activation=None, **arguments):
    """Zeros take no time to make."""
    return layers.Dense(units, activation, kernel_initializer="zeros", **arguments)


def wide():
    inputs = keras.Input((64,), name="features")
    x = dense(1200, "relu", name="first")(layers.LayerNormalization()(inputs))
    x = dense(1040, "relu", name="wide")(layers.Dropout(0.1)(x))
    x = dense(1041, name="odd")(x)
    x = dense(1024, name="small")(x)
    x = dense(5120, name="long")(x)
    x = dense(1040, name="last")(x)
    return keras.Model(inputs, layers.Softmax(dtype="float32")(x))


def test_the_default_converts_what_gains():
    model = wide()
    rows = {each.path: each for each in decisions(model)}
    report = keras_mp.report(model)
    printed = " ".join(f"{report} {report.details()}".split())
    for name, why in {
        "first": "it is the model's first layer",
        "wide": "its product of 1200 by 1040 gains",
        "odd": "its product of 1040 by 1041 has sides that are no multiples of 16",
        "small": "its product of 1041 by 1024 has sides that are no multiples of 16",
        "last": "it computes the model's output",
    }.items():
        assert rows[name].reason == why
        assert name in printed
    assert rows["wide"].float8 and not rows["last"].float8
    assert f"0 of {len(rows)} products are in FP8" in printed and "Change: 2 products can be in FP8" in printed
    fp8 = convert(twin(model))
    assert [layer.name for layer in converted(fp8)] == ["wide", "long"]
    after = {each.path: each for each in decisions(fp8)}
    assert after["wide"].float8 and after["wide"].reason.startswith("it computes in FP8 with Scalings.named('current')")
    printed = " ".join(str(keras_mp.report(fp8)).split())
    assert not after["first"].float8 and "In few bits: wide and long" in printed
    assert f"2 of {len(rows)} products are in FP8" in printed
    too_small = {each.path: each.reason for each in decide(Walk(keras.Sequential([keras.Input((64,)), model])))}
    assert set(too_small) >= {f"{model.name}/wide"}


def test_small_products_do_not_gain():
    products = [dense(size, use_bias=False) for size in (1024, 4096, 1040, 4096, 1024, 5120, 16)]
    model = keras.Sequential([keras.Input((16,)), *products, layers.Dense(16)])
    small = [each.path for each in decide(Walk(model)) if "is too small" in each.reason]
    # 1024 x 4096 and 4096 x 1024 are too small; 4096 x 1040, 1040 x 4096, 1024 x 5120 and 5120 x 16 are not.
    assert small == [products[1].name, products[4].name]


class Gated(layers.Dense):
    """A Dense layer with code of its own."""

    def call(self, inputs, training=None):
        return keras.ops.sigmoid(super().call(inputs))


def test_what_cannot_be_converted_is_left_and_explained():
    inputs = keras.Input((4, 16))
    x = layers.EinsumDense("abc,bcd->abd", (4, 16), name="batched")(inputs)
    x = Gated(16, name="gated")(x)
    outputs = layers.Dense(16, name="dense")(x)
    model = keras.Model(inputs, outputs)
    rows = {each.path: each for each in decisions(model, everything)}
    assert "the label 'b' in 3 of its 3 terms" in rows["batched"].reason
    assert "Gated has code of its own" in rows["gated"].reason
    with keras.saving.custom_object_scope({"Gated": Gated}):
        fp8 = convert(twin(model), select=everything)
    assert [layer.name for layer in converted(fp8)] == ["dense"]


def test_a_quantized_layer_is_left():
    model = keras.Sequential([keras.Input((16,)), layers.Dense(16), layers.Dense(16)])
    model.layers[0].quantize("int8")
    assert "quantized to int8" in decide(Walk(model), everything)[0].reason


def test_first_and_last_layers_of_nested_models():
    inner = keras.Sequential([keras.Input((8,)), layers.Dense(8, name="a"), layers.Dense(8, name="b")], name="inner")
    inputs = keras.Input((8,))
    x = inner(layers.Flatten()(inputs))
    y = layers.Dense(8, name="c")(x)
    model = keras.Model(inputs, [layers.Activation("relu")(layers.Dense(8, name="d")(y)), y])
    names = {layer.name: why for layer in products(model) if (why := end_layers(Walk(model)).get(id(layer)))}
    assert names == {
        "a": "it is the model's first layer",
        "c": "it computes the model's output",
        "d": "it computes the model's output",
    }
    subclassed, _ = zoo.build("subclassed", "float32")
    first, *_, last = products(subclassed)
    assert set(end_layers(Walk(subclassed))) == {id(first), id(last)}


def test_converting_again_changes_what_select_chooses_and_a_recipe_is_given_for():
    model, batch = zoo.build("attention", "mixed_bfloat16")
    reasons = {row.reason for row in decisions(twin(model), lambda path, layer: "query" in path) if row.float8}
    assert reasons == {"select chose it"}
    once = convert(twin(model), Scalings.named("current", format="E4M3"), select=lambda path, layer: "query" in path)
    twice = convert(twin(once), select=lambda path, layer: "query" in path)
    assert {layer.scaling for layer in converted(twice)} == {Scalings.named("current", format="E4M3")}
    np.testing.assert_equal(outputs(twice, batch), outputs(once, batch))
    both = convert(twin(once), Scalings.named("current"), select=lambda path, layer: "query" not in path)
    narrow, current = Scalings.named("current", format="E4M3"), Scalings.named("current")
    assert {layer.scaling for layer in converted(both)} == {narrow, current}
    assert len(converted(both)) == len(products(model))
    told = "query.* change from Scalings.*E4M3.* to .*rowwise.*neither keeps amaxes"
    with pytest.warns(UserWarning, match=told):
        changed = convert(twin(both), "rowwise", select=lambda path, layer: "query" in path)
    assert {layer.scaling for layer in converted(changed)} == {Scalings.named("rowwise"), Scalings.named("current")}
    assert_near(outputs(changed, batch), outputs(both, batch))


def test_layers_that_compute_in_float32_come_with_a_note():
    model, batch = zoo.build("functional", "float32")
    with pytest.warns(UserWarning, match="dense.* compute in float32.*mixed_bfloat16"):
        fp8 = convert(twin(model), select=everything)
    assert_near(outputs(fp8, batch), outputs(model, batch))


def test_fp8_layers_are_plain_ones_for_a_while():
    model = keras.Sequential([keras.Input((16,)), Float8Dense(16), layers.Dense(16)])
    convert(model, "delayed", select=lambda path, layer: layer is model.layers[1])
    before = [layer.get_config() for layer in model.layers]
    with without_float8(model):
        assert len(products(model)) == 2 and converted(model) == []
        assert not any(treatments_of(layer) for layer in model.layers)
    assert [layer.get_config() for layer in model.layers] == before and len(converted(model)) == 2


def test_bad_input():
    model, _ = zoo.build("functional", "mixed_bfloat16")
    with pytest.raises(ValueError, match="scaling='blockwise' is unknown"):
        convert(model, "blockwise")
    with pytest.raises(TypeError, match="select='Dense' must be a function"):
        convert(model, select="Dense")


def test_where_nothing_is_converted_it_says_why():
    small = keras.Sequential([keras.Input((64,)), *(keras.layers.Dense(32) for _ in range(4))])
    with pytest.warns(
        UserWarning, match=r"none of the 4 Dense .* is in FP8.* 2 of them: its product of 32 by 32 is too"
    ):
        convert(small)
    with pytest.warns(UserWarning, match="has no Dense or EinsumDense layer, so nothing is in FP8"):
        convert(keras.Sequential([keras.Input((64,)), keras.layers.ReLU()]))
    with pytest.warns(UserWarning, match="has no Dense or EinsumDense layer, so nothing is in INT8"):
        convert(keras.Sequential([keras.Input((64,)), keras.layers.ReLU()]), Scalings.named("int8"))
