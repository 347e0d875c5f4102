"""What compilers make of an FP8 product, forward and backward: estimates for a TPU v7x, passes over memory on an H100.

    KERAS_BACKEND=jax python benchmarks/fp8_layout.py
    KERAS_BACKEND=jax python benchmarks/fp8_layout.py mxfp8      # the products by chip, and the bytes around them

Hardware: any; nothing is executed. Needs the compilers: pip install -e ".[inspect]". Time: 8 and 2 minutes on 2 cores.
Expect: delayed scaling below bfloat16 at (2048, 2048, 8192), and at (8192, 4096, 16384) with the flag; of MXFP8 three
block-scaled products on Blackwell GPUs and none elsewhere, and on a B200 each tensor read three times.

Cycles are libtpu's own estimates, of all that runs in every step; the branch that scales just in time runs in the first
step only, and is left out. Passes are the kernels that read a whole input, kernel or gradient of 16 or 32 bits.
Bytes are those that kernels read and write, if each array crosses the memory once.
"""

import os
import sys

os.environ["KERAS_BACKEND"] = "jax"
os.environ.setdefault("JAX_PLATFORMS", "cpu")

from collections import Counter

from fp8_step import lowered

from keras_mp.planner.chips.targets import find_target
from keras_mp.planner.compile.compiler import compile_step
from keras_mp.planner.read.hlo import FREE, long_name
from keras_mp.planner.read.matmuls import products

SHAPES = [(2048, 2048, 8192), (8192, 4096, 16384)]
RECIPES = ["bfloat16", "current", "delayed", "static", "rowwise"]
MXFP8_CHIPS = ["b200", "rtx5090", "h100", "l4", "v7x"]
BESIDE_MXFP8 = ["bfloat16", "current", "delayed", "rowwise", "mxfp8", "nvfp4"]
# The default leaves 32 of 64 MiB of a core's vector memory for operands that are fetched ahead.
FLAG = {"xla_tpu_scoped_vmem_limit_kib": "49152"}


def compiled(recipe: str, shape: tuple[int, int, int], target: str, flags: dict | None = None):
    """What the target's compiler makes of it."""
    target = find_target(target)
    return compile_step(lowered(recipe, shape, target.platform), target, flags).module


def always(module):
    """The kernels that run in every step."""
    skipped = {*FREE, "conditional", "call", "while"}
    return [
        instruction for instruction in module.computations[module.entry].values() if instruction.opcode not in skipped
    ]


def cycles(module) -> float:
    """The compiler's estimates, added up, in millions."""
    return sum(kernel.cycles for kernel in always(module)) / 1e6


def passes(module, shape: tuple[int, int, int]) -> list[int]:
    """How many kernels, products aside, read the whole input, kernel and gradient."""
    rows, inputs, outputs = shape
    tensors = [("bf16", (rows, inputs)), ("f32", (inputs, outputs)), ("bf16", (rows, outputs))]
    entry = module.computations[module.entry].values()
    names = {parameter.shapes[0][:2]: parameter.name for parameter in entry if parameter.opcode == "parameter"}
    kernels = [kernel for kernel in always(module) if "gemm" not in kernel.name and kernel.opcode != "custom-call"]
    return [sum(names[tensor] in kernel.operands for kernel in kernels) for tensor in tensors]


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


def mxfp8() -> None:
    """Prints the tables of MXFP8."""
    print(f"| chip | products of an MXFP8 layer of {SHAPES[0]}, as compiled |\n| --- | --- |")
    for chip in MXFP8_CHIPS:
        platform = "tpu" if chip.startswith("v") else "cuda"
        made = products(compiled("mxfp8", SHAPES[0], chip), platform)
        counts = Counter((" x ".join(sorted(set(map(long_name, each.operands)))), each.kernel) for each in made)
        print(f"| {chip} | {', '.join(f'{count} {dtype}, {kernel}' for (dtype, kernel), count in counts.items())} |")
    for shape in SHAPES:
        print(f"\n| B200, {shape} | products, MB | other kernels, MB | sum | kernels that read x | w | g |")
        print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
        for recipe in BESIDE_MXFP8:
            module = compiled(recipe, shape, "b200")
            own, others = moved(module)
            counts = " | ".join(map(str, passes(module, shape)))
            print(f"| {recipe} | {own:.0f} | {others:.0f} | {own + others:.0f} | {counts} |", flush=True)


def main() -> None:
    """Prints the tables."""
    if sys.argv[1:] == ["mxfp8"]:
        mxfp8()
        return
    print("| (M, K, N) | scaling | v7x, million cycles | of bfloat16's | with the flag | of bfloat16's |")
    print("| --- | --- | ---: | ---: | ---: | ---: |")
    for shape in SHAPES:
        plain = flagged = 0.0
        for recipe in RECIPES:
            estimates = [cycles(compiled(recipe, shape, "v7x", flags)) for flags in (None, FLAG)]
            plain, flagged = plain or estimates[0], flagged or estimates[1]
            cells = (
                f"{estimates[0]:.2f} | {estimates[0] / plain:.2f} | {estimates[1]:.2f} | {estimates[1] / flagged:.2f}"
            )
            print(f"| {shape} | {recipe} | {cells} |", flush=True)
    print("\n| (M, K, N) | scaling | H100: kernels that read x | w | g |")
    print("| --- | --- | ---: | ---: | ---: |")
    for recipe in RECIPES:
        counts = passes(compiled(recipe, SHAPES[1], "h100"), SHAPES[1])
        print(f"| {SHAPES[1]} | {recipe} | {' | '.join(map(str, counts))} |", flush=True)


if __name__ == "__main__":
    main()
