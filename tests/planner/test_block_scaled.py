"""MXFP8 and NVFP4 that XLA keeps: every product of every converted layer, n of n, and a finding where it widens."""

from collections import Counter

import keras
import pytest
from steps import tensor

import keras_mp
from keras_mp.planner.chips.targets import CUDNN
from models.gpt import gpt
from models.transformer import Size

pytestmark = [pytest.mark.slow, pytest.mark.jax]

E4M3, HALF = ("float8_e4m3fn", "float8_e4m3fn"), ("bfloat16", "bfloat16")
BLOCKS = 1
PRODUCTS = 3 * 4 * BLOCKS  # of four layers in each block
on_jax = pytest.mark.skipif(keras.backend.backend() != "jax", reason="TensorFlow has no block-scaled product")


def inspected(chip, recipe="mxfp8", **options):
    keras.utils.clear_session()
    keras.config.set_dtype_policy("mixed_bfloat16")
    model = keras_mp.convert(gpt(Size(BLOCKS, 128, 2), 256, 64), recipe, select=lambda path, layer: True)
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    tokens = tensor((8, 64), "int32")
    report = keras_mp.inspect(model, (tokens, tokens), chip, **options)
    asked = [
        matmul for matmul in report.matmuls if all(dtype.startswith(("float8", "float4")) for dtype in matmul.asked)
    ]
    assert Counter(matmul.role for matmul in asked) == dict.fromkeys(
        ("forward", "input gradient", "kernel gradient"), 4 * BLOCKS
    )
    assert all(matmul.layer != "unattributed" for matmul in asked)
    return report, asked


@on_jax
def test_every_product_of_a_converted_layer_is_block_scaled():
    report, asked = inspected("rtx5090", keras_mp.fp8.Scalings.named("mxfp8", format={"gradient": "E5M2"}))
    report.check(fp8_kept=True)
    assert len(asked) == PRODUCTS
    assert {(matmul.kernel, matmul.accumulation) for matmul in asked} == {("cuDNN block-scaled", "float32")}
    gradients = ("float8_e5m2", "float8_e4m3fn")
    expected = {"forward": {E4M3}, "input gradient": {gradients}, "kernel gradient": {gradients[::-1]}}
    assert {role: {m.compiled for m in asked if m.role == role} for role in expected} == expected
    assert report.flags["cuDNN"] == ".".join(map(str, CUDNN))


@on_jax
def test_every_product_in_four_bits_is_block_scaled():
    _, asked = inspected("b200", "nvfp4")
    assert len(asked) == PRODUCTS and {matmul.compiled for matmul in asked} == {("float4_e2m1fn",) * 2}
    assert {(matmul.kernel, matmul.accumulation) for matmul in asked} == {("cuDNN block-scaled", "float32")}


@on_jax
def test_on_several_gpus_each_multiplies_its_part():
    report, asked = inspected("b200x2", strategy="fully_sharded")
    assert len(asked) == PRODUCTS and {matmul.compiled for matmul in asked} == {E4M3}


@on_jax
def test_on_a_gpu_without_such_units_the_report_says_what_became_of_them():
    report, asked = inspected("h100")
    assert Counter(matmul.compiled for matmul in asked) == {
        HALF: PRODUCTS * 2 // 3,
        ("float32", "float32"): PRODUCTS // 3,
    }
    assert {matmul.kernel for matmul in asked} == {"loop, no tensor cores"}
    assert f"{PRODUCTS} products asked for in FP8 run in bfloat16" in str(report)
    with pytest.raises(keras_mp.errors.CheckError, match=f"{PRODUCTS} products asked for in FP8 do not run in FP8"):
        report.check(fp8_kept=True)


def test_elsewhere_the_matrix_units_multiply_the_same_numbers_in_bfloat16():
    _, asked = inspected("v7x" if keras.backend.backend() == "jax" else "b200")
    assert len(asked) == PRODUCTS and {matmul.compiled for matmul in asked} == {HALF}
