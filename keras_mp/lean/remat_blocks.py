"""Blocks of a model that are recomputed in the backward pass: which, and the treatments that make them so."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Callable, Collection, Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import keras

from keras_mp.lean.blocks import Block, find_blocks, layer_block, segment_block
from keras_mp.lean.chunked_head import calls_behind
from keras_mp.lean.recompute import Remat, recomputed_call
from keras_mp.lean.training_step import may_be_differentiated
from keras_mp.rebuild.notes import treatments_of
from keras_mp.rebuild.walk import calls_of, graph_of, layers_below, layers_by_path
from keras_mp.treatment.treated import Treatment, register_treatments

# Which parts of a model are to be recomputed, and the treatments that make them so.

Remats = bool | Sequence[str]


def choose_blocks(model: keras.Model, remat: Remats) -> list[Block]:
    """The blocks of a model that are to be recomputed.

    Args:
        remat: True for all that `find_blocks` finds; or patterns such as "transformer_layer_*" for paths or names of
            blocks, and where no block has such a name, of layers.

    Raises:
        TypeError: `remat` is neither.
        ValueError: nothing matches a pattern; the message has the nearest names.

    Warns:
        UserWarning: the model has no blocks.
    """
    if isinstance(remat, bool):
        blocks = [block for group in find_blocks(model) for block in group] if remat else []
        if remat and not blocks and not any(isinstance(layer, Remat) for layer in layers_below(model)):
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
        chosen |= {block.path: block for block in _matching(model, pattern)}
    return _outermost(list(chosen.values()))


def _matching(model: keras.Model, pattern: str) -> list[Block]:
    blocks = [block for group in find_blocks(model) for block in group]
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


def _outermost(blocks: list[Block]) -> list[Block]:
    inside = {id(inner) for block in blocks for layer in block.layers for inner in _below(layer)}
    return [block for block in blocks if id(block.layers[0]) not in inside]


def _below(layer: keras.Operation) -> Sequence[keras.Layer]:
    return list(layers_below(layer)) if isinstance(layer, keras.layers.Layer) else []


def treatments_for(blocks: Sequence[Block]) -> list[tuple[Any, str, Any]]:
    """The layers and models to treat so that blocks recompute, each with the treatment and its options."""
    wanted: list[tuple[Any, str, Any]] = [(block.layers[0], BLOCK, None) for block in blocks if block.kind == "layer"]
    stretches: dict[int, tuple[Any, list[list[int]]]] = {}
    for block in blocks:
        if block.kind == "segment":
            order = [id(node) for node in calls_of(graph_of(block.graph))]  # type: ignore[arg-type]
            start = order.index(id(block.nodes[0]))
            _, places = stretches.setdefault(id(block.graph), (block.graph, []))
            places.append([start, start + len(block.nodes)])
    return wanted + [(graph, SEGMENTS, sorted(places)) for graph, places in stretches.values()]


def recomputed_blocks(model: keras.Model) -> list[Block]:
    """The layers and segments of a model that are recomputed, in the model's order."""
    blocks = []
    for path, layer in {"": model, **layers_by_path(model)}.items():
        names = treatments_of(layer)
        if BLOCK in names:
            blocks.append(layer_block(layer, path))
        segments = names.get(SEGMENTS) or []
        nodes: list[Any] = calls_of(graph_of(layer)) if segments and graph_of(layer) is not None else []
        blocks += [segment_block(layer, path, nodes[start:stop]) for start, stop in segments if nodes]
    return blocks


# Layers and stretches of graphs that recompute in the backward pass, under the names and with the weights they have.
#
# Treatments:
#     "remat": the layer.
#     "remat segments", with [[3, 9], [9, 15]]: of the graph of a functional or sequential model the calls 3 to 8, and 9
#         to 14.

BLOCK, SEGMENTS = "remat", "remat segments"


class RematBlock:
    """A layer that in training keeps only its arguments, and recomputes the rest in the backward pass."""

    def call(self, *args: Any, **kwargs: Any) -> Any:
        call = super().call  # type: ignore[misc]
        if not may_be_differentiated(kwargs.get("training")) or _unbuilt(self):
            results = call(*args, **kwargs)
            # What a call has left unbuilt is never used.
            self.__dict__.setdefault("_unused_layers", set()).update(_unbuilt(self))
            return results
        results, losses = recomputed_call(call, [self], self.variables, args, kwargs)  # type: ignore[list-item, attr-defined]
        _add_losses(self, losses)
        return results


def _forget_unused(layer: Any) -> None:
    vars(layer).pop("_unused_layers", None)


def _unbuilt(layer: Any) -> set[int]:
    known = layer.__dict__.get("_unused_layers", set())
    return {id(inner) for inner in layers_below(layer) if not inner.built} - known


def _add_losses(layer: Any, losses: Sequence[Any]) -> None:
    for loss in losses:
        # The class of a functional model refuses losses, and that of a stabilized layer has widened them already.
        keras.layers.Layer.add_loss(layer, loss)


class Segment(NamedTuple):
    """A stretch of a graph.

    Attributes:
        nodes: the calls of the stretch.
        inputs: the symbolic tensors that it takes from outside.
        outputs: the tensors that calls outside it take from it.
    """

    nodes: tuple[Any, ...]
    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]


class RematGraph:
    """A functional model that in training keeps of some stretches only what enters them, and recomputes the rest."""

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
                segment = _segment(self, nodes, index, segments[index])
                values |= _recompute(segment, values, operation_fn)
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


def _segment(graph: Any, nodes: Sequence[Any], start: int, stop: int) -> Segment:
    inside = {id(x): x for node in nodes[start:stop] for x in node.outputs}
    taken = {id(x): x for node in nodes[start:stop] for x in node.input_tensors if id(x) not in inside}
    later = {id(x) for node in nodes[stop:] for x in node.input_tensors} | {id(x) for x in graph.outputs}
    outputs = tuple(x for key, x in inside.items() if key in later)
    return Segment(tuple(nodes[start:stop]), tuple(taken.values()), outputs)


def _recompute(segment: Segment, values: dict[int, Any], operation_fn: Callable[[Any], Any]) -> dict[int, Any]:
    layers = [node.operation for node in segment.nodes if isinstance(node.operation, keras.layers.Layer)]
    layers = list({id(layer): layer for layer in layers}.values())
    keys = [id(x) for x in segment.outputs]

    def compute(inputs: dict[str, Any]) -> list[Any]:
        inner = {int(key): value for key, value in inputs.items()}
        _run(segment.nodes, inner, operation_fn)
        return [inner[key] for key in keys]

    inputs = {str(id(x)): values[id(x)] for x in segment.inputs}
    variables = list({id(v): v for layer in layers for v in layer.variables}.values())
    results, losses = recomputed_call(compute, layers, variables, (inputs,), {})
    _add_losses(layers[0], losses)
    return dict(zip(keys, results, strict=True))


def _give_segments(layer: Any) -> None:
    """Tells the graphs of a functional or sequential model which of their stretches are recomputed."""
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


def _graph_mixin(original: type, names: Collection[str]) -> type | None:
    return None if issubclass(original, keras.Sequential) else RematGraph


register_treatments(
    {
        BLOCK: Treatment(lambda original, names: RematBlock, undo=_forget_unused, order=-1),
        SEGMENTS: Treatment(_graph_mixin, undo=_take_segments, before_call=_give_segments, order=-1),
    }
)
