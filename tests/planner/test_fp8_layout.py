"""What compilers make of an FP8 layer: how often its tensors are read, and what a TPU's compiler estimates."""

import sys
from pathlib import Path

import keras
import pytest
from steps import tensor

from keras_mp.backend.common.device import TracedChip
from keras_mp.layers import Float8Dense
from keras_mp.lowering import lower_step
from keras_mp.planner.chips.targets import find_target
from keras_mp.planner.compile.compiler import compile_step
from keras_mp.system.packages import installed

ROWS, INPUTS, OUTPUTS = 1024, 512, 2048


on_jax = pytest.mark.skipif(keras.backend.backend() != "jax", reason="the benchmark traces its products with JAX")


def layout():
    """The benchmark, whose counts these tests check."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
    import fp8_layout

    return fp8_layout


@pytest.mark.slow
def test_delayed_scaling_takes_amax_and_fp8_values_in_one_pass_over_the_input_on_an_h100():
    keras.utils.clear_session()
    keras.config.set_dtype_policy("mixed_bfloat16")
    inputs = keras.Input((INPUTS,), dtype="bfloat16")
    model = keras.Model(inputs, Float8Dense(OUTPUTS, use_bias=False, scaling="delayed")(inputs))
    model.compile("sgd", "mse")
    batch = (tensor((ROWS, INPUTS), "bfloat16"), tensor((ROWS, OUTPUTS)))
    lowered = lower_step(model, batch, training=True, chip=TracedChip("gpu"))
    module = compile_step(lowered, find_target("h100")).module
    entry = module.computations[module.entry].values()
    x = next(
        parameter.name
        for parameter in entry
        if parameter.opcode == "parameter" and parameter.shapes[0][:2] == ("bf16", (ROWS, INPUTS))
    )
    kernels = [kernel for kernel in entry if kernel.opcode == "fusion" and x in kernel.operands]
    assert len(kernels) == 1
    made = [shape.dtype for kernel in kernels for shape in kernel.shapes]
    assert made.count("f8e4m3fn") == 1 and "pred" not in made


@pytest.mark.jax
@on_jax
def test_passes_of_all_three_operands_on_an_h100():
    script = layout()
    shape = (ROWS, INPUTS, OUTPUTS)
    counts = {recipe: script.passes(script.compiled(recipe, shape, "h100"), shape) for recipe in ("delayed", "current")}
    # A kernel is transposed while it is quantized, and its amax is a pass of its own. The compiler of jax 0.7 also
    # makes two passes of an upstream gradient.
    gradient = 2 if installed(["jax"])["jax"].startswith("0.7.") else 1
    assert counts == {"delayed": [1, 2, gradient], "current": [2, 2, 2]}


@pytest.mark.slow
@pytest.mark.jax
@on_jax
def test_delayed_scaling_is_below_bfloat16_by_the_estimate_of_a_v7x():
    script = layout()
    shape, flags = script.SHAPES[1], script.FLAG
    bfloat16, fp8 = (script.cycles(script.compiled(recipe, shape, "v7x", flags)) for recipe in ("bfloat16", "delayed"))
    assert 0 < fp8 < bfloat16
