"""On JAX a prepared model's steps have oneDNN's products on a CPU, which lose no NaN, and no softmax of oneDNN's."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import keras_mp
from keras_mp import backend
from keras_mp.lean.training_step import compiler_options

pytestmark = [
    pytest.mark.jax,
    pytest.mark.skipif(keras.backend.backend() != "jax", reason="the options are those of XLA's compiler on JAX"),
]
fast = pytest.mark.skipif(
    keras.backend.backend() == "jax" and not keras_mp.precision.policy.pays("mixed_bfloat16").ok,
    reason="needs jax 0.12, so Python 3.12 or newer, and a CPU with bfloat16 instructions",
)

FIT = """
import keras, keras_mp, numpy as np
with keras_mp.set_global_policy("mixed_bfloat16"):
    dense = [keras.layers.Dense(512, activation="relu"), keras.layers.LayerNormalization(), keras.layers.Dense(8)]
    model = keras.Sequential([keras.Input((128, 256)), *dense, keras.layers.Softmax()])
keras_mp.prepare(model, "adam", "mse")
x = np.zeros((64, 128, 256), "float32")
model.fit(x, x[..., :1], batch_size=32, verbose=0)
"""


def compiled(function, *arrays):
    return jax.jit(function).lower(*arrays).compile(compiler_options=dict(backend.bfloat16_options()))


def kernel_gradient(x, kernel, cotangent):
    return jax.vjp(jnp.matmul, x, kernel)[1](cotangent)[1]


def convolution(images, kernel):
    return jax.lax.conv_general_dilated(images, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def drawn(*shape, dtype="bfloat16"):
    return jnp.asarray(np.random.default_rng().normal(size=shape), dtype)


@fast
def test_fit_runs_products_of_onednn(tmp_path):
    dump = f"--xla_dump_to={tmp_path} --xla_dump_hlo_module_re=.*train_step.*"
    subprocess.run([sys.executable, "-c", FIT], env=os.environ | {"XLA_FLAGS": dump}, check=True, timeout=150)
    (module,) = tmp_path.glob("*after_optimizations.txt")
    text = module.read_text()
    assert "__onednn$matmul" in text
    assert "__onednn$softmax" not in text


@fast
def test_inspect_compiles_with_the_options():
    with keras_mp.set_global_policy("mixed_bfloat16"):
        dense = [keras.layers.Dense(512, activation="relu"), keras.layers.LayerNormalization(), keras.layers.Dense(8)]
        model = keras.Sequential([keras.Input((128, 256)), *dense])
    model.compile("adam", "mse")
    batch = (np.zeros((32, 128, 256), "float32"), np.zeros((32, 128, 8), "float32"))
    assert not keras_mp.inspect(model, batch).flags
    keras_mp.prepare(model, "adam", "mse")
    report = keras_mp.inspect(model, batch)
    assert report.flags == backend.bfloat16_options()
    assert "oneDNN" in str(report.details("products"))


def test_only_prepared_models_in_bfloat16():
    assert not compiler_options(model := keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)]))
    assert not compiler_options(keras_mp.prepare(model, "adam", "mse"))  # float32


@fast
@pytest.mark.parametrize("spoiled", [None, np.nan, np.inf, -np.inf, 1e-40])
@pytest.mark.parametrize("rows, inputs, outputs", [(2048, 384, 512), (1, 96, 128), (64, 1, 1)])
def test_gradient_of_a_kernel(rows, inputs, outputs, spoiled):
    x, kernel, cotangent = drawn(2, rows, inputs), drawn(inputs, outputs), drawn(2, rows, outputs)
    if spoiled is not None:
        x = x.at[1, rows // 2, inputs // 2].set(spoiled)
    run = compiled(kernel_gradient, x, kernel, cotangent)
    if rows > 1000:
        assert "__onednn$matmul" in run.as_text()
    got = np.asarray(run(x, kernel, cotangent), "float64")
    a, b = (np.asarray(array, "float64").reshape(-1, array.shape[-1]) for array in (x, cotangent))
    wanted = a.T @ b
    finite = np.isfinite(wanted)
    assert (np.isfinite(got) == finite).all() and (np.isnan(got) == np.isnan(wanted)).all()
    # One rounding to bfloat16, 2^-9, and sums in float32.
    bound = np.abs(wanted) * 2.0**-8 + np.abs(a.T) @ np.abs(b) * 2.0**-20
    assert (np.abs(got[finite] - wanted[finite]) <= bound[finite]).all()


@fast
@pytest.mark.parametrize("spoiled", [np.nan, np.inf])
def test_a_row_of_softmax_stays_nan(spoiled):
    for dtype in ("float32", "bfloat16", "float16"):
        scores = drawn(4, 64, 64, dtype=dtype).at[0, 3, 5].set(spoiled)
        got = np.asarray(compiled(jax.nn.softmax, scores)(scores), "float32")
        assert np.isnan(got[0, 3]).all() and np.isfinite(got).sum() == got.size - 64, dtype


@fast
@pytest.mark.parametrize("activation", ["relu", "gelu", "silu", "sigmoid", "tanh", "elu", "relu6"])
def test_activations_keep_nan(activation):
    """An activation that oneDNN's product applies."""
    function = getattr(jnp if activation == "tanh" else jax.nn, activation)
    images, kernel, bias = drawn(2, 8, 8, 16).at[1, 3, 3, 2].set(np.nan), drawn(3, 3, 16, 32), drawn(32)
    run = compiled(lambda i, k, b: function(convolution(i, k) + b), images, kernel, bias)
    assert "__onednn$convolution" in run.as_text()
    got = np.isnan(np.asarray(run(images, kernel, bias), "float32"))
    assert got[1, 2:5, 2:5].all() and got.sum() == 9 * 32
