"""Which collectives products of the same device run beside, by the order of the kernels in a compiled module."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection

from keras_mp.xla.hlo import Instruction, Module

# A TPU's compiler runs some collectives in steps: a kernel that starts, kernels that also compute, and one that ends.
_CHAIN = re.compile(r'\bchain_id="([^"]*)"')
_PRODUCTS = ("dot", "convolution")


def beside_products(module: Module, products: Collection[str] = ()) -> set[str]:
    """Names of the kernels that start a collective, or a copy, beside which a product runs.

    Beside a collective whose start and end stand apart runs what is between; beside one that a TPU runs in steps, what
    is in the same kernels as these.

    Args:
        module: the compiled module; its text has the order in which kernels are started.
        products: names of kernels that are products, besides those that contain a dot or a convolution.
    """
    covered: set[str] = set()
    for name in {kernel.computation for kernel, _ in module.kernels()}:
        covered |= _in_computation(module, list(module.computations[name].values()), products)
    return covered


def _in_computation(module: Module, order: list[Instruction], products: Collection[str]) -> set[str]:
    place = {instruction.name: index for index, instruction in enumerate(order)}
    multiplies = [_multiplies(module, instruction, products) for instruction in order]
    steps_of: dict[str, list[int]] = defaultdict(list)
    covered = set()
    for index, instruction in enumerate(order):
        if instruction.opcode.endswith("-done"):
            for operand in instruction.operands:
                start = place.get(operand, index)
                if order[start].opcode.endswith("-start") and any(multiplies[start + 1 : index]):
                    covered.add(operand)
        for chain in chains(module, instruction):
            steps_of[chain].append(index)
    return covered | {order[steps[0]].name for steps in steps_of.values() if any(multiplies[step] for step in steps)}


def _multiplies(module: Module, instruction: Instruction, products: Collection[str]) -> bool:
    if instruction.name in products:
        return True
    if instruction.opcode in ("while", "conditional", "call"):
        kernels = [kernel for callee in instruction.callees for kernel in module.computations.get(callee, {}).values()]
        return any(_multiplies(module, kernel, products) for kernel in kernels)
    return any(inner.opcode in _PRODUCTS for inner in module.inside(instruction))


def chains(module: Module, instruction: Instruction) -> set[str]:
    """The collectives of which an instruction runs a step, by the numbers that a TPU's compiler gives them."""
    if instruction.opcode != "fusion":
        return set()
    matches = (_CHAIN.search(inner.attributes) for inner in module.inside(instruction))
    return {chain[1] for chain in matches if chain}
