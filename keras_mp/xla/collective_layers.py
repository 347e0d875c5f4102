"""Which layer's weights, gradients or activations a collective sends."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from keras_mp.backend.common.lowered import UNATTRIBUTED, Lowered
from keras_mp.xla.findings import layer_of, name_of
from keras_mp.xla.hlo import Instruction, Module
from keras_mp.xla.matmuls import Matmul

_INDEX = re.compile(r"\bindex=(\d+)")
# How many instructions back from a collective without a name the one that makes its array is looked for.
_DEPTH = 12


class CollectiveLayers:
    """Finds the layer of a collective.

    Its name tells it, as that of a product does. Where the compiler dropped the name, or made one collective of
    several, the layer is that of the instruction that makes the array; a product's is that of its row in `matmuls`.

    Args:
        module: the compiled module.
        lowered: the step that it was compiled from.
        described: what `keras_mp.xla.program.describe` found in that step, with the operations' names.
        matmuls: its dots and convolutions, from `keras_mp.xla.matmuls.join`.
    """

    def __init__(
        self, module: Module, lowered: Lowered, described: Mapping[str, Any], matmuls: Sequence[Matmul]
    ) -> None:
        self._module = module
        self._lowered = lowered
        self._described = described
        self._products = {
            entry["op"]: matmul.layer for entry, matmul in zip(described["contractions"], matmuls, strict=True)
        }

    def of(self, collective: Instruction, fusion: Instruction | None, place: int) -> str:
        """The path of the layer of one array of a collective, or "unattributed".

        Args:
            collective: the instruction.
            fusion: the fusion that it is in, if any.
            place: the array's, among those of the collective.
        """
        combined = len(collective.operands) > 1
        if not combined:
            for instruction in filter(None, (collective, fusion)):
                layer = self._named(instruction)
                if layer != UNATTRIBUTED:
                    return layer
        reader = fusion or collective
        operands = reader.operands[place : place + 1] if combined else reader.operands
        return self._behind(reader.computation, operands)

    def _named(self, instruction: Instruction) -> str:
        return layer_of(name_of(instruction, self._described), self._lowered)

    def _behind(self, computation: str, names: Sequence[str]) -> str:
        """The layer of the nearest of these instructions, and of those that they read, that tells one."""
        inside = self._module.computations[computation]
        seen = set(names)
        for _ in range(_DEPTH):
            behind: list[str] = []
            for instruction in (inside[name] for name in names if name in inside):
                if not any(shape.dimensions for shape in instruction.shapes):
                    continue  # a loss or a norm, which is no layer's
                maker = self._maker(instruction)
                product = self._product(maker)
                layer = self._named(maker) if product is None else product
                if layer != UNATTRIBUTED:
                    return layer
                if product is None:  # a product's operands are of other layers
                    behind += [name for name in instruction.operands if name not in seen]
                    seen.update(instruction.operands)
            names = behind
        return UNATTRIBUTED

    def _product(self, instruction: Instruction) -> str | None:
        """The layer of the product that an instruction is, or that is fused into it; None where there is none."""
        for inner in self._module.inside(instruction):
            if inner.opcode in ("dot", "convolution", "custom-call") and inner.operation in self._products:
                return self._products[inner.operation]
        return None

    def _maker(self, instruction: Instruction) -> Instruction:
        """The instruction in a fusion of several results that makes the one that is taken out of it."""
        index = _INDEX.search(instruction.attributes)
        if instruction.opcode != "get-tuple-element" or not index:
            return instruction
        fusion = self._module.computations[instruction.computation].get(instruction.operands[0])
        fused = self._module.computations.get(fusion.callees[0], {}) if fusion and fusion.opcode == "fusion" else {}
        for root in fused.values():
            if root.root and root.opcode == "tuple" and int(index[1]) < len(root.operands):
                return fused[root.operands[int(index[1])]]
        return instruction
