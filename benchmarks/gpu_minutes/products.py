"""FP8 products, forward and backward with quantization, by scaling, beside bfloat16, Keras and PyTorch.

Single steps are interleaved, and medians are compared. To beat, at (8192, 4096, 16384) on an H200, Transformer
Engine's 1.69 with delayed and 1.58 with current scaling (its documentation).
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
from fp8_step import step as product_step

from benchmarks.gpu_minutes.process import emit
from keras_mp.fp8 import Scalings
from keras_mp.fp8.convert import convert
from keras_mp.planner.read.hlo import parse
from keras_mp.planner.read.matmuls import products

SHAPES = ((8192, 4096, 16384), (16384, 8192, 7168), (16384, 1024, 8192))
RECIPES = ("current", "delayed", "rowwise")
Step = Callable[[], Any]


def main(tiny: bool) -> None:
    """Times all products of a shape, and goes to the next."""
    for shape in ((64, 32, 48),) if tiny else SHAPES:
        _shape(shape, repeats=3 if tiny else 30)


def _shape(shape: tuple[int, int, int], repeats: int) -> None:
    tensors = arrays(shape)
    rows: dict[str, dict[str, Any]] = {}
    steps: dict[str, Step] = {}
    for name in ("bfloat16", *RECIPES):
        steps[name], kernels = kit_step(name, *tensors)
        rows[name] = {"products compiled": kernels}
    for name, step in (layer_steps(tensors) | pytorch_steps(tensors)).items():
        steps[name], rows[name] = step, {}
    for name, seconds in median_seconds(steps, repeats).items():
        rows[name]["ms"] = 1e3 * seconds
    for name, row in rows.items():
        alike = next((kind for kind in ("PyTorch ", "layer, ") if name.startswith(kind)), "")
        base = rows[f"{alike}bfloat16"]["ms"]
        emit({"shape": str(shape), "step": name, "times as fast as bfloat16": base / row["ms"], **row})


def arrays(shape: tuple[int, int, int]) -> tuple[jax.Array, ...]:
    """Inputs and upstream gradient in bfloat16, the kernel in float32."""
    rows, inputs, outputs = shape
    rng = np.random.default_rng(0)
    sizes = [((rows, inputs), "bfloat16"), ((inputs, outputs), "float32"), ((rows, outputs), "bfloat16")]
    return tuple(jnp.asarray(rng.standard_normal(size, "float32"), dtype) for size, dtype in sizes)


def kit_step(recipe: str, x: jax.Array, w: jax.Array, g: jax.Array) -> tuple[Step, dict[str, int]]:
    """A step of the kit's product or of a bfloat16 one, and the products of its compiled module.

    The history of amaxes goes from step to step.
    """
    length = 0 if recipe == "bfloat16" else Scalings.named(recipe).kept
    state = [jnp.zeros((3, max(1, length)), "float32")]
    run = jax.jit(product_step(recipe)).lower(x, w, g, state[0]).compile()
    platform = "cuda" if jax.devices()[0].platform in ("gpu", "cuda") else "cpu"

    def step() -> None:
        _, gradients = jax.block_until_ready(run(x, w, g, state[0]))
        if length:
            state[0] = gradients[2]

    return step, counted(run.as_text() or "", platform)


def counted(text: str, platform: str) -> dict[str, int]:
    """How many products of each kernel a compiled module has, with the dtypes of their operands."""
    return dict(Counter(f"{made.kernel}: {' x '.join(made.operands)}" for made in products(parse(text), platform)))


def layer_steps(tensors: tuple[jax.Array, ...]) -> dict[str, Step]:
    """Steps of Keras's float8 layer, and of whole layers with bias and GELU: Keras's in bfloat16, and the kit's."""
    outputs = tensors[1].shape[1]
    whole: dict[str, Any] = {"units": outputs, "activation": "gelu", "dtype": "mixed_bfloat16"}
    layers = {
        "Keras float8": keras.layers.Dense(outputs, use_bias=False, dtype="float8_from_mixed_bfloat16"),
        "layer, bfloat16": keras.layers.Dense(**whole),
        **{f"layer, {recipe}": keras.layers.Dense(**whole) for recipe in RECIPES},
    }
    scalings = {f"layer, {recipe}": recipe for recipe in RECIPES}
    return {name: _layer_step(layer, scalings.get(name), *tensors) for name, layer in layers.items()}


def _layer_step(layer: keras.layers.Layer, scaling: str | None, x: jax.Array, w: jax.Array, g: jax.Array) -> Step:
    # A model, whose call brings the weights to 16 bits; a layer's own `stateless_call` does not.
    model = keras.Sequential([keras.Input(x.shape[1:], x.shape[0], dtype="bfloat16"), layer])
    if scaling is not None:
        convert(model, scaling, select=lambda path, layer: True)
    values = [w if variable.name == "kernel" else variable.value for variable in model.trainable_variables]
    fixed = [variable.value for variable in model.non_trainable_variables]

    @jax.jit
    def run(values, x, g):
        y, backward = jax.vjp(lambda values, x: model.stateless_call(values, fixed, x, training=True)[0], values, x)
        return y, backward(g)

    return lambda: jax.block_until_ready(run(values, x, g))


def pytorch_steps(tensors: tuple[jax.Array, ...]) -> dict[str, Step]:
    """A bfloat16 step of PyTorch, and one of scaled products with current scaling; none without PyTorch and CUDA."""
    try:
        import torch
    except ImportError:
        return {}
    if not torch.cuda.is_available():
        return {}
    x, w, g = (torch.from_numpy(np.array(array, "float32")).cuda() for array in tensors)
    x, g = x.bfloat16(), g.bfloat16()

    def quantize(x, dtype):
        top = torch.finfo(dtype).max
        scale = top / x.abs().max().float()
        return (x.float() * scale).clamp(-top, top).to(dtype), 1 / scale

    def product(left, right, dtype):
        # The left operand in rows, the right one in columns.
        (a, scale_a), (b, scale_b) = left, right
        return torch._scaled_mm(a.contiguous(), b.t().contiguous().t(), scale_a, scale_b, out_dtype=dtype)

    @torch.compile
    def fp8():
        x8, w8 = quantize(x, torch.float8_e4m3fn), quantize(w, torch.float8_e4m3fn)
        g8 = quantize(g, torch.float8_e5m2)
        turned = [(values.t(), scale) for values, scale in (x8, w8)]
        return (
            product(x8, w8, torch.bfloat16),
            product(g8, turned[1], torch.bfloat16),
            product(turned[0], g8, torch.float32),
        )

    @torch.compile
    def bfloat16():
        low = w.bfloat16()
        return x @ low, g @ low.t(), (x.t() @ g).float()

    def timed(function) -> Step:
        def step() -> None:
            function()
            torch.cuda.synchronize()

        return step

    return {"PyTorch bfloat16": timed(bfloat16), "PyTorch scaled_mm, current": timed(fp8)}


def median_seconds(steps: dict[str, Step], repeats: int) -> dict[str, float]:
    """Times the steps, interleaved."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():
        for _ in range(3):
            step()
    for _ in range(repeats):
        for name, step in steps.items():
            started = time.perf_counter()
            step()
            seconds[name].append(time.perf_counter() - started)
    return {name: statistics.median(measured) for name, measured in seconds.items()}
