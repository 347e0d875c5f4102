"""A hash of what a lowered step computes, in which neither names nor the order of independent operations count.

TensorFlow names functions and operations with counters, and writes operations in an order that depends on the names.
Runs where JAX's MLIR is.
"""

from __future__ import annotations

import hashlib
import re
from typing import Any

from jax._src.lib.mlir import ir

from keras_mp.lowering import Lowered
from keras_mp.planner.read.program import read_module

_SYMBOL = re.compile(r'@("(?:[^"\\]|\\.)*"|[\w$.-]+)')
_NAME = "sym_name"


def step_hash(lowered: Lowered) -> str:
    """Hashes what a step computes, alike for a rebuilt model."""
    arguments = [repr((one.kind, one.shape, one.dtype, one.parts, one.holds)) for one in lowered.arguments]
    calls = [f"{call.kind} {call.number}" for call in lowered.calls]
    return _digest(lowered.backend, *arguments, *calls, program_hash(lowered.module))


def program_hash(module: bytes) -> str:
    """Hashes a module's operations, each with those of its operands."""
    parsed = read_module(module)
    with parsed.context:
        hashing = _Hashing({ir.StringAttr(one.attributes[_NAME]).value: one for one in parsed.body.operations})
        return _digest("module", *hashing.attributes(parsed.operation), hashing.symbol("main"))


class _Hashing:
    """The hashes of the functions of a module, by their names, each made when it is first asked for."""

    def __init__(self, symbols: dict[str, Any]) -> None:
        self._symbols = symbols
        self._known: dict[str, str] = {}

    def symbol(self, name: str) -> str:
        if name not in self._known:
            self._known[name] = self.operation(self._symbols[name], {}, 0)
        return self._known[name]

    def operation(self, operation: Any, values: dict[Any, str], depth: int) -> str:
        """The hash of an operation and all that is in its regions.

        Args:
            values: the hashes of the values that it may use.
            depth: the number of regions that it is in.
        """
        operation = operation.operation
        parts = [operation.name, *self.attributes(operation), *(str(result.type) for result in operation.results)]
        parts += ["operands", *(values[operand] for operand in operation.operands)]
        for region in operation.regions:
            for block in region:
                parts.append(self._block(block, dict(values), depth))
        return _digest(*parts)

    def _block(self, block: Any, values: dict[Any, str], depth: int) -> str:
        for number, argument in enumerate(block.arguments):
            values[argument] = _digest("argument", str(depth), str(number), str(argument.type))
        hashes = []
        for operation in block.operations:
            hashes.append(self.operation(operation, values, depth + 1))
            for number, result in enumerate(operation.operation.results):
                values[result] = _digest(hashes[-1], str(number))
        return _digest(*(str(argument.type) for argument in block.arguments), *sorted(hashes))

    def attributes(self, operation: Any) -> list[str]:
        """The attributes of an operation but its name, as text with the hashes of functions in place of their names."""
        texts = []
        for item in operation.attributes:
            name = getattr(item, "name", item)  # jax 0.7 lists pairs, jax 0.10 names
            text = str(operation.attributes[name])
            if "@" in text and not isinstance(operation.attributes[name], ir.StringAttr):
                text = _SYMBOL.sub(self._named, text)
            texts += [f"{name}={text}"] if name != _NAME else []
        return sorted(texts)

    def _named(self, match: re.Match[str]) -> str:
        name = match[1].strip('"')
        return self.symbol(name) if name in self._symbols else match[0]


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()
