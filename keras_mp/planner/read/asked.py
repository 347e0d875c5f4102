"""The result of reading a lowered program, as JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple


class Asking(NamedTuple):
    """The place of an operation, and its runs a step.

    Args:
        op: the number of the operation, after the numbers of the calls that lead to it: "12" or "7/31". Compiled
            instructions have it too.
        repeats: the number of times it runs; in a loop of unknown length, once.
        counted: False in a loop of unknown length.
    """

    op: str
    repeats: int
    counted: bool


class Array(NamedTuple):
    """An operand: XLA's name of its type, and dimensions."""

    dtype: str
    dimensions: tuple[int, ...]


@dataclass(frozen=True)
class Contraction:
    """A dot, a convolution, or a kernel for several.

    Args:
        at: the place where it stands.
        kind: "dot", "convolution" or "kernel".
        operands: the operands that it multiplies.
        asked: dtypes of the operands, FP8 too where they were cast from FP8.
        sizes: rows, summed dimension and columns, as of `keras_mp.planner.read.matmuls.Matmul`.
        flops: floating-point operations each time that it runs.
        weights: the step's argument that each operand is a copy of; None where it is no copy of one.
        followers: numbers of operations that only move or cast the result.
        sources: a number of the value that each operand is a copy of, equal for equal values.
        name: the name of a kernel; "" of others.
        traffic: the bytes that a kernel moves each time; 0 where each of its arrays crosses once.
        groups: the number of matrices of a `ragged_dot`, whose rows are each multiplied by one of them; 1 of others.
    """

    at: Asking
    kind: str
    operands: tuple[Array, ...]
    asked: tuple[str, ...]
    sizes: tuple[int, int, int]
    flops: int
    weights: tuple[int | None, ...]
    followers: tuple[str, ...]
    sources: tuple[int, ...]
    name: str = ""
    traffic: int = 0
    groups: int = 1

    @property
    def op(self) -> str:
        """The number of the operation."""
        return self.at.op


@dataclass(frozen=True)
class LowOperation:
    """An exponential or sum in 16 bits, and its size."""

    at: Asking
    kind: str
    dtype: str
    elements: int


@dataclass(frozen=True)
class Cast:
    """A cast from one element type to another."""

    at: Asking
    source: str
    target: str
    elements: int


@dataclass(frozen=True)
class Asked:
    """A lowered step, read.

    Args:
        contractions: the dots, convolutions and kernels, in the order in which they run.
        low: the exponentials and sums in 16 bits.
        casts: the casts of the step.
        names: the names that operations had before they were numbered.
    """

    contractions: tuple[Contraction, ...] = ()
    low: tuple[LowOperation, ...] = ()
    casts: tuple[Cast, ...] = ()
    names: tuple[str, ...] = ()

    @property
    def flops(self) -> int:
        """Floating-point operations of all dots, convolutions and kernels of a step."""
        return sum(contraction.flops * contraction.at.repeats for contraction in self.contractions)

    def full_name(self, operation: str) -> str:
        """The names that an operation, and the calls that lead to it, had before they were numbered."""
        return "/".join(self.names[int(number)] for number in operation.split("/") if number)

    def text(self) -> str:
        """All of it as text."""
        return json.dumps(dataclasses.asdict(self))


def asked_in(text: str) -> Asked:
    """Reads what `Asked.text` wrote."""
    values = json.loads(text)
    return Asked(
        tuple(_contraction(**entry) for entry in values["contractions"]),
        tuple(LowOperation(**entry | _at(entry)) for entry in values["low"]),
        tuple(Cast(**entry | _at(entry)) for entry in values["casts"]),
        tuple(values["names"]),
    )


def _at(entry: Mapping[str, Any]) -> dict[str, Asking]:
    return {"at": Asking(*entry["at"])}


def _contraction(at: Any, operands: Any, **others: Any) -> Contraction:
    arrays = tuple(Array(dtype, tuple(dimensions)) for dtype, dimensions in operands)
    rows: dict[str, Any] = {key: tuple(x) if isinstance(x, list) else x for key, x in others.items()}
    return Contraction(Asking(*at), operands=arrays, **rows)
