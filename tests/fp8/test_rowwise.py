"""Rowwise scaling: each of the three products against NumPy, each row and column with a scale of its own."""

import functools
from types import SimpleNamespace

import numpy as np
import pytest
from reference import assert_close, check_products, compiled, row_product, sqnr, tensors, to_numpy

from keras_mp.fp8 import Scalings, matmul
from keras_mp.fp8.quantize import lies_in

RECIPES = {
    "E4M3": (Scalings.named("rowwise"), ("E4M3",) * 3),
    "hybrid": (Scalings.named("rowwise", format={"gradient": "E5M2"}, scale="power_of_two"), ("E4M3", "E4M3", "E5M2")),
}


@pytest.mark.jax
@pytest.mark.parametrize(
    "equation, x, w, recipe, scale",
    [
        ("abc,cde->adbe", (3, 5, 16), (16, 2, 4), "hybrid", 1e-20),  # tiny gradients
        ("abcd,cde->abe", (3, 5, 2, 4), (2, 4, 16), "E4M3", 1.0),
    ],
)
def test_any_product(equation, x, w, recipe, scale):
    recipe, names = RECIPES[recipe]
    reference = functools.partial(row_product, power_of_two=recipe.all[0].scale == "power_of_two")
    multiply = functools.partial(matmul, scaling=recipe, equation=equation)
    check_products(multiply, reference, equation, (x, w), names, compiled, 12, scale)


def test_zeros_and_what_is_not_finite():
    x = np.random.default_rng().normal(size=(5, 16)).astype("float32")
    x[0], x[1, 3], x[2, 3] = 0, np.inf, np.nan
    w = np.eye(16, dtype="float32")
    found = to_numpy(compiled(lambda x, w: matmul(x, w, "rowwise"))(*tensors(x, w)))
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


@pytest.mark.parametrize("axis, axes, lies", [(0, None, True), (0, (0,), True), (1, (0,), False), (2, (0, -1), True)])
def test_a_scale_is_that_of_all_devices_where_its_axes_are_split(axis, axes, lies):
    assert lies_in(SimpleNamespace(axis=axis, shape=(4, 5, 6)), axes) is lies
