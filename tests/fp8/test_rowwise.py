"""Rowwise scaling: each of the three products against NumPy, each row and column with a scale of its own."""

import functools

import keras
import numpy as np
import pytest
from marks import ci_on, few
from reference import assert_close, check_products, compiled, row_product, sqnr, tensors, to_numpy

from keras_mp.fp8 import CurrentScaling, Float8Dense, Float8EinsumDense, RowwiseScaling, convert, matmul

pytestmark = ci_on("jax")

MODES = pytest.mark.parametrize("mode", [lambda function: function, compiled], ids=["eager", "jit"])
RECIPES = {
    "E4M3": (RowwiseScaling(), ("E4M3",) * 3),
    "hybrid": (RowwiseScaling("hybrid", power_of_two=True), ("E4M3", "E4M3", "E5M2")),
}


def check(equation, x, w, recipe, mode, scale=1.0):
    recipe, names = RECIPES[recipe]
    reference = functools.partial(row_product, power_of_two=recipe.power_of_two)
    multiply = functools.partial(matmul, recipe=recipe, equation=equation)
    check_products(multiply, reference, equation, (x, w), names, mode, 12, scale)


@MODES
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(
    "equation, x, w",
    [
        ("ab,bc->ac", (24, 40), (40, 17)),
        ("abc,cd->abd", (3, 5, 16), (16, 8)),
        ("abc,cde->abde", (3, 5, 16), (16, 2, 4)),
        ("abcd,cde->abe", (3, 5, 2, 4), (2, 4, 16)),
        ("a,ab->b", (16,), (16, 8)),
    ],
)
@pytest.mark.ci
def test_any_product(equation, x, w, recipe, mode):
    check(equation, x, w, recipe, mode)


@MODES
@pytest.mark.parametrize("x, w", [((1, 16), (16, 4)), ((5, 1), (1, 4)), ((5, 16), (16, 1)), ((1, 1), (1, 1))])
def test_one_row_and_one_column(x, w, mode):
    check("ab,bc->ac", x, w, "E4M3", mode)


@MODES
def test_tiny_gradients(mode):
    check("ab,bc->ac", (16, 32), (32, 16), "hybrid", mode, scale=1e-20)


@pytest.mark.parametrize("jit", [False, True])
def test_unknown_sizes_and_empty_batches(jit):
    if keras.backend.backend() != "tensorflow":
        pytest.skip("TensorFlow alone traces with sizes that are unknown")
    import tensorflow as tf

    rng = np.random.default_rng()
    w = rng.normal(size=(16, 8)).astype("float32")
    signature = [tf.TensorSpec((None, None, 16))]
    function = tf.function(lambda x: matmul(x, w, "rowwise"), input_signature=signature, jit_compile=jit)
    for shape in ((3, 5, 16), (1, 1, 16), (0, 5, 16)):
        x = rng.normal(size=shape).astype("float32")
        assert_close(function(x), row_product("abc,cd->abd", x, w, ("E4M3", "E4M3")))


@MODES
def test_zeros_and_what_is_not_finite(mode):
    x = np.random.default_rng().normal(size=(5, 16)).astype("float32")
    x[0], x[1, 3], x[2, 3] = 0, np.inf, np.nan
    w = np.eye(16, dtype="float32")
    found = to_numpy(mode(lambda x, w: matmul(x, w, "rowwise"))(*tensors(x, w)))
    assert np.all(found[0] == 0) and not np.isfinite(found[1]).all() and not np.isfinite(found[2]).all()
    assert_close(found[3:], row_product("ab,bc->ac", x[3:], w, ("E4M3", "E4M3")))


def test_an_outlier_costs_its_own_row_only():
    rng = np.random.default_rng()
    x, w = (rng.normal(size=(64, 64)).astype("float32") for _ in range(2))
    x[7] *= 1e5
    exact = x.astype("float64") @ w
    others = np.arange(64) != 7
    rows, tensor = (to_numpy(matmul(*tensors(x, w), recipe))[others] for recipe in ("rowwise", "current"))
    assert sqnr(rows, exact[others]) > 27
    assert sqnr(tensor, exact[others]) < 15


@pytest.mark.parametrize("policy", few(["mixed_bfloat16", "mixed_float16", "float32"], "mixed_bfloat16"))
def test_layers_train_save_and_load(policy, tmp_path):
    keras.config.set_dtype_policy(policy)
    inputs = keras.Input((4, 32))
    x = Float8EinsumDense("abc,cde->abde", (None, 2, 16), recipe="rowwise", name="split")(inputs)
    x = Float8Dense(16, "relu", recipe=RowwiseScaling(power_of_two=True))(keras.ops.reshape(x, (-1, 4, 32)))
    model = keras.Model(inputs, x)
    model.compile("sgd", "mse")
    rng = np.random.default_rng()
    data = rng.normal(size=(16, 4, 32)).astype("float32"), rng.normal(size=(16, 4, 16)).astype("float32")
    losses = model.fit(*data, epochs=5, verbose=0).history["loss"]
    assert losses[-1] < losses[0]
    model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    assert again.get_layer("split").recipe == RowwiseScaling()
    np.testing.assert_array_equal(to_numpy(again(data[0])), to_numpy(model(data[0])))


def test_beside_the_others():
    assert RowwiseScaling() != CurrentScaling("E4M3") and RowwiseScaling("hybrid") != RowwiseScaling()
    again = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(RowwiseScaling("hybrid")))
    assert again == RowwiseScaling("hybrid")
    model = keras.Sequential([keras.Input((16,)), keras.layers.Dense(32), keras.layers.Dense(16)])
    with pytest.warns(UserWarning, match="compute in float32"):
        model = convert(model, "rowwise", select=lambda path, layer: True)
    assert all(layer.recipe == RowwiseScaling() for layer in model.layers)
