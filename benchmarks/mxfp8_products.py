"""What compilers make of an MXFP8 product, forward and backward: the products by chip, and the bytes around them.

    KERAS_BACKEND=jax python benchmarks/mxfp8_products.py

Hardware: any; nothing is executed. Needs the compilers: pip install -e ".[inspect]". Time: 2 minutes on 2 cores.
Expect: three block-scaled products on Blackwell GPUs and none elsewhere; on a B200 each tensor read three times.

Bytes are those that kernels read and write, if each array crosses the memory once. The branch of delayed scaling that
runs in the first step only is left out.
"""

import os

os.environ["KERAS_BACKEND"] = "jax"
os.environ.setdefault("JAX_PLATFORMS", "cpu")

from collections import Counter

from fp8_layout import SHAPES, always, compiled, passes

from keras_mp.xla.hlo import FREE, long_name
from keras_mp.xla.matmuls import products

CHIPS = ["b200", "rtx5090", "h100", "l4", "v7x"]
RECIPES = ["bfloat16", "current", "delayed", "rowwise", "mxfp8"]


def steady(module):
    """The kernels that run in every step, those of calls as well."""
    yield from always(module)
    for call in module.computations[module.entry].values():
        for callee in call.callees if call.opcode == "call" else []:
            yield from (each for each in module.computations[callee].values() if each.opcode not in FREE)


def moved(module) -> tuple[float, float]:
    """Megabytes that products read and write, and those of other kernels."""
    sums = [0, 0]
    for kernel in steady(module):
        multiplies = any(each.opcode == "dot" or "dot" in each.target.lower() for each in module.inside(kernel))
        sums[not multiplies] += module.traffic(kernel)
    return sums[0] / 1e6, sums[1] / 1e6


def main() -> None:
    """Prints the tables."""
    print(f"| chip | products of an MXFP8 layer of {SHAPES[0]}, as compiled |\n| --- | --- |")
    for chip in CHIPS:
        platform = "tpu" if chip.startswith("v") else "cuda"
        made = products(compiled("mxfp8", SHAPES[0], chip), platform)
        counts = Counter((" x ".join(sorted(set(map(long_name, each.operands)))), each.kernel) for each in made)
        print(f"| {chip} | {', '.join(f'{count} {dtype}, {kernel}' for (dtype, kernel), count in counts.items())} |")
    for shape in SHAPES:
        print(f"\n| B200, {shape} | products, MB | other kernels, MB | sum | kernels that read x | w | g |")
        print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
        for recipe in RECIPES:
            module = compiled(recipe, shape, "b200")
            own, others = moved(module)
            counts = " | ".join(map(str, passes(module, shape)))
            print(f"| {recipe} | {own:.0f} | {others:.0f} | {own + others:.0f} | {counts} |", flush=True)


if __name__ == "__main__":
    main()
