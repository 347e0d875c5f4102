"""Scales by row and by block: each of the three products against NumPy."""

import functools
from types import SimpleNamespace

import numpy as np
import pytest
from mx_reference import mx_product
from reference import assert_close, compiled, row_product, sqnr, tensors, to_numpy, with_gradients

from keras_mp.fp8 import Scalings, matmul
from keras_mp.fp8.quantize import lies_in

HYBRID = {"gradient": "E5M2"}
ALIKE, MIXED = ("E4M3",) * 3, ("E4M3", "E4M3", "E5M2")
# Recipes, what they are compared with, the formats of input, kernel and gradient, and the orders that numbers go over.
RECIPES = {
    "rows": (Scalings.named("rowwise"), row_product, ALIKE, 12),
    "rows, hybrid": (
        Scalings.named("rowwise", format=HYBRID, scale="power_of_two"),
        functools.partial(row_product, power_of_two=True), MIXED, 12,
    ),
    "blocks": (Scalings.named("mxfp8"), mx_product, ALIKE, 9),
    "blocks, hybrid": (
        Scalings.named("mxfp8", format=HYBRID, scale="E8M0_floor"),
        functools.partial(mx_product, rounding="floor"), MIXED, 9,
    ),
}  # fmt: skip


@pytest.mark.jax
@pytest.mark.parametrize(
    "recipe, equation, shapes, scale",
    [
        ("rows, hybrid", "abc,cde->adbe", ((3, 5, 16), (16, 2, 4)), 1e-20),  # tiny gradients
        ("rows", "abcd,cde->abe", ((3, 5, 2, 4), (2, 4, 16)), 1.0),
        ("blocks, hybrid", "abc,cde->adbe", ((3, 25, 16), (16, 2, 4)), 1e-20),
        ("blocks", "a,ab->b", ((16,), (16, 1)), 1.0),
    ],
)
def test_any_product(recipe, equation, shapes, scale):
    """Forward and both gradients, of operands whose rows and columns differ by orders."""
    scaling, expected, names, orders = RECIPES[recipe]
    rng = np.random.default_rng()

    def values(shape):
        powers = (2.0 ** rng.integers(-orders, orders + 1, size) for size in shape)
        return (rng.normal(size=shape) * functools.reduce(np.multiply, np.ix_(*powers))).astype("float32")

    x, w = map(values, shapes)
    g = (scale * values(np.einsum(equation, x, w).shape)).astype("float32")
    found = compiled(with_gradients(lambda x, w: matmul(x, w, scaling, equation=equation)))(*tensors(x, w, g))
    operands, out = equation.split("->")
    left, right = operands.split(",")
    first, second, third = names
    assert_close(found[0], expected(equation, x, w, (first, second)))
    assert_close(found[1], expected(f"{out},{right}->{left}", g, w, (third, second)))
    assert_close(found[2], expected(f"{left},{out}->{right}", x, g, (first, third)))


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
