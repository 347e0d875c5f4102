"""INT8 that the compilers keep: the products of every converted layer that are asked for in INT8, n of n."""

from collections import Counter

import keras
import pytest
from steps import tensor

import keras_mp

pytestmark = pytest.mark.slow

LAYERS = 2


@pytest.mark.parametrize("chip, kernel_gradient", [("t4", "compute"), ("h100", "int8")])
def test_every_product_of_a_converted_layer_runs_in_int8(chip, kernel_gradient):
    keras.utils.clear_session()
    half = "float16" if chip == "t4" else "bfloat16"
    dense = [
        keras.layers.Dense(256, activation="relu", name=f"dense{index}", dtype=f"mixed_{half}")
        for index in range(LAYERS)
    ]
    model = keras.Sequential([keras.Input((256,)), *dense], name="mlp")
    recipe = keras_mp.fp8.Scalings.named("int8", kernel_gradient=kernel_gradient == "int8")
    model = keras_mp.convert(model, recipe, select=lambda path, layer: True)
    model.compile("adam", "mse")
    report = keras_mp.inspect(model, (tensor((128, 256)), tensor((128, 256))), chip)
    integer = [matmul for matmul in report.matmuls if matmul.compiled == ("int8", "int8")]
    assert all((matmul.result, matmul.accumulation) == ("int32", "int32") for matmul in integer)
    assert all(matmul.asked == ("int8", "int8") for matmul in integer)
    # The gradient of the batch itself is nobody's.
    expected = {"forward": LAYERS, "input gradient": LAYERS - 1}
    if kernel_gradient == "int8":
        assert Counter(matmul.role for matmul in integer) == expected | {"kernel gradient": LAYERS}
    else:
        assert Counter(matmul.role for matmul in integer) == expected
        rest = [matmul for matmul in report.matmuls if matmul.role == "kernel gradient"]
        assert len(rest) == LAYERS and {matmul.compiled for matmul in rest} == {(half, half)}
