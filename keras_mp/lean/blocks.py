"""Blocks of a model: its parts that repeat."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import numpy as np

from keras_mp.rebuild.walk import (
    calls_of,
    children_of,
    graph_of,
    layers_below,
    original_class,
    own_variables,
    package_of,
)

Structure = tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Block:
    """One block of a model."""

    path: str  # names that lead to it from the model, joined by "/"; the last one is its own
    kind: str  # "layer" where it is a layer; "segment" where it is a stretch of a functional graph
    # the layer; or the layers and operations of the stretch, in the order of their calls
    layers: tuple[keras.Operation, ...]
    bytes: int  # the bytes of its weights
    # a value that is equal for two blocks that compute the same from weights of the same shapes
    structure: Structure = dataclasses.field(repr=False)
    # the model whose graph holds a segment; None for a layer
    graph: keras.Model | None = dataclasses.field(default=None, repr=False)
    # the calls of a segment in that graph; empty for a layer
    nodes: tuple[Any, ...] = dataclasses.field(default=(), repr=False)

    @property
    def name(self) -> str:
        """Last part of the path, such as "dense" or "first..last"."""
        return self.path.rpartition("/")[2]


def find_blocks(model: keras.Layer) -> list[tuple[Block, ...]]:
    """Finds the blocks of a model, such as transformer layers.

    The rule, for the model and for each layer that holds others:

    1. Layers of one class, side by side, are blocks, and one that a graph calls several times. Each of them holds at
       least two layers. Keras's own layers and the kit's, such as an attention or an LSTM, are parts of blocks;
       Sequential and functional models are blocks where their structures are equal: the same classes inside, with
       weights of the same shapes. Blocks of one structure are a group.
    2. In the graph of a functional or sequential model, consecutive calls that repeat at once with the same classes,
       shapes of weights and shapes of outputs are blocks, called segments. They begin where the fewest values go from
       one to the next. A stretch between two groups of segments that has weights of all the classes that the next
       block has, as the first block of a ResNet's stage has, is a group of its own; so is one before the first group,
       if it has the same classes.
    3. Where blocks hold blocks, the outer are taken, unless they are fewer than those inside one of them: of two towers
       of twelve layers, the layers are the blocks.

    Args:
        model: a built Keras model or layer: functional, sequential, subclassed, nested.

    Returns:
        Groups of blocks of equal structure, each in the order of the model; empty where nothing repeats.

    Raises:
        ValueError: the model has no weights yet.
    """
    if not model.built and not model.weights:
        raise ValueError(
            f"find_blocks needs the shapes of weights, and {model.name!r} has none yet: call it once on a batch, or "
            "model.build(input_shape)"
        )
    return _blocks_in(model, "", set())


def _blocks_in(container: keras.Layer, path: str, seen: set[int]) -> list[tuple[Block, ...]]:
    children = [child for child in children_of(container) if id(child) not in seen]
    seen.update(map(id, children))
    outer = _layer_groups(container, children, path)
    repeating = {id(block.layers[0]) for group in outer for block in group}
    segments = _segment_groups(container, path, repeating)
    covered = {id(operation) for group in segments for block in group for operation in block.layers}
    # In the order of the model: what is found in a child stands at the child's place.
    place = {id(child): index for index, child in enumerate(children)}
    placed: list[tuple[int, tuple[Block, ...]]] = []
    for groups in (*_families(outer), segments):
        members = [block for group in groups for block in group]
        composites: dict[int, Any] = {id(layer): layer for block in members for layer in block.layers}
        inner = [
            (layer, _blocks_in(layer, _path_of(layer, path), set(seen)))
            for layer in composites.values()
            if children_of(layer)
        ]
        most = max((len(group) for _, groups_inside in inner for group in groups_inside), default=0)
        if len(members) < most:
            placed += [(place.get(id(layer), 0), group) for layer, inside in inner for group in inside]
        else:
            for group in groups:
                first = min((place[id(layer)] for layer in group[0].layers if id(layer) in place), default=0)
                placed.append((first, group))
    for child in children:
        if id(child) not in repeating | covered:
            placed += [(place[id(child)], group) for group in _blocks_in(child, _path_of(child, path), seen)]
    return [group for _, group in sorted(placed, key=lambda item: item[0])]


def _path_of(layer: keras.Operation, path: str) -> str:
    return f"{path}/{layer.name}" if path else layer.name


def _layer_groups(container: keras.Layer, children: Sequence[keras.Layer], path: str) -> list[tuple[Block, ...]]:
    graph = graph_of(container)
    calls = Counter(id(node.operation) for node in calls_of(graph)) if graph is not None else Counter()
    by_structure: dict[Structure, list[keras.Layer]] = defaultdict(list)
    for child in filter(_can_be_block, children):
        by_structure[structure_of(child)].append(child)
    of_class = Counter(original_class(layer) for layers in by_structure.values() for layer in layers)

    def repeats(layers: list[keras.Layer]) -> bool:
        siblings = 0 if _is_plain_model(layers[0]) else of_class[original_class(layers[0])]
        return max(len(layers), siblings, calls[id(layers[0])]) > 1

    return [
        tuple(layer_block(layer, _path_of(layer, path)) for layer in layers)
        for layers in by_structure.values()
        if repeats(layers)
    ]


def _families(groups: Sequence[tuple[Block, ...]]) -> list[list[tuple[Block, ...]]]:
    """Puts groups of one class together, of any width."""
    families: dict[Any, list[tuple[Block, ...]]] = defaultdict(list)
    for group in groups:
        layer = group[0].layers[0]
        families[group[0].structure if _is_plain_model(layer) else original_class(layer)].append(group)
    return list(families.values())


def _can_be_block(layer: keras.Layer) -> bool:
    ready_made = any(
        cls.__module__.startswith(("keras.src.layers", "keras_mp.")) and cls is not keras.layers.Layer
        for cls in original_class(layer).__mro__
    )
    return not ready_made and bool(layer.weights) and len(list(layers_below(layer))) > 1


def _is_plain_model(layer: keras.Operation) -> bool:
    return package_of(original_class(layer)) == "keras"


def structure_of(operation: keras.Operation) -> Structure:
    """Key of an operation's class, shapes of weights and sublayers."""
    name = original_class(operation).__qualname__
    if not isinstance(operation, keras.layers.Layer):
        return (name, (), ())
    shapes = tuple(tuple(variable.shape) for variable in own_variables(operation))
    return (name, shapes, tuple(structure_of(child) for child in children_of(operation)))


def _bytes_of(operations: Sequence[keras.Operation]) -> int:
    weights = {id(w): w for op in operations if isinstance(op, keras.layers.Layer) for w in op.weights}
    return sum(math.prod(w.shape) * np.dtype(w.dtype).itemsize for w in weights.values())


def _segment_groups(container: keras.Layer, path: str, blocks: set[int]) -> list[tuple[Block, ...]]:
    graph = graph_of(container)
    if graph is None:
        return []
    nodes = calls_of(graph)
    symbols = [None if id(node.operation) in blocks else _symbol(node) for node in nodes]
    crossing = _crossing(graph, nodes)

    def allowed(period: Sequence[Structure]) -> bool:
        return len(period) > 1 and any(_has_weights(structure) for structure, _ in period)

    bounds = [_bounds(run, crossing) for run in longest_runs(symbols, allowed)]
    groups = [tuple(zip(edges, edges[1:], strict=False)) for edges in bounds]
    groups = sorted(groups + [((start, stop),) for start, stop in _transitions(groups, symbols)])
    return [tuple(segment_block(container, path, nodes[slice(*edge)]) for edge in group) for group in groups]


def _symbol(node: Any) -> Structure:
    return (structure_of(node.operation), tuple(tuple(output.shape) for output in node.outputs))


def _has_weights(structure: Structure) -> bool:
    _, shapes, children = structure
    return bool(shapes) or any(map(_has_weights, children))


def _crossing(graph: Any, nodes: Sequence[Any]) -> np.ndarray:
    """Counts values a sample that pass each place between calls."""
    made = {id(tensor): 0 for tensor in graph.inputs}
    sizes = {id(tensor): math.prod(d or 1 for d in tensor.shape) for tensor in graph.inputs}
    last = dict.fromkeys(made, 0)
    for index, node in enumerate(nodes):
        last |= {id(tensor): index for tensor in node.input_tensors}
        made |= {id(tensor): index + 1 for tensor in node.outputs}
        sizes |= {id(tensor): math.prod(d or 1 for d in tensor.shape) for tensor in node.outputs}
    last |= {id(tensor): len(nodes) for tensor in graph.outputs}
    crossing = np.zeros(len(nodes) + 1, "int64")
    for key, start in made.items():
        crossing[start : last.get(key, 0) + 1] += sizes[key]
    return crossing


def _bounds(run: Run, crossing: np.ndarray) -> list[int]:
    """Where the segments of a run begin, and it ends."""
    offsets = range(run.slack + 1 if run.stop - run.start < 3 * run.period else run.period)
    cuts = [list(range(run.start + offset, run.stop + 1, run.period)) for offset in offsets]
    # With equal cost, as many as possible, and the later: an activation belongs to what is before it.
    return min(reversed(cuts), key=lambda cut: (crossing[cut].mean(), -len(cut)))


def _transitions(groups: Sequence[tuple[tuple[int, int], ...]], symbols: Sequence[Any]) -> list[tuple[int, int]]:
    """First blocks of stages: between groups, and before the first."""
    classes = [None if symbol is None else symbol[0][0] for symbol in symbols]
    weighted = [symbol[0][0] if symbol is not None and _has_weights(symbol[0]) else None for symbol in symbols]
    ordered = sorted(groups)
    stretches = []
    for left, right in zip(ordered, ordered[1:], strict=False):
        start, stop = left[-1][1], right[0][0]
        needed = set(weighted[slice(*right[0])]) - {None}
        if None not in classes[start:stop] and needed <= set(weighted[start:stop]):
            stretches.append((start, stop))
    if stretches:
        stop = ordered[0][0][0]
        lengths = {end - start for start, end in stretches if stop >= end - start}
        alike = [n for n in lengths if any(classes[stop - n : stop] == classes[a:b] for a, b in stretches)]
        stretches += [(stop - n, stop) for n in alike[:1]]
    return stretches


def layer_block(layer: keras.Layer, path: str) -> Block:
    """A layer as a block."""
    return Block(path, "layer", (layer,), _bytes_of([layer]), structure_of(layer))


def segment_block(container: keras.Layer, path: str, nodes: Sequence[Any]) -> Block:
    """Consecutive calls of a model's graph as a block."""
    operations = tuple(dict.fromkeys(node.operation for node in nodes))
    first, last = operations[0].name, operations[-1].name
    return Block(
        path=f"{path}/{first}..{last}" if path else f"{first}..{last}",
        kind="segment",
        layers=operations,
        bytes=_bytes_of(operations),
        structure=tuple(map(_symbol, nodes)),
        graph=container,
        nodes=tuple(nodes),
    )


# Stretches of a sequence that repeat at once.


class Run(NamedTuple):
    """Items up to `stop` (excluded) that repeat after a period."""

    start: int
    stop: int
    period: int

    @property
    def slack(self) -> int:
        """Items left over when the run is divided into periods."""
        return (self.stop - self.start) % self.period


def longest_runs(items: Sequence[Any], allowed: Any) -> list[Run]:
    """Finds runs that cover most of a sequence, in order.

    They have at least two periods, which are allowed, and do not overlap; of several periods of one run the shortest
    counts. None repeats nothing.
    """
    candidates = [run for period in range(1, len(items) // 2 + 1) for run in _runs_of(items, period)]
    candidates.sort(key=lambda run: (run.slack - (run.stop - run.start), run.period, run.start))
    taken: list[Run] = []
    for run in candidates:
        apart = all(run.stop <= other.start or run.start >= other.stop for other in taken)
        if apart and allowed(items[run.start : run.start + run.period]):
            taken.append(run)
    return sorted(taken)


def _runs_of(items: Sequence[Any], period: int) -> list[Run]:
    runs, start = [], 0
    repeats = [item is not None and item == next_one for item, next_one in zip(items, items[period:], strict=False)]
    for repeated, group in itertools.groupby(repeats):
        stop = start + len(list(group))
        once = list(items[start : start + period])
        shorter = (part for part in range(1, period // 2 + 1) if period % part == 0)
        if repeated and stop - start >= period and not any(once == once[:part] * (period // part) for part in shorter):
            runs.append(Run(start, stop + period, period))
        start = stop
    return runs
