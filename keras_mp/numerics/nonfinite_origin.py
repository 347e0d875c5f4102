"""The operation that a nonfinite tensor comes from."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NamedTuple

from keras import ops

# tap(tensor, watch): the tensor to go on with, or None where it cannot be seen.
Tap = Callable[[Any, bool], Any]

# The file of a line of Python, and its number.
Frame = tuple[str, int]


class Values(NamedTuple):
    """Where a float tensor is not finite, as booleans."""

    nan: Any
    above: Any
    below: Any

    @property
    def bad(self) -> Any:
        return self.nan | self.above | self.below

    @property
    def shape(self) -> tuple[int | None, ...] | None:
        """Known sizes; None where their number is unknown."""
        return None if getattr(self.nan.shape, "rank", 0) is None else tuple(self.nan.shape)


class Edge(NamedTuple):
    """Keys of the tensors that an operation reads and makes."""

    inputs: Sequence[Hashable]
    outputs: Sequence[Hashable]


def makes_nonfinite(inputs: Sequence[Values], output: Values, moves: bool) -> Any:
    """Whether an operation itself makes a nonfinite value.

    It does where it makes a NaN of none, as inf - inf does. Besides, an elementwise operation does where the output is
    not finite and the inputs are; of others it is known only if the output has infinities of another sign.

    Args:
        inputs: the inputs of the operation that are floats.
        output: one of its outputs.
        moves: whether it only moves values.
    """
    nan = ops.any(output.nan) & _none(given.nan for given in inputs)
    if moves:
        return nan
    if all(_broadcasts(given.shape, output.shape) for given in inputs):
        made = output.bad
        for given in inputs:
            made &= ~given.bad
        return nan | ops.any(made)
    above = ops.any(output.above) & _none(given.above for given in inputs)
    below = ops.any(output.below) & _none(given.below for given in inputs)
    return nan | above | below


def origin(
    edges: Sequence[Edge], given: Iterable[Hashable], bad: set[Hashable], made: set[Hashable], last: Hashable
) -> int | None:
    """Finds the first operation from which a nonfinite tensor comes.

    A constant infinity, such as an attention mask, is followed only where nothing else is to blame: a tensor that
    depends on no input or weight, and one that only hands such an infinity on.

    Args:
        edges: the operations, in the order of the program.
        given: keys of the inputs and weights.
        bad: keys of the tensors that an operation puts out and that are not finite.
        made: the keys of those tensors whose operation itself makes a value that is not finite.
        last: key of the tensor.

    Returns:
        Place of the operation in `edges`; None where no operation puts out the tensor, or it is finite.
    """
    depending, faulty = set(given), set[Hashable]()
    place_of: dict[Hashable, int] = {}
    for place, edge in enumerate(edges):
        place_of.update(dict.fromkeys(edge.outputs, place))
        if depending.isdisjoint(edge.inputs):
            continue
        depending |= set(edge.outputs)
        fault = not faulty.isdisjoint(edge.inputs)
        faulty |= {output for output in edge.outputs if output in bad and (fault or output in made)}
    followed = next((tensors for tensors in (faulty, bad & depending, bad) if last in tensors), None)
    if followed is None:
        return None
    reached, origins = {last}, []
    waiting = [last]
    while waiting:
        place = place_of[waiting.pop()]
        before = followed.intersection(edges[place].inputs)
        if not before:
            origins.append(place)
        waiting += before - reached
        reached |= before
    return min(origins)


def _none(tensors: Iterable[Any]) -> Any:
    result = ops.convert_to_tensor(True)
    for tensor in tensors:
        result &= ~ops.any(tensor)
    return result


def _broadcasts(shape: tuple[int | None, ...] | None, to: tuple[int | None, ...] | None) -> bool:
    """Whether one shape is broadcast to another, where known."""
    if shape is None or to is None or len(shape) > len(to):
        return False
    pairs = zip(reversed(shape), reversed(to), strict=False)
    return all(size == 1 or (size == target and size is not None) for size, target in pairs)
