"""Blocks that are recomputed in the backward pass."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any

import keras

from keras_mp.lean.blocks import Block, find_blocks, layer_block, segment_block
from keras_mp.lean.chunked_head import calls_behind
from keras_mp.lean.recompute import BLOCK, add_losses, recomputed_call
from keras_mp.lean.training_step import may_be_differentiated
from keras_mp.rebuild.walk import calls_of, graph_of, layers_below, layers_by_path, treatments_of
from keras_mp.treatment.change import Planned
from keras_mp.treatment.treated import Treatment, register_treatments

# Which parts of a model are to be recomputed, and the treatments that make them so.


def choose_blocks(model: keras.Model, remat: bool | Sequence[str]) -> list[Block]:
    """Chooses the blocks that are to be recomputed.

    Args:
        remat: True for all that `find_blocks` finds; or patterns such as "transformer_layer_*" for paths or names of
            blocks, and where no block has such a name, of layers.

    Raises:
        TypeError: `remat` is neither.
        ValueError: nothing matches a pattern; the message has the nearest names.
    """
    blocks = [block for group in find_blocks(model) for block in group] if remat else []
    if isinstance(remat, bool):
        if remat and not blocks and not recomputed_blocks(model):
            warnings.warn(
                f"make_lean({model.name!r}, remat=True): nothing is recomputed, because no part of the model repeats; "
                "name the layers that are to be recomputed, as in remat=('encoder_*',)",
                stacklevel=3,
            )
        return blocks
    patterns = isinstance(remat, Iterable) and not isinstance(remat, str)
    if not patterns or not all(isinstance(pattern, str) for pattern in remat):
        raise TypeError(f"remat takes True, False, or patterns such as ('transformer_layer_*',); got {remat!r}")
    chosen: dict[str, Block] = {}
    for pattern in remat:
        chosen |= {block.path: block for block in _matching(model, blocks, pattern)}
    inside = {
        id(inner)
        for block in chosen.values()
        for layer in block.layers
        if isinstance(layer, keras.layers.Layer)
        for inner in layers_below(layer)
    }
    return [block for block in chosen.values() if id(block.layers[0]) not in inside]  # the outermost


def _matching(model: keras.Model, blocks: list[Block], pattern: str) -> list[Block]:
    layers = [layer_block(layer, path) for path, layer in layers_by_path(model).items() if layer.weights]
    for known in (blocks, layers):
        matching = [block for block in known if fnmatchcase(block.path, pattern) or fnmatchcase(block.name, pattern)]
        if matching:
            return matching
    names = list(dict.fromkeys(name for block in [*blocks, *layers] for name in (block.name, block.path)))
    near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.3) or names[:3]
    raise ValueError(
        f"remat: no block or layer of {model.name!r} matches {pattern!r}; nearest: {', '.join(map(repr, near))}"
    )


def plan_blocks(blocks: Sequence[Block]) -> list[Planned]:
    """Plans that blocks are recomputed."""
    rows = [Planned(block.path, block.layers[0], {BLOCK: None}) for block in blocks if block.kind == "layer"]
    stretches: dict[int, tuple[Any, list[list[int]]]] = {}
    for block in blocks:
        if block.kind == "segment":
            order = [id(node) for node in calls_of(graph_of(block.graph))]  # type: ignore[arg-type]
            start = order.index(id(block.nodes[0]))
            _, places = stretches.setdefault(id(block.graph), (block.graph, []))
            places.append([start, start + len(block.nodes)])
    return rows + [Planned("", graph, {SEGMENTS: sorted(places)}) for graph, places in stretches.values()]


def recomputed_blocks(model: keras.Model) -> list[Block]:
    """Layers and segments that are recomputed, in order."""
    blocks = []
    for path, layer in {"": model, **layers_by_path(model)}.items():
        names = treatments_of(layer)
        if BLOCK in names:
            blocks.append(layer_block(layer, path))
        segments = names.get(SEGMENTS) or []
        nodes: list[Any] = calls_of(graph_of(layer)) if segments and graph_of(layer) is not None else []
        blocks += [segment_block(layer, path, nodes[start:stop]) for start, stop in segments if nodes]
    return blocks


# Stretches of graphs that recompute in the backward pass.

# With the options [[3, 9], [9, 15]]: of the graph of a functional or sequential model the calls 3 to 8, and 9 to 14.
SEGMENTS = "remat segments"


class RematGraph:
    """A functional model of which some stretches are recomputed."""

    def call(self, inputs: Any, training: bool | None = None, mask: Any = None, **others: Any) -> Any:
        # JAX's trainer calls this without `__call__`, which tells layers whether they train.
        before = self.__dict__.get("_trains", False)
        self.__dict__["_trains"] = may_be_differentiated(training)
        try:
            return super().call(inputs, training=training, mask=mask, **others)  # type: ignore[misc]
        finally:
            self.__dict__["_trains"] = before

    def _run_through_graph(self, inputs: Any, operation_fn: Callable[[Any], Any] = lambda op: op, **others: Any) -> Any:
        flat = keras.tree.flatten(inputs)
        computes = any(keras.ops.is_tensor(x) and not isinstance(x, keras.KerasTensor) for x in flat)
        if others or not computes or not self.__dict__.get("_trains"):
            return super()._run_through_graph(inputs, operation_fn, **others)  # type: ignore[misc]
        values = {id(x): value for x, value in zip(self.inputs, flat, strict=True)}  # type: ignore[attr-defined]
        nodes = calls_of(self)
        segments = dict(self.__dict__.get("_segments", ()))
        index = 0
        while index < len(nodes):
            if index in segments:
                values |= _recompute(self, index, segments[index], values, operation_fn)
                index = segments[index]
            else:
                _run([nodes[index]], values, operation_fn)
                index += 1
        outputs = [values[id(x)] for x in self.outputs]  # type: ignore[attr-defined]
        return keras.tree.pack_sequence_as(self._outputs_struct, outputs)  # type: ignore[attr-defined]


def _run(nodes: Sequence[Any], values: dict[int, Any], operation_fn: Callable[[Any], Any]) -> None:
    """Computes the outputs of nodes, as Keras's own loop does."""
    for node in nodes:
        if all(id(x) in values for x in node.input_tensors):
            args, kwargs = node.arguments.fill_in(values)
            results = keras.tree.flatten(operation_fn(node.operation)(*args, **kwargs))
            values.update((id(x), result) for x, result in zip(node.outputs, results, strict=False))


def _recompute(
    graph: Any, start: int, stop: int, values: dict[int, Any], operation_fn: Callable[[Any], Any]
) -> dict[int, Any]:
    """Computes what calls outside a stretch take, by id."""
    nodes = calls_of(graph)
    stretch, behind = nodes[start:stop], nodes[stop:]
    made = {id(x) for node in stretch for x in node.outputs}
    taken = dict.fromkeys(id(x) for node in stretch for x in node.input_tensors if id(x) not in made)
    later = {id(x) for node in behind for x in node.input_tensors} | {id(x) for x in graph.outputs}
    keys = [id(x) for node in stretch for x in node.outputs if id(x) in later]
    operations = {id(node.operation): node.operation for node in stretch}.values()
    layers = [operation for operation in operations if isinstance(operation, keras.layers.Layer)]

    def compute(inputs: dict[str, Any]) -> list[Any]:
        inner = {int(key): value for key, value in inputs.items()}
        _run(stretch, inner, operation_fn)
        return [inner[key] for key in keys]

    inputs = {str(key): values[key] for key in taken}
    variables = list({id(v): v for layer in layers for v in layer.variables}.values())
    results, losses = recomputed_call(compute, layers, variables, (inputs,), {})
    add_losses(layers[0], losses)
    return dict(zip(keys, results, strict=True))


def _give_segments(layer: Any) -> None:
    """Tells the graphs of a model which stretches are recomputed."""
    for graph in _graphs(layer):
        graph.__dict__["_segments"] = treatments_of(layer)[SEGMENTS]
        if not isinstance(graph, RematGraph):
            graph.__class__ = type(type(graph).__name__, (RematGraph, type(graph)), {})


def _take_segments(layer: Any) -> None:
    for graph in _graphs(layer):
        graph.__dict__.pop("_segments", None)
        if graph is not layer and type(graph).__bases__[0] is RematGraph:
            graph.__class__ = type(graph).__bases__[1]


def _graphs(layer: Any) -> list[Any]:
    # A model whose loss is computed in chunks runs through a graph that has the features as an output, too.
    calls = calls_behind(layer)
    return [graph for graph in (graph_of(layer), calls and calls.graph) if graph is not None]


register_treatments(
    {
        SEGMENTS: Treatment(
            lambda original, names: None if issubclass(original, keras.Sequential) else RematGraph,
            undo=_take_segments,
            before_call=_give_segments,
            order=-1,
        )
    }
)
