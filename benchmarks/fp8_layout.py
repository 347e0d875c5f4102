"""What compilers make of an FP8 product, forward and backward: estimates for a TPU v7x, passes over memory on an H100.

    KERAS_BACKEND=jax python benchmarks/fp8_layout.py

Hardware: any; nothing is executed. Needs the compilers: pip install -e ".[inspect]". Time: 8 minutes on 2 cores.
Expect: delayed scaling below bfloat16 at (2048, 2048, 8192), and at (8192, 4096, 16384) with the flag.

Cycles are libtpu's own estimates, of all that runs in every step; the branch that scales just in time runs in the first
step only, and is left out. Passes are the kernels that read a whole input, kernel or gradient of 16 or 32 bits.
"""

import os

os.environ["KERAS_BACKEND"] = "jax"
os.environ.setdefault("JAX_PLATFORMS", "cpu")

from fp8_step import lowered

from keras_mp.xla.compile import compile_step
from keras_mp.xla.hlo import FREE, parse
from keras_mp.xla.targets import find_target

SHAPES = [(2048, 2048, 8192), (8192, 4096, 16384)]
RECIPES = ["bfloat16", "current", "delayed", "static", "rowwise"]
# The default leaves 32 of 64 MiB of a core's vector memory for operands that are fetched ahead.
FLAG = {"xla_tpu_scoped_vmem_limit_kib": "49152"}


def compiled(recipe: str, shape: tuple[int, int, int], target: str, flags: dict | None = None):
    """What the target's compiler makes of it."""
    target = find_target(target)
    return parse(compile_step(lowered(recipe, shape, target.platform), target, flags).hlo)


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


def main() -> None:
    """Prints the tables."""
    print("| (M, K, N) | scaling recipe | v7x, million cycles | of bfloat16's | with the flag | of bfloat16's |")
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
    print("\n| (M, K, N) | scaling recipe | H100: kernels that read x | w | g |")
    print("| --- | --- | ---: | ---: | ---: |")
    for recipe in RECIPES:
        counts = passes(compiled(recipe, SHAPES[1], "h100"), SHAPES[1])
        print(f"| {SHAPES[1]} | {recipe} | {' | '.join(map(str, counts))} |", flush=True)


if __name__ == "__main__":
    main()
