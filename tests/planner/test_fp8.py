"""FP8 that the compilers keep: every product of every converted layer, forward and backward."""

from collections import Counter

import keras
import pytest
from steps import tensor
from twins import twin

import keras_mp
from models.gpt import gpt
from models.transformer import Size


def mlp():
    keras.config.set_dtype_policy("mixed_bfloat16")
    dense = [keras.layers.Dense(256, activation="relu", name=f"dense{index}") for index in range(1, 4)]
    model = keras.Sequential([keras.Input((256,)), *dense], name="mlp")
    return model, (tensor((128, 256)), tensor((128, 256)))


def transformer():
    keras.config.set_dtype_policy("mixed_bfloat16")
    tokens = tensor((4, 64), "int32")
    return gpt(Size(1, 128, 2), 256, 64), (tokens, tokens)


@pytest.mark.parametrize(
    "build, chip", [(mlp, "h100"), pytest.param(transformer, "v7x", marks=[pytest.mark.slow, pytest.mark.jax])]
)
def test_every_product_of_a_converted_layer_runs_in_fp8(build, chip):
    keras.utils.clear_session()
    model, batch = build()
    model = keras_mp.convert(keras_mp.stabilize(model), select=lambda path, layer: True)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True) if build is transformer else "mse"
    model.compile("adam", loss)
    report = keras_mp.inspect(model, batch, chip)
    report.check(fp8_kept=True)
    asked = [matmul for matmul in report.matmuls if all(dtype.startswith("float8") for dtype in matmul.asked)]
    roles = Counter(matmul.role for matmul in asked)
    converted = 3 if build is mlp else 4
    first = 1 if build is mlp else 0  # the gradient of the batch itself is nobody's
    assert roles == {
        "forward": converted,
        "kernel gradient": converted,
        "input gradient": converted - first,
    }
    assert all(matmul.layer != "unattributed" for matmul in asked)


@pytest.mark.slow
def test_what_is_kept_for_the_backward_pass_is_fp8():
    keras.utils.clear_session()
    keras.config.set_dtype_policy("mixed_bfloat16")
    dense = [keras.layers.Dense(512, name=f"dense{index}") for index in range(1, 4)]
    plain = keras.Sequential([keras.Input((512,)), *dense], name="linear")
    model = keras_mp.convert(twin(plain), select=lambda path, layer: True)
    reports = []
    for network in (plain, model):
        network.compile("sgd", "mse")
        reports.append(keras_mp.inspect(network, (tensor((2048, 512)), tensor((2048, 512))), "h100"))
    kept = [
        {(b.dtype, b.shape) for b in report.memory.largest if b.what == "activation" and 2048 in b.shape}
        for report in reports
    ]
    assert any(dtype == "bfloat16" for dtype, _ in kept[0])
    assert {dtype for dtype, _ in kept[1]} == {"float8_e4m3fn"}
