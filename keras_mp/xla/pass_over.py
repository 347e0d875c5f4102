"""A model of which only the first blocks of each group compute, for as long as a step is traced."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import keras

from keras_mp import backend
from keras_mp.backend.common.calls import wrapped_methods
from keras_mp.backend.common.keras_patches import patched
from keras_mp.lean.blocks import Block

RUN = "keras.src.models.functional.Functional.call"
# Private: the lists from which Keras makes `Layer.variables`.
_HOLDS_WEIGHTS = ("_trainable_variables", "_non_trainable_variables", "_seed_generators", "_layers")


class CannotPassOver(ValueError):
    """A block does not return a tensor like the one that it is called on; the message names the block."""


@contextmanager
def passing_over(model: keras.Model, groups: Sequence[tuple[Block, ...]], kept: Sequence[int]) -> Iterator[None]:
    """Within, all blocks of a group after the first few return their input, and the model lacks their weights.

    The optimizer is a new one like the model's, whose slots are those of the weights that are left. All is put back
    afterwards.

    Args:
        model: a built model; compiled, or for inference.
        groups: blocks of equal structure, as `find_blocks` gives them.
        kept: how many of each group compute, at least 1.

    Raises:
        CannotPassOver: a block returns something else than a tensor of its input's shape, or other parts of the model
            use what is computed inside it. A layer is seen to do so when it is called.
    """
    stack = [(group[count - 1], group[count:]) for group, count in zip(groups, kept, strict=True) if group[count:]]
    layers = [(last, over) for last, over in stack if last.kind == "layer"]
    segments = [(last, over) for last, over in stack if last.kind == "segment"]
    computing = [block for group, count in zip(groups, kept, strict=True) for block in group[:count]]
    skipped = [block for _, over in stack for block in over]
    refused: list[str] = []
    with ExitStack() as scopes:
        for last, over in layers:
            scopes.enter_context(_layers_pass_on(last, over, refused))
        if segments:
            cuts = [_Cut(last, over) for last, over in segments]
            scopes.enter_context(patched({RUN: _without(cuts)}))
        scopes.enter_context(_without_weights(skipped, computing))
        scopes.enter_context(_new_optimizer(model))
        try:
            yield
        except Exception as error:
            if refused:  # Keras and the backends wrap what a layer raises in errors of their own
                raise CannotPassOver(refused[0]) from error
            raise


@contextmanager
def _layers_pass_on(last: Block, over: Sequence[Block], refused: list[str]) -> Iterator[None]:
    """Layers return the first tensor that they are called on; the last one that computes shows whether that will do."""

    def checked(path: str, layer: Any, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            taken = _first_tensor(layer, args, kwargs)
            if not _is_tensor(result) or taken is None or tuple(result.shape) != tuple(taken.shape):
                refused.append(
                    f"block {path!r} cannot be passed over: it returns {_outline(result)} of {_outline(taken)}"
                )
                raise CannotPassOver(refused[0])
            made.append(str(keras.backend.standardize_dtype(result.dtype)))
            return result

        return call

    def passing(path: str, layer: Any, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            return keras.ops.cast(_first_tensor(layer, args, kwargs), made[-1])

        return call

    made: list[str] = []
    with (
        wrapped_methods([(last.path, last.layers[0])], ("call",), checked),
        wrapped_methods([(block.path, block.layers[0]) for block in over], ("call",), passing),
    ):
        yield


class _Cut:
    """What is left out of a graph: the calls of some segments; a tensor computed before replaces each of their results.

    Args:
        last: the last segment that computes.
        over: those after it.

    Raises:
        CannotPassOver: what is computed inside them is used after them.
    """

    def __init__(self, last: Block, over: Sequence[Block]) -> None:
        self.nodes = {id(node) for block in over for node in block.nodes}
        self.path = over[0].path
        self._results = {
            id(after): (after, before)
            for node, like in zip(over[-1].nodes, last.nodes, strict=True)
            for after, before in zip(node.outputs, like.outputs, strict=True)
        }

    def applied(self, by_depth: Mapping[int, Sequence[Any]], outputs: Sequence[Any]) -> dict[int, list[Any]]:
        """The graph without the calls, by depth as Keras keeps it."""
        nodes = [node for depth in by_depth.values() for node in depth]
        used = {id(tensor) for tensor in outputs}
        used |= {id(t) for node in nodes if id(node) not in self.nodes for t in node.input_tensors}
        made = {id(t) for node in nodes if id(node) in self.nodes for t in node.outputs} & used
        if made - set(self._results):
            raise CannotPassOver(f"block {self.path!r} cannot be passed over: what it computes is used far from it")
        rest = {depth: [node for node in group if id(node) not in self.nodes] for depth, group in by_depth.items()}
        for depth, group in by_depth.items():
            for node in group:
                pairs = [self._results[id(t)] for t in node.outputs if id(t) in made]
                rest[depth] += [_PassesOn(before, after) for after, before in pairs]
        return rest


class _Same(keras.Operation):
    """Returns what it is called on."""

    def call(self, x: Any) -> Any:
        return x

    def compute_output_spec(self, x: Any) -> Any:
        return x


class _PassesOn:
    """Stands in a graph for the calls that are left out, with the attributes of Keras's nodes that a run reads.

    Args:
        before, after: the tensor that is there, and the one that it stands for.
    """

    is_input = False

    def __init__(self, before: Any, after: Any) -> None:
        self.operation = _Same(name="passed_over")
        self.input_tensors, self.outputs = [before], [after]
        self.arguments = self

    def fill_in(self, values: Mapping[int, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (values[id(self.input_tensors[0])],), {}


def _without(cuts: Sequence[_Cut]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Makes the method by which Keras computes a graph leave out what is cut, whichever model's graph it is."""

    def make(compute: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(compute)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            # The instance's own dict, because Keras's __setattr__ tracks what it is given.
            own = vars(self)
            whole = {name: own[name] for name in ("_nodes_by_depth", "_segments") if name in own}
            own |= _shorter(self, cuts)
            try:
                return compute(self, *args, **kwargs)
            finally:
                own |= whole

        return call

    return make


def _shorter(graph: Any, cuts: Sequence[_Cut]) -> dict[str, Any]:
    """The attributes of a graph that change when calls are left out: its calls, and which of them are recomputed."""
    whole = shorter = graph._nodes_by_depth
    inside = {id(node) for group in whole.values() for node in group}
    for cut in cuts:
        if cut.nodes & inside:
            shorter = cut.applied(shorter, graph.outputs)
    changed = {"_nodes_by_depth": shorter}
    segments = vars(graph).get("_segments")
    if segments:
        before, place = _calls(whole), {id(node): index for index, node in enumerate(_calls(shorter))}
        stretches = [before[start:stop] for start, stop in segments]
        changed["_segments"] = [
            (place[id(nodes[0])], place[id(nodes[-1])] + 1) for nodes in stretches if id(nodes[0]) in place
        ]
    return changed


def _calls(by_depth: Mapping[int, Sequence[Any]]) -> list[Any]:
    """As `keras_mp.lean.blocks.calls_of` lists them."""
    return [node for depth in sorted(by_depth, reverse=True) for node in by_depth[depth] if not node.is_input]


@contextmanager
def _without_weights(blocks: Sequence[Block], but: Sequence[Block]) -> Iterator[None]:
    """The model has no weights of some blocks, except what others share with them."""
    shared = {id(layer) for block in but for layer in block.layers}
    layers = [layer for block in blocks for layer in block.layers if isinstance(layer, keras.layers.Layer)]
    layers = [layer for layer in layers if id(layer) not in shared]
    hidden = [(layer, name, vars(layer)[name]) for layer in layers for name in _HOLDS_WEIGHTS if name in vars(layer)]
    try:
        for layer, name, _ in hidden:
            vars(layer)[name] = []
        yield
    finally:
        for layer, name, before in hidden:
            vars(layer)[name] = before


@contextmanager
def _new_optimizer(model: keras.Model) -> Iterator[None]:
    old = vars(model).get("optimizer")
    if not isinstance(old, keras.optimizers.Optimizer):
        yield
        return
    with backend.no_allocation():
        new = type(old).from_config(old.get_config())
    vars(model)["optimizer"] = new
    try:
        yield
    finally:
        vars(model)["optimizer"] = old


def _first_tensor(layer: keras.Layer, args: Any, kwargs: Any) -> Any:
    """The first in the order of a layer's parameters: a call may give keywords alone, as those of decoders do."""
    # Private: the call itself has no names where a class around the layer's own takes any arguments.
    given = layer._call_signature.bind(*args, **kwargs).arguments
    return next((leaf for value in given.values() for leaf in keras.tree.flatten(value) if _is_tensor(leaf)), None)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, keras.KerasTensor) or keras.ops.is_tensor(value)


def _outline(value: Any) -> str:
    if _is_tensor(value):
        return f"{keras.backend.standardize_dtype(value.dtype)}{list(value.shape)}"
    return f"a {type(value).__name__}"
