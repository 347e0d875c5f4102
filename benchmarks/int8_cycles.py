"""What libtpu estimates an INT8 layer to take, forward and backward, beside bfloat16.

    KERAS_BACKEND=jax python benchmarks/int8_cycles.py

Hardware: any; nothing is executed. Needs the compilers: pip install -e ".[inspect]". Time: 10 minutes on 2 cores.
Expect: the table of docs/int8.md. With --python it is that of `keras_mp/fp8/cost.py`, by which
`convert(model, Int8Scaling(), target="v5e")` decides.

Cycles are of all that runs in every step; the branch that scales just in time runs in the first step only, and is left
out. A step is one layer by itself: what a compiler fuses with the layers around it is not in it.
"""

import argparse
import os

os.environ["KERAS_BACKEND"] = "jax"
os.environ.setdefault("JAX_PLATFORMS", "cpu")

from fp8_layout import cycles
from fp8_step import lowered

from keras_mp.fp8 import Int8Scaling
from keras_mp.xla.compile import compile_step
from keras_mp.xla.hlo import parse
from keras_mp.xla.targets import find_target

CHIPS = ["v5e", "v6e", "v7x"]
SHAPES = [(2048, 2048, 8192), (8192, 4096, 16384)]
RECIPES = {
    "bfloat16": "bfloat16",
    "delayed": Int8Scaling(),
    "static": Int8Scaling("static"),
    "current": Int8Scaling("current"),
    "delayed, kernel gradient INT8": Int8Scaling(kernel_gradient="int8"),
    "static, kernel gradient INT8": Int8Scaling("static", kernel_gradient="int8"),
}


def estimate(recipe, shape: tuple[int, ...], chip: str) -> float:
    """Million cycles of a step of one layer."""
    return cycles(parse(compile_step(lowered(recipe, shape, "tpu"), find_target(chip)).hlo))


def table(cycles: dict, title: str, names: list[str]) -> list[str]:
    """Lines of Markdown, of cycles by chip, shape and scaling recipe."""
    lines = [f"| {title} | scaling recipe | " + " | ".join(f"{chip} | relative" for chip in cycles) + " |"]
    lines.append("| --- | --- |" + " ---: | ---: |" * len(cycles))
    for shape in next(iter(cycles.values())):
        for name in names:
            values = [by_shape[shape] for by_shape in cycles.values()]
            cells = [f"{value[name]:.2f} | {value[name] / value['bfloat16']:.2f}" for value in values]
            lines.append(f"| {shape} | {name} | {' | '.join(cells)} |")
    return lines


def python(cycles: dict) -> list[str]:
    """The lines of the table's module."""
    lines = []
    for chip, by_shape in cycles.items():
        lines.append(f'    "{chip}": {{')
        for shape, values in by_shape.items():
            lines.append(f"        {shape}: {{")
            lines += [f'            "{name}": {value:.2f},' for name, value in values.items()]
            lines.append("        },")
        lines.append("    },")
    return lines


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--chips", nargs="+", default=CHIPS)
    parser.add_argument("--python", action="store_true", help="print the module's lines, not Markdown")
    arguments = parser.parse_args()
    shapes, names, title = SHAPES, list(RECIPES), "(M, K, N)"
    cycles: dict = {}
    for chip in arguments.chips:
        for shape in shapes:
            values = {name: estimate(RECIPES[name], shape, chip) for name in names}
            cycles.setdefault(chip, {})[shape] = values
    print("\n".join(python(cycles) if arguments.python else table(cycles, title, names)))


if __name__ == "__main__":
    main()
