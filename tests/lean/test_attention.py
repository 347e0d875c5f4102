"""Attention against the equations in NumPy's float64: values, gradients, hard shapes, bad shapes."""

import functools

import keras
import ml_dtypes
import numpy as np
import pytest
from drawn import kept_in_numpy, seed_state
from gradients_of import MODES, value_and_gradients
from keras import ops

import keras_mp
from keras_mp.backend.common.device import TracedChip
from keras_mp.lean.blockwise_attention import attention
from keras_mp.lowering import lower_step
from keras_mp.planner.read.program import read_module

JAX = keras.backend.backend() == "jax"
GRAPH = MODES[-2]  # on JAX, which has no graphs, eagerly
FAST = "jit" if JAX else "eager"


def on_both(*case):
    """A case that runs on JAX, too: one that is jitted, as JAX compiles each operation of an eager one."""
    return pytest.param(*case, marks=pytest.mark.jax)


def expected(query, key, value, upstream, seen, factors=1.0):
    """The output and the gradients, each with the size of its terms.

    Of (batch, heads, rows, columns) are `seen` and the factors of the probabilities, 0 where dropout drops.
    """
    group = query.shape[2] // key.shape[2]
    q, k, v, g = (each.astype("float64").transpose(0, 2, 1, 3) for each in (query, key, value, upstream))
    k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    scale = query.shape[-1] ** -0.5
    scores = np.where(seen, scale * q @ k.swapaxes(-1, -2), -np.inf)
    largest = scores.max(-1, keepdims=True)
    p = np.exp(scores - np.where(np.isfinite(largest), largest, 0.0))
    total = p.sum(-1, keepdims=True)
    p /= np.where(total == 0, 1, total)
    output = p * factors @ v
    to_scores = p * (factors * (g @ v.swapaxes(-1, -2)) - (g * output).sum(-1, keepdims=True)) * scale
    to_key, to_value = to_scores.swapaxes(-1, -2) @ q, (p * factors).swapaxes(-1, -2) @ g

    def by_key_head(x):
        return x.reshape(x.shape[0], -1, group, *x.shape[2:]).sum(2)

    parts = (output, to_scores @ k, by_key_head(to_key), by_key_head(to_value))
    # The terms that the sums are of: where they cancel, rounding is of their size, not of the result's.
    change, largest = np.abs(g @ v.swapaxes(-1, -2)).max() * scale, np.max(factors)
    terms = np.abs(v).max(), change * np.abs(k).max(), change * np.abs(q).max(), np.abs(g).max()
    return [(each.transpose(0, 2, 1, 3), size * largest) for each, size in zip(parts, terms, strict=True)]


def draw(rows, columns, heads, key_heads, features=8, batch=2, size=1.0):
    generator = np.random.default_rng()
    shapes = [
        (batch, rows, heads, features),
        *[(batch, columns, key_heads, features)] * 2,
        (batch, rows, heads, features),
    ]
    return [(size * generator.normal(size=shape)).astype("float32") for shape in shapes]


def check(arrays, seen, mode, tolerance=1e-5, unknown=(), factors=1.0, **arguments):
    query, key, value, upstream = arrays

    def function(query, key, value):
        return ops.sum(ops.cast(attention(query, key, value, **arguments), "float32") * upstream.astype("float32"))

    found = value_and_gradients(function, [query, key, value], mode, unknown)
    attend = functools.partial(attention, **arguments)
    if JAX:
        import jax

        attend = jax.jit(attend)
    output = ops.convert_to_numpy(ops.cast(attend(*map(ops.convert_to_tensor, (query, key, value))), "float32"))
    for ours, (right, terms) in zip(
        [output, *found[1:]], expected(query, key, value, upstream, seen, factors), strict=True
    ):
        np.testing.assert_allclose(ours, right, rtol=0, atol=tolerance * terms)


def causal_mask(rows, columns):
    return np.tri(rows, columns, dtype=bool)


@pytest.mark.parametrize("mode, block", [("eager", None), (GRAPH, 10), on_both("jit", 3)])
def test_causal_whatever_the_block(mode, block):
    check(draw(10, 10, 2, 2), causal_mask(10, 10), mode, causal=True, block=block)


@pytest.mark.parametrize(
    "shape, causal",
    [((1, 1, 1, 1), True), ((5, 1, 2, 2), False), ((3, 9, 6, 2), True), ((9, 3, 4, 1), True), ((3, 5, 4, 2), False)],
)
def test_one_row_one_column_and_groups(shape, causal):
    rows, columns = shape[:2]
    seen = causal_mask(rows, columns) if causal else np.ones((rows, columns), bool)
    check(draw(*shape), seen, "eager", causal=causal, block=2)


def test_length_beyond_the_default_blocks():
    check(draw(300, 300, 2, 1), causal_mask(300, 300), FAST, tolerance=2e-5, causal=True)


def test_masks_and_rows_that_see_nothing():
    columns = np.random.default_rng().random((2, 7)) > 0.5
    columns[0] = False
    seen = columns[:, None, None, :]
    check(draw(5, 7, 2, 2), seen, "eager", mask=columns, block=2)
    check(draw(5, 7, 2, 2), seen, GRAPH, mask=columns[:, None, :])
    output = attention(*map(ops.convert_to_tensor, draw(5, 7, 2, 2)[:3]), columns)
    assert not ops.convert_to_numpy(output)[0].any()


@pytest.mark.jax
def test_a_mask_of_pairs():
    pairs = np.random.default_rng().random((2, 7, 7)) > 0.5
    pairs[1, 3] = False
    check(draw(7, 7, 4, 2), pairs[:, None] & causal_mask(7, 7), FAST, mask=pairs, causal=True, block=3)


@pytest.mark.parametrize(
    "mode, block, causal, unknown",
    [
        ("eager", None, True, ()),
        on_both("jit", 4, True, ()),
        on_both("jit", 3, False, ()),
        pytest.param("graph", None, True, (0, 1), marks=pytest.mark.skipif(JAX, reason="JAX knows all sizes")),
    ],
)
def test_dropout_drops_the_same_forward_and_backward_whatever_the_block(mode, block, causal, unknown):
    seed, rate = [int(word) for word in np.random.default_rng().integers(2**31, size=2)], 0.4
    factors = kept_in_numpy(seed, (2, 4, 10, 10), rate) / (1 - rate)
    seen = causal_mask(10, 10) if causal else np.ones((10, 10), bool)
    dropout = {"dropout": rate, "seed": seed_state(seed)}
    check(draw(10, 10, 4, 2), seen, mode, unknown=unknown, factors=factors, causal=causal, block=block, **dropout)


@pytest.mark.jax
def test_dropout_with_masks_and_a_row_that_sees_nothing():
    pairs = np.random.default_rng().random((2, 7, 7)) > 0.5
    pairs[1, 3] = False
    factors = kept_in_numpy((5, 2**31 - 1), (2, 4, 7, 7), 0.2) / 0.8
    dropout = {"dropout": 0.2, "seed": seed_state((5, 2**31 - 1))}
    check(draw(7, 7, 4, 2), pairs[:, None], FAST, factors=factors, mask=pairs, block=3, **dropout)


@pytest.mark.parametrize("size", [0.0, 60.0])
def test_zeros_and_large_scores(size):
    # With 60, scores reach thousands: exp alone would overflow.
    check(draw(9, 9, 2, 2, size=size), causal_mask(9, 9), "eager", tolerance=2e-4, causal=True, block=4)


@pytest.mark.skipif(JAX, reason="JAX knows all sizes")
@pytest.mark.parametrize("mode, unknown", [("graph", (0,)), ("jit", (0, 1))])
def test_unknown_batch_and_length(mode, unknown):
    check(draw(6, 6, 4, 2), causal_mask(6, 6), mode, unknown=unknown, causal=True)


# One block of all rows: where TensorFlow runs the products of a graph as kernels, these round the gradients of keys and
# values.
@pytest.mark.parametrize(
    "rows, causal, block, mode, dtype",
    [
        on_both(12, True, 5, "jit", "float16"),
        (200, False, None, GRAPH, "float16"),
        (100, True, None, GRAPH, "bfloat16"),
    ],
)
def test_sixteen_bits_round_operands_only(rows, causal, block, mode, dtype):
    low = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float16
    arrays = [each.astype(low) for each in draw(rows, rows, 4, 2)]
    seen = causal_mask(rows, rows) if causal else np.ones((rows, rows), bool)
    # Probabilities, and the gradients of scores, are rounded once, to 8 or 11 bits; so are the results.
    check(arrays, seen, mode, tolerance=2**-6 if dtype == "bfloat16" else 2**-9, causal=causal, block=block)


def test_a_mask_stands_behind_one_barrier_for_all_blocks():
    x = keras.Input((512, 16))
    mask = ops.matmul(x, ops.transpose(x, (0, 2, 1))) > 0
    attend = keras.layers.MultiHeadAttention(2, 8)
    model = keras_mp.lean.make_lean(keras.Model(x, attend(attend(x, x, attention_mask=mask), x, attention_mask=mask)))
    model.compile("sgd", "mse")
    batch = keras.KerasTensor((2, 512, 16), "float32")
    program = str(read_module(lower_step(model, (batch, batch), training=True, chip=TracedChip("gpu")).module))
    barriers = [line for line in program.splitlines() if "stablehlo.optimization_barrier" in line]
    assert sum("i1>" in line for line in barriers) == 2


def test_scores_are_float32_where_sixteen_bits_would_show():
    # Scores of 2000 and 2001, which bfloat16 cannot tell apart.
    query = np.array([[[[1.0] * 4]]], ml_dtypes.bfloat16)
    key = np.array([[[[500.0, 500.0, 500.0, 500.0]], [[500.0, 500.0, 500.0, 501.0]]]])
    key = np.where(key == 501.0, 502.0, key).astype(ml_dtypes.bfloat16)
    value = np.array([[[[0.0] * 4], [[1.0] * 4]]], ml_dtypes.bfloat16)
    output = attention(*map(ops.convert_to_tensor, (query, key, value)), scale=0.5)
    np.testing.assert_allclose(ops.convert_to_numpy(ops.cast(output, "float32")), 1 / (1 + np.exp(-1)), rtol=2**-8)


@pytest.mark.parametrize(
    "shapes, mask, arguments, message",
    [
        (((2, 4, 2), (2, 4, 2, 8), (2, 4, 2, 8)), None, {}, r"query must have the shape .*got \(2, 4, 2\)"),
        (((2, 4, 2, 8), (2, 4, 2, 6), (2, 4, 2, 6)), None, {}, "the features of query, got"),
        (((2, 4, 2, 8), (2, 4, 2, 8), (2, 3, 2, 8)), None, {}, "key and value must have one shape"),
        (((2, 4, 3, 8), (2, 4, 2, 8), (2, 4, 2, 8)), None, {}, "heads of key must divide those of query, got 2 and 3"),
        (((2, 4, 2, 8), (2, 5, 2, 8), (2, 5, 2, 8)), (2, 4), {}, r"mask must have the shape \(2, 5\).*got \(2, 4\)"),
        (((2, 4, 2, 8), (2, 5, 2, 8), (2, 5, 2, 8)), (2, 3, 5), {}, r"mask must have .*\(2, 4, 5\), got \(2, 3, 5\)"),
        (((2, 4, 2, 8),) * 3, None, {"block": 0}, "block=0 must be a whole number, 1 or more"),
    ],
)
def test_bad_shapes_are_named(shapes, mask, arguments, message):
    tensors = [ops.zeros(shape) for shape in shapes]
    with pytest.raises(ValueError, match=message):
        attention(*tensors, None if mask is None else ops.ones(mask, dtype="bool"), **arguments)
