"""How fast an FP8 layer is on this GPU, forward and backward with quantization, as ratios to bfloat16 in the same run.

    KERAS_BACKEND=jax python benchmarks/fp8_gpu.py
    KERAS_BACKEND=jax python benchmarks/fp8_gpu.py --shapes 64,32,48 --repeats 3     # tries it out on a CPU

Hardware: a GPU or TPU with FP8 units. Time: some minutes. Beside it run Keras's float8 layer and, where PyTorch with
CUDA is installed, its scaled matrix product with a scale a tensor. To beat, at (8192, 4096, 16384) on an H200,
Transformer Engine's 1.69 with delayed and 1.58 with current scaling (its documentation).

Single steps are interleaved, and medians are compared: other load on the machine meets all of them. A step is a
jitted call; the gradients it returns keep the compiler from leaving anything out.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable

os.environ["KERAS_BACKEND"] = "jax"

import jax
import jax.numpy as jnp
import keras
import numpy as np
from fp8_step import step as product_step

from keras_mp.fp8 import get_recipe, is_available

SHAPES = "16384,8192,1280 16384,1024,8192 16384,8192,7168 8192,4096,16384"
RECIPES = ("current", "delayed", "rowwise")
Step = Callable[[], None]


def arrays(shape: tuple[int, int, int]) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Inputs and upstream gradient in bfloat16, the kernel in float32."""
    rows, inputs, outputs = shape
    rng = np.random.default_rng(0)
    sizes = [((rows, inputs), "bfloat16"), ((inputs, outputs), "float32"), ((rows, outputs), "bfloat16")]
    return tuple(jnp.asarray(rng.normal(size=size).astype("float32"), dtype) for size, dtype in sizes)


def ours(recipe: str, x: jax.Array, w: jax.Array, g: jax.Array) -> Step:
    """A step of this kit's product, or of a bfloat16 one; the history goes from step to step."""
    length = 0 if recipe == "bfloat16" else get_recipe(recipe).history_length
    state = [jnp.zeros((3, max(1, length)), "float32")]

    run = jax.jit(product_step(recipe))

    def step() -> None:
        y, gradients = jax.block_until_ready(run(x, w, g, state[0]))
        if length:
            state[0] = gradients[2]

    return step


def keras_float8(x: jax.Array, w: jax.Array, g: jax.Array) -> Step:
    """A step of Keras's own float8 Dense layer."""
    layer = keras.layers.Dense(w.shape[1], use_bias=False, dtype="float8_from_mixed_bfloat16")
    layer.build(x.shape)
    values = [w if variable.name == "kernel" else variable.value for variable in layer.trainable_variables]
    fixed = [variable.value for variable in layer.non_trainable_variables]

    @jax.jit
    def run(values, x, g):
        y, backward = jax.vjp(lambda values, x: layer.stateless_call(values, fixed, x, training=True)[0], values, x)
        return y, backward(g)

    return lambda: jax.block_until_ready(run(values, x, g)) and None


def pytorch(shape: tuple[int, int, int]) -> dict[str, Step]:
    """A bfloat16 step of PyTorch, and one of scaled products with current scaling; none without PyTorch and CUDA."""
    try:
        import torch
    except ImportError:
        return {}
    if not torch.cuda.is_available():
        return {}
    x, w, g = (torch.from_numpy(np.asarray(array, "float32")).cuda() for array in arrays(shape))
    x, g = x.bfloat16(), g.bfloat16()

    def quantize(x, dtype):
        scale = torch.finfo(dtype).max / x.abs().max().float()
        top = torch.finfo(dtype).max
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


def compared_steps(shape: tuple[int, int, int]) -> dict[str, Step]:
    """All that is compared, bfloat16 first."""
    tensors = arrays(shape)
    steps = {"bfloat16": ours("bfloat16", *tensors)} | {f"fp8, {recipe}": ours(recipe, *tensors) for recipe in RECIPES}
    return steps | {"Keras float8": keras_float8(*tensors)} | pytorch(shape)


def main(arguments: list[str]) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--shapes", default=SHAPES, help="M,K,N with blanks between (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=50, help="steps of each (default: %(default)s)")
    known = parser.parse_args(arguments)
    device = jax.devices()[0]
    print(f"{device.device_kind}, jax {jax.__version__}, keras {keras.__version__}. {is_available().reason}\n")
    print("| (M, K, N) | step | ms | times as fast as bfloat16 |\n| --- | --- | ---: | ---: |")
    for text in known.shapes.split():
        shape = tuple(map(int, text.split(",")))
        seconds = median_seconds(compared_steps(shape), known.repeats)
        for name, median in seconds.items():
            base = seconds["PyTorch bfloat16" if name.startswith("PyTorch") else "bfloat16"]
            print(f"| {shape} | {name} | {1e3 * median:.3f} | {base / median:.2f} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
