"""A plan of changes, made in place, and what the model then needs: dtypes of its graphs, steps, optimizers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import keras

from keras_mp.backend.common.keras_private import Functional, functional_like_constructor
from keras_mp.rebuild.optimizers import (
    carry_slots,
    exchange_optimizer,
    fresh_optimizer,
    move_exclusions,
    optimizers_of,
    unwrapped,
)
from keras_mp.rebuild.walk import (
    LOW_PRECISION,
    Notes,
    Walk,
    calls_of,
    check_is_model,
    graph_of,
    is_built,
    notes_of,
    original_class,
    treatments_of,
    write_notes,
)
from keras_mp.treatment.treated import INSIDE, computes_wide, new_to, parts_of, treat, untreat


class Planned(NamedTuple):
    """Change of a part of a model, with its reason."""

    path: str  # names that lead to the part, joined with `/`
    layer: Any  # the live layer or operation
    treatments: Mapping[str, Any]  # options by the treatment's name; empty where nothing is to be done, or can be
    reason: str = ""  # the reason for the change or against it
    kind: str = ""  # the kind of part; empty where its class says it
    done: bool = False  # whether the part is changed by now


class ChangePlan(Walk):
    """Walk over a model, and all that changes in it.

    Each change adds its rows, and sees by those before it what a layer will be; then all are applied in turn.
    """

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.rows: list[Planned] = []

    def treatments(self, layer: Any) -> set[str]:
        """Names of the treatments that a layer has, or will have."""
        return {*treatments_of(layer), *(name for row in self.rows if row.layer is layer for name in row.treatments)}

    def is_wide(self, layer: Any) -> bool:
        """Whether a treatment lets a layer compute in float32."""
        return computes_wide(self.treatments(layer))

    def compute_dtype(self, layer: Any) -> str:
        """Dtype that a layer will compute in."""
        return "float32" if self.is_wide(layer) else layer.compute_dtype

    def apply(self) -> None:
        """Treats the model and its parts, in place."""
        change(self.model, [(row.layer, row.treatments) for row in self.rows])


def check_built(model: keras.Model) -> None:
    """Refuses what is no model, or has no layers yet.

    Raises:
        TypeError: it is no Keras model.
        ValueError: it is not built.
    """
    check_is_model(model)
    if not is_built(model):
        raise ValueError(
            f"model {model.name!r} is not built, so its layers are not known: call it once on a batch, or "
            "model.build(input_shape)"
        )


@contextmanager
def settled(model: keras.Model) -> Iterator[set[int]]:
    """Settles all changes of a model once, at its end.

    Layers above what changed note what no config would show; the dtypes of functional graphs are inferred again; traced
    steps are dropped; an optimizer whose weights changed becomes a new one with the state of the old.

    Yields:
        The ids of the parts that have changed, for more to be added.
    """
    before = _variables(model)
    changed: set[int] = set()
    try:
        yield changed
    finally:
        if changed:
            walk = Walk(model)
            note_inside(model)
            infer_again(walk, changed)
            models = [layer for layer in walk.every if isinstance(layer, keras.Model)]
            for layer in models:
                # Kept, they would go on as they were traced.
                layer.train_function = layer.test_function = layer.predict_function = None
            if before != _variables(model):  # compared by identity and dtype
                for layer in models:
                    if getattr(layer, "compiled", False):
                        _renew_optimizers(layer, before)


def change(model: keras.Model, wanted: Iterable[tuple[Any, Mapping[str, Any]]]) -> None:
    """Applies treatments to a model and its parts, in place."""
    with settled(model) as changed:
        for part, treatments in wanted:
            if new_to(part, treatments):
                changed.add(id(part))
                treat(part, treatments)


def undo(model: keras.Model, names: Collection[str], also: Iterable[tuple[Any, Callable[[Any], None]]] = ()) -> None:
    """Undoes treatments of a model and its parts, in place.

    Args:
        also: pairs of a layer that changes in another way, and of the function that changes it.
    """
    with settled(model) as changed:
        walk = Walk(model)
        treated = [part for part in [*walk.every, *walk.operations] if treatments_of(part).keys() & names]
        for part in treated:
            untreat(part, names)
        for part, make in also:
            make(part)
            treated.append(part)
        changed.update(map(id, treated))


def _variables(model: keras.Model) -> dict[int, tuple[Any, str]]:
    return {id(variable): (variable, variable.dtype) for variable in model.variables}


def note_inside(model: keras.Layer) -> None:
    """Notes which layers hold treated ones that no config shows."""
    treated: dict[int, bool] = {}

    def visit(layer: Any) -> bool:
        """Whether a layer has treatments, or one below it."""
        if id(layer) not in treated:
            treated[id(layer)] = False
            inside = any([visit(part) for _, part in parts_of(layer)])  # a list, as each of them must be visited
            if inside and not shows_its_parts(layer):
                treat(layer, {INSIDE: None})
            else:
                untreat(layer, (INSIDE,))
            treated[id(layer)] = inside or bool(treatments_of(layer))
        return treated[id(layer)]

    visit(model)


def shows_its_parts(layer: Any) -> bool:
    """Whether a layer's config shows its parts, like a graph's."""
    cls = original_class(layer)
    if issubclass(cls, keras.Sequential):
        return cls.get_config is keras.Sequential.get_config
    return issubclass(cls, Functional) and functional_like_constructor(cls) and cls.get_config is Functional.get_config


def infer_again(walk: Walk, changed: set[int]) -> None:
    """Gives the tensors of functional graphs the dtypes of now.

    Args:
        changed: ids of the layers and operations that may return another dtype.
    """
    held = {id(layer): graph for layer in walk.every if (graph := graph_of(layer)) is not None}
    graphs = {id(graph): graph for graph in reversed(held.values())}
    owners = {id(graph): key for key, graph in held.items()}
    holding = _holding(walk.every, held, changed)
    again = True
    while again:  # an input that becomes wider in an inner graph makes others so
        again = False
        for key, graph in graphs.items():
            moved: set[int] = {id(x) for x in graph.inputs if id(x) in changed}
            for node in calls_of(graph):
                if id(node.operation) not in holding and not moved & {id(x) for x in node.input_tensors}:
                    continue
                again |= _fit_inputs(node, held.get(id(node.operation)), moved, changed)
                for old, new in zip(node.output_tensors, _called_again(node), strict=True):
                    if old.dtype != new.dtype:
                        # Private, as a tensor has no public way to say that it is another than when it was made.
                        old._dtype = new.dtype
                        moved.add(id(old))
            if moved:
                holding |= {key, owners[key]}


def _called_again(node: Any) -> list[Any]:
    """The symbolic tensors that a call of a graph returns now; the graph is left as it is."""
    operation, inputs = node.operation, node.input_tensors
    # Private, as every symbolic call leaves a node with the operations before and behind it.
    sources = [tensor._keras_history.operation for tensor in inputs]
    before = [(nodes, len(nodes)) for nodes in (operation._inbound_nodes, *(s._outbound_nodes for s in sources))]
    outputs = operation(*node.arguments.args, **node.arguments.kwargs)
    for nodes, count in before:
        del nodes[count:]
    return keras.tree.flatten(outputs)


def _holding(layers: list[Any], graphs: Mapping[int, Any], changed: set[int]) -> set[int]:
    """The ids of what changed and of all layers that hold some of it."""
    holding = set(changed)
    for layer in reversed(layers):
        if any(id(part) in holding for _, part in parts_of(layer)):
            holding |= {id(layer), id(graphs.get(id(layer)))}
    return holding


def _fit_inputs(node: Any, graph: Any, moved: set[int], changed: set[int]) -> bool:
    """Lets a called model take a tensor as the float32 it became.

    Where its input has 16 bits; or back. A tensor that was float32 before is cast by Keras.

    Args:
        graph: the graph of the model that is called; None of another operation.
        moved: ids of the tensors around it whose dtype is another now.
        changed: ids of layers, operations and inputs that may return another dtype; the inner inputs are added.
    """
    if graph is None or len(graph.inputs) != len(node.input_tensors):
        return False
    fitted = False
    for outer, inner in zip(node.input_tensors, graph.inputs, strict=True):
        if id(outer) not in moved:
            continue
        layer = inner._keras_history.operation  # private, as above
        notes = notes_of(layer)
        if outer.dtype == "float32" and inner.dtype in LOW_PRECISION:
            write_notes(layer, Notes({}, inner.dtype))
            dtype = "float32"
        elif notes is not None and inner.dtype == "float32" and outer.dtype == notes.precision:
            write_notes(layer, None)
            dtype = notes.precision
        else:
            continue
        inner._dtype = layer._dtype = dtype
        changed.add(id(inner))
        fitted = True
    return fitted


def _renew_optimizers(model: keras.Model, before: dict[int, tuple[Any, str]]) -> None:
    """Gives a compiled model optimizers of its weights as they are now: building one again would double its slots."""
    for name, optimizer in optimizers_of(model).items():
        if not optimizer.built:
            continue
        inner = unwrapped(optimizer)
        # Private, because an optimizer has no public list of what it trains.
        trained = {id(variable) for variable in inner._trainable_variables}
        weights = model.trainable_variables
        if name != "optimizer":
            weights = [v for v in weights if id(v) in trained]
        same = [id(v) for v in weights] == [id(v) for v in inner._trainable_variables]
        if same and all(v.dtype == before[id(v)][1] for v in weights):
            continue
        new = fresh_optimizer(optimizer)
        pairs = [(variable, variable) for variable in weights if id(variable) in trained]
        move_exclusions(new, pairs)
        new.build(weights)
        lost = carry_slots(optimizer, new, {id(variable): variable for variable, _ in pairs})
        exchange_optimizer(model, name, new, lost, stacklevel=6)
