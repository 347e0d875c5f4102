"""Weights in bfloat16: updated in float32, rounded once and stochastically, beside float32 weights."""

from functools import partial

import keras
import numpy as np
import pytest
from keras import ops
from test_optimizer import stepper
from test_small_states import OPTIMIZERS

from keras_mp import LossScale, LossScaleOptimizer

SHAPE = (64, 96)


def weight(values, dtype="bfloat16", **arguments):
    return keras.Variable(np.asarray(values, "float32"), dtype=dtype, name="kernel", **arguments)


def read(variable):
    return ops.convert_to_numpy(ops.cast(variable, "float32")).astype("float64")


def dtype_of(variable):
    return keras.backend.standardize_dtype(variable.dtype)


def eager_step(optimizer, variable):
    return lambda gradient: optimizer.apply([ops.convert_to_tensor(gradient, variable.dtype)], [variable])


def after(make_inner, start, gradients, dtype="bfloat16", constraint=None, step_of=eager_step, **settings):
    """The weight, and its optimizer, after some steps."""
    variable = weight(start, dtype)
    variable.constraint = constraint
    optimizer = LossScaleOptimizer(make_inner(), LossScale.none(), **settings)
    optimizer.build([variable])
    step = step_of(optimizer, variable)
    for gradient in gradients:
        step(gradient)
    return variable, optimizer


@pytest.mark.jax
def test_small_updates_arrive_in_the_mean():
    steps = 100
    gradients = [np.ones(SHAPE, "float32")] * steps
    step_of = partial(stepper, mode="jit") if keras.backend.backend() == "jax" else eager_step
    moved = read(after(lambda: keras.optimizers.SGD(1e-4), np.ones(SHAPE), gradients, step_of=step_of)[0])
    # Below 1 bfloat16's steps are 2**-8: a weight ends with a standard deviation of sqrt(100 p (1 - p)) of them,
    # p = 1e-4 * 2**8.
    odds = 1e-4 * 2**8
    deviation = np.sqrt(steps * odds * (1 - odds)) / 2**8
    assert abs(moved.mean() - (1 - steps * 1e-4)) < 5 * deviation / np.sqrt(moved.size)
    assert moved.std() == pytest.approx(deviation, rel=0.1)


QUICK = ("amsgrad", "Nadam")


@pytest.mark.parametrize(
    "name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in OPTIMIZERS if name not in QUICK)]
)
def test_a_step_is_that_of_float32_rounded_to_a_neighbour(name):
    rng = np.random.default_rng()
    start = read(weight(rng.normal(size=SHAPE)))  # what bfloat16 holds
    gradient = read(weight(rng.normal(size=SHAPE)))
    narrow, optimizer = after(OPTIMIZERS[name], start, [gradient])
    exact, plain = after(OPTIMIZERS[name], start, [gradient], "float32")
    assert dtype_of(narrow) == "bfloat16"
    kinds = [[(dtype_of(v), tuple(v.shape)) for v in kind.inner_optimizer.variables] for kind in (optimizer, plain)]
    assert kinds[0] == kinds[1]
    for ours, wide in zip(optimizer.inner_optimizer.variables, plain.inner_optimizer.variables, strict=True):
        np.testing.assert_allclose(read(ours), read(wide), rtol=1e-5, atol=1e-7)
    difference = np.abs(read(narrow) - read(exact))
    assert (difference <= np.abs(read(exact)) * 2**-7 + 1e-6).all()
    moved = (read(narrow) - read(exact)).mean() / (np.abs(read(exact)).mean() * 2**-8)
    assert abs(moved) < 5 / np.sqrt(start.size)


def test_decay_and_constraint_are_parts_of_the_one_rounding():
    limit = keras.constraints.MaxNorm(1.0, axis=0)
    rng = np.random.default_rng()
    start, gradient = read(weight(rng.normal(size=SHAPE))), read(weight(rng.normal(size=SHAPE)))
    make = partial(keras.optimizers.AdamW, 1e-2, weight_decay=0.1)
    narrow, exact = (read(after(make, start, [gradient], dtype, limit)[0]) for dtype in ("bfloat16", "float32"))
    np.testing.assert_allclose(np.linalg.norm(exact, axis=0), 1.0, rtol=1e-4)
    assert (np.abs(narrow - exact) <= np.abs(exact) * 2**-7 + 1e-7).all()
    # A constraint in bfloat16, rounded to nearest after the fact, would be off by its own rounding in the mean.
    norms = np.linalg.norm(narrow, axis=0)
    assert abs(norms.mean() - 1) < 1e-3


def test_wrong_use():
    half = weight(np.ones(SHAPE), "float16")
    with pytest.raises(ValueError, match="'.*kernel' is stored in float16.*'mixed_float16'"):
        LossScaleOptimizer(keras.optimizers.SGD()).build([half])
    built = keras.optimizers.Adam()
    variable = weight(np.ones(SHAPE))
    built.build([variable])
    with pytest.raises(ValueError, match="is built already, and its .* is in bfloat16, as Keras makes it"):
        LossScaleOptimizer(built, LossScale.none()).build([variable])
