"""Layers changed in place by named treatments, which are saved and loaded with them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextvars import ContextVar
from importlib.metadata import version
from typing import Any

import keras

from keras_mp.backend.common.keras_patches import restored_policy
from keras_mp.backend.common.keras_private import functional_like_constructor, global_state
from keras_mp.rebuild.arguments import by_arguments, hidden_arguments, with_hidden, with_left_out
from keras_mp.rebuild.quantized_policies import (
    adapt,
    adaptation_of,
    maps_with_defaults,
    policy_of,
    settle_policies,
    with_source,
)
from keras_mp.rebuild.walk import (
    LOW_PRECISION,
    Changed,
    Config,
    Notes,
    Place,
    children_of,
    existing_notes,
    graph_of,
    layers_below,
    notes_of,
    original_class,
    treatments_of,
    write_notes,
)

# The treatment of a layer whose own code creates layers that have treatments.
INSIDE = "inside"
# What a file says of such a layer beside its treatments: how its weights are quantized, and its LoRA.
ADAPTED = "adapted"
# Layers whose `get_config()` was asked for while a config is written: what is not among them is shown by no config.
_SHOWN: ContextVar[set[int] | None] = ContextVar("shown", default=None)


@dataclasses.dataclass(frozen=True)
class Treatment:
    """A change of a layer, which has a name."""

    # The class that comes before the layer's own, by the latter and the names of all its treatments; None for none.
    mixin: Callable[[type, Collection[str]], type | None] = lambda original, names: None
    # Functions that are called with the live layer:
    apply: Callable[[Any], None] = lambda layer: None  # before its class is changed
    undo: Callable[[Any], None] = lambda layer: None  # after its class is changed back
    built: Callable[[Any], None] | None = None  # once it is built, or at once where it is
    before_call: Callable[[Any], None] | None = None  # each time before it computes
    before_quantize: Callable[[Any], None] = lambda layer: None  # before Keras quantizes it
    before_build: bool = False  # whether a layer that is loaded is built only after it has the mixin
    keeps_adaptation: bool = False  # whether a file says how it is quantized, and of its LoRA, where no config does
    wide: bool = False  # whether a layer computes in float32 with it
    order: int = 0  # where its mixin stands: that of a smaller number comes first
    write: Callable[[Any], Any] = lambda options: options  # makes JSON of its options
    read: Callable[[Any], Any] = lambda options: options  # makes options of JSON


_TREATMENTS: dict[str, Treatment] = {}


def register_treatments(treatments: Mapping[str, Treatment]) -> None:
    """Makes treatments known by their names, which saved models contain."""
    _TREATMENTS.update(treatments)


def _treatment(name: str) -> Treatment:
    if name not in _TREATMENTS:
        raise ValueError(
            f"the model has a layer with the treatment {name!r}, which keras_mp {version('keras-mp')} does not know: "
            "load it with the version that saved it, or a newer one"
        )
    return _TREATMENTS[name]


# One name in saved models for whatever class was extended: Treated.from_config reads the class from the config.
REGISTERED_NAME = "keras_mp>Treated"
_register = keras.saving.register_keras_serializable("keras_mp", "Treated")


@_register
class Treated(Changed):
    """A layer with treatments, still an instance of its class.

    Its config holds the original layer's config, the treatments with their options, and by their places those of the
    sublayers that the layer's own code creates and no config shows.
    """

    def get_config(self) -> Config:
        if global_state.get_global_attribute("use_legacy_config", False):
            raise ValueError(
                f"{self.name!r} cannot be saved as HDF5, "  # type: ignore[attr-defined]
                "whose format holds only the name of a class, not what keras_mp changed: save as '.keras', or the "
                "weights alone, or call keras_mp.revert(model) before"
            )
        notes = existing_notes(self)
        outer = _SHOWN.get()
        shown: set[int] = set()
        before = _SHOWN.set(shown)
        try:
            layer = _original_config(self, self._original)  # type: ignore[arg-type]
        finally:
            _SHOWN.reset(before)
        inside = [
            {"place": list(place), "treatments": _written(treatments), "precision": precision}
            for place, treatments, precision in _not_shown(self, shown)
        ]
        if outer is not None:
            outer |= {*shown, id(self)}
        if notes.policy is not None:
            # The layer is built as it was before it is treated again: its treatments say which weights become float32.
            policy = keras.dtype_policies.serialize(notes.policy)
            layer = {**layer, "config": {**layer["config"], "dtype": policy}}
        config = {"name": self.name, "layer": layer}  # type: ignore[attr-defined]
        if (policy := _policy_of_parts(self)) is not None:
            config["policy"] = keras.dtype_policies.serialize(policy)
        config |= {"treatments": _written(notes.treatments), "precision": notes.precision}
        return {**config, "inside": inside} if inside else config

    @classmethod
    def from_config(cls, config: Config) -> Any:
        # `clone_model` needs no registered class, as it has the class at hand.
        original = cls._original
        known = {} if original is None else {keras.saving.get_registered_name(original): original}
        policy, written = config.get("policy"), config["layer"]
        if any(_treatment(name).before_build for name in config["treatments"]):
            written = {**written, "build_config": None}
        with restored_policy(keras.dtype_policies.deserialize(policy)):
            layer = keras.saving.deserialize_keras_object(written, custom_objects=known)
        waiting = {
            tuple(entry["place"]): (_read(entry["treatments"]), entry["precision"])
            for entry in config.get("inside", [])
        }
        layer = treat(layer, _read(config["treatments"]), config["precision"])
        existing_notes(layer).kept[_POLICY] = policy
        if waiting:
            treat(layer, {INSIDE: None})
            existing_notes(layer).waiting |= waiting
            treat_inside(layer)
        return layer

    def __reduce__(self) -> Any:
        load, *arguments = super().__reduce__()  # type: ignore[str-unpack]
        # Of the class that a module has: pickle looks for it there.
        return (getattr(self._original, load.__name__), *arguments)  # type: ignore[union-attr]

    def build_from_config(self, config: Config) -> None:
        with restored_policy(keras.dtype_policies.deserialize(existing_notes(self).kept.get(_POLICY))):
            super().build_from_config(config)  # type: ignore[misc]
        treat_inside(self)  # before weights are loaded


def _original_config(layer: keras.Operation, original: type) -> Config:
    """Serializes a layer as one of the original class."""
    extended = type(layer)
    layer.__class__ = original  # Keras reads the class's name, module and constructor off the object
    try:
        with maps_with_defaults(layer) if isinstance(layer, keras.Model) else contextlib.nullcontext():
            config = with_left_out(keras.saving.serialize_keras_object(layer), layer)
        hidden = hidden_arguments(layer, original)
        known = with_hidden(config, layer, hidden)
        # With an argument unknown it is left to Keras, which refuses to load it, or says nothing, as without us.
        config = config if known is None else by_arguments(known, original, layer.name, hidden)
    finally:
        layer.__class__ = extended
    for key in ("compile_config", "shared_object_id"):  # those of the config around this one count
        config.pop(key, None)
    return config


_POLICY = "policy of parts"


def _policy_of_parts(layer: Any) -> Any:
    """The dtype policy of a model whose own code makes layers of the same; None where its config shows its parts."""
    if not isinstance(layer, keras.Model):
        return None
    original = original_class(layer)
    if issubclass(original, keras.Sequential) or (layer.built and functional_like_constructor(original)):
        return None
    policy = layer.dtype_policy
    if not layer.built:
        return policy  # of layers that it makes when it is built
    return policy if any(below.dtype_policy.name == policy.name for below in layers_below(layer)) else None


class _BeforeCall:
    """A layer that sees to something each time before it computes."""

    def call(self, *args: Any, **kwargs: Any) -> Any:
        see_to(self)
        result = super().call(*args, **kwargs)  # type: ignore[misc]
        # Of a layer without build() the first call builds what is in it: it is treated before weights are loaded.
        _treat_waiting(self)
        return result


def see_to(layer: Any) -> None:
    """What a layer with treatments does before it computes."""
    _treat_waiting(layer)
    for name in existing_notes(layer).treatments:
        if before_call := _treatment(name).before_call:
            before_call(layer)


def _treat_waiting(layer: Any) -> None:
    if existing_notes(layer).waiting:
        settle_policies(layer)
        treat_inside(layer)


def treat_inside(layer: Any) -> None:
    """Treats existing sublayers that no config shows."""
    waiting = existing_notes(layer).waiting
    for place in list(waiting):
        part = part_at(layer, place)
        if part is None:
            continue
        treatments, precision = waiting.pop(place)
        adaptation = treatments.pop(ADAPTED, None)
        treat(part, treatments, precision)
        if adaptation is not None:
            _once_built(part, [functools.partial(adapt, adaptation=adaptation)])


def _written(treatments: Mapping[str, Any]) -> Config:
    return {name: _treatment(name).write(options) for name, options in treatments.items()}


def _read(saved: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _treatment(name).read(options) for name, options in saved.items()}


def parts_of(layer: Any) -> Iterator[tuple[int | str, Any]]:
    """The sublayers and operations of a layer, with their steps."""
    # A Sequential gets its input only once it is built.
    inner = [child for child in children_of(layer) if not isinstance(child, keras.layers.InputLayer)]
    yield from enumerate(inner)
    graph = graph_of(layer) if isinstance(layer, keras.layers.Layer) else None
    operations = [part for part in getattr(graph, "operations", []) if not isinstance(part, keras.layers.Layer)]
    yield from ((f"o{index}", operation) for index, operation in enumerate(operations))


def part_at(layer: Any, place: Place) -> Any:
    """The layer or operation at a place, or None."""
    for step in place:
        layer = dict(parts_of(layer)).get(step)
        if layer is None:
            return None
    return layer


def _not_shown(layer: Any, shown: Collection[int]) -> Iterator[tuple[Place, dict[str, Any], str]]:
    """The parts with treatments below a layer that none of the shown configs holds: treatments and precision."""
    seen: set[int] = set()

    def visit(layer: Any, place: Place) -> Iterator[tuple[Place, dict[str, Any], str]]:
        for step, part in parts_of(layer):
            if id(part) in seen or id(part) in shown:
                continue
            seen.add(id(part))
            notes = notes_of(part)
            if notes is not None:
                keeps = any(_treatment(name).keeps_adaptation for name in notes.treatments)
                adaptation = adaptation_of(part) if keeps else {}
                adapted = {ADAPTED: adaptation} if adaptation else {}
                yield (*place, step), notes.treatments | adapted, notes.precision
            yield from visit(part, (*place, step))

    yield from visit(layer, ())
    yield from ((place, *entry) for place, entry in existing_notes(layer).waiting.items())


def computes_wide(names: Collection[str]) -> bool:
    """Whether a layer with these treatments computes in float32."""
    return any(_treatment(name).wide for name in names)


def new_to(layer: Any, treatments: Mapping[str, Any]) -> dict[str, Any]:
    """The treatments that a layer lacks, or has otherwise."""
    has = treatments_of(layer)
    return {name: options for name, options in treatments.items() if name not in has or has[name] != options}


def treat(layer: Any, treatments: Mapping[str, Any], precision: str = "") -> Any:
    """Applies treatments to a live layer, in place; returns it.

    Those that it has stay.

    Args:
        layer: a Keras layer, built or not, or an operation; no traced step holds it, or the step is dropped after.
        treatments: the options of each treatment, by its name; one that the layer has with the same options changes
            nothing.
        precision: the dtype that the layer computed in without any; by default that which it computes in.
    """
    notes, new = notes_of(layer), new_to(layer, treatments)
    if not new:
        return layer
    known = [_treatment(name) for name in new]
    original = original_class(layer)
    is_layer = isinstance(layer, keras.layers.Layer)
    if is_layer:
        settle_policies(layer)
    if notes is None:
        notes = Notes({}, precision or (layer.compute_dtype if is_layer else "float32"))
        if getattr(layer, "variable_dtype", "float32") in LOW_PRECISION:
            notes.policy = layer.dtype_policy
        if "quantize" in vars(original) and not isinstance(layer, keras.Model):
            _let_keras_quantize(layer)
        write_notes(layer, notes)
    notes.treatments = dict(sorted((notes.treatments | new).items()))
    for treatment in known:
        treatment.apply(layer)
    layer.__class__ = _extended(original, notes.treatments)
    hooks = [treatment.built for treatment in known if treatment.built is not None]
    if hooks or INSIDE in new:
        _once_built(layer, hooks)
    if INSIDE in new or any(treatment.before_call for treatment in known):
        see_to(layer)
    return layer


def untreat(layer: Any, names: Collection[str]) -> Any:
    """Undoes those treatments that a layer has; returns it."""
    notes = notes_of(layer)
    gone = [] if notes is None else [name for name in notes.treatments if name in names]
    if notes is None or not gone:
        return layer
    notes.treatments = {name: options for name, options in notes.treatments.items() if name not in gone}
    original = original_class(layer)
    layer.__class__ = _extended(original, notes.treatments) if notes.treatments else original
    for name in reversed(gone):
        _treatment(name).undo(layer)
    if not notes.treatments:
        write_notes(layer, None)
    return layer


def rebase(layer: Any, original: type) -> None:
    """Gives a layer another class below its treatments."""
    notes = notes_of(layer)
    layer.__class__ = original if notes is None else _extended(original, notes.treatments)


def _once_built(layer: Any, hooks: Sequence[Callable[[Any], None]]) -> None:
    if layer.built:
        for hook in hooks:
            hook(layer)
        return
    build = layer.build  # on the layer itself, where Keras puts its function around that of the class

    @functools.wraps(build)
    def build_then(*args: Any, **kwargs: Any) -> None:
        notes = notes_of(layer)
        with restored_policy(keras.dtype_policies.deserialize(notes and notes.kept.get(_POLICY))):
            build(*args, **kwargs)
        for hook in hooks:
            hook(layer)
        if notes_of(layer) is not None:
            treat_inside(layer)

    build_then.__wrapped__ = getattr(build, "__wrapped__", build)  # type: ignore[attr-defined]
    layer.build = build_then


def _let_keras_quantize(layer: Any) -> None:
    """Keras quantizes no subclass of its own layers, which a layer with treatments is to it."""
    quantize = layer.quantize  # on the layer itself, where Keras puts its function around that of the class
    if getattr(quantize, "of_treated", False):
        return

    @functools.wraps(quantize)
    def quantize_treated(mode: Any = None, config: Any = None, **arguments: Any) -> None:
        for name in treatments_of(layer):
            _treatment(name).before_quantize(layer)
        quantize(mode, config=config, **{**arguments, "type_check": False})
        notes = notes_of(layer)
        if notes is not None and notes.policy is not None:
            notes.policy = with_source(policy_of(layer), notes.policy.name)

    quantize_treated.of_treated = True  # type: ignore[attr-defined]
    layer.quantize = quantize_treated


def _extended(original: type, treatments: Mapping[str, Any]) -> type:
    """The class of a layer with treatments; that of a graph has their options, too, as clones of it are made by it."""
    graph = issubclass(original, keras.Model) and functional_like_constructor(original)
    return _class_of(original, tuple(treatments), json.dumps(_written(treatments)) if graph else "")


@functools.cache
def _class_of(original: type, names: tuple[str, ...], written: str) -> type:
    by_place = sorted(names, key=lambda name: _treatment(name).order)
    mixins = [_treatment(name).mixin(original, names) for name in by_place]
    if any(name == INSIDE or _treatment(name).before_call for name in names):
        mixins.append(_BeforeCall)
    present = dict.fromkeys(mixin for mixin in mixins if mixin is not None)
    # It keeps the class's name: Keras files weights by it, so they can be loaded into the plain model, and back.
    extended = type(original.__name__, (Treated, *present, original), {"_original": original, "__module__": __name__})
    if written:
        extended.__init__ = _init_of_graph(extended, _read(json.loads(written)))  # type: ignore[misc]
    _register(extended)
    _register(Treated)
    return extended


def _init_of_graph(cls: Any, treatments: Mapping[str, Any]) -> Callable[..., None]:
    """Makes `cls(inputs, outputs)` a model with the treatments of its class, as `keras.models.clone_model` wants it."""

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        super(cls, self).__init__(*args, **kwargs)
        write_notes(self, Notes(dict(treatments), self.compute_dtype))
        for name in treatments:
            _treatment(name).apply(self)
        if isinstance(self, _BeforeCall):
            see_to(self)

    return init


def untreated_node(node: Config, treatments: Collection[str], with_options: Collection[str] = ()) -> Config:
    """Rewrites a config to that of the layer without treatments.

    Any other dict is returned as it is.

    Args:
        treatments: names of treatments that go; with `ADAPTED` also those that keep the adaptation of a layer.
        with_options: names of treatments that stay where they have options.
    """
    if node.get("registered_name") != REGISTERED_NAME or "layer" not in node["config"]:
        return node
    config = node["config"]

    def without(saved: Mapping[str, Any]) -> Config:
        plain = ADAPTED in treatments and ADAPTED in saved
        return {
            name: options
            for name, options in saved.items()
            if (name not in treatments or (options and name in with_options))
            and not (plain and _treatment(name).keeps_adaptation)
        }

    left = without(config["treatments"])
    inside = [
        {**entry, "treatments": kept} for entry in config.get("inside", []) if (kept := without(entry["treatments"]))
    ]
    if not inside:
        left.pop(INSIDE, None)
    if not left:
        outside = ("shared_object_id", "inbound_nodes", "name")
        return {**config["layer"], **{key: node[key] for key in outside if key in node}}
    config = {key: value for key, value in config.items() if key != "inside"}
    return {**node, "config": {**config, "treatments": left, **({"inside": inside} if inside else {})}}


register_treatments(
    {
        INSIDE: Treatment(),
        ADAPTED: Treatment(write=keras.saving.serialize_keras_object, read=keras.saving.deserialize_keras_object),
    }
)
