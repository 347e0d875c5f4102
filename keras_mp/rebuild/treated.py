"""Layers whose class is extended, in place, by what is done to them under a name; they save and load so."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import keras

# Private, because Keras has no public way to ask whether a class is made from inputs and outputs.
from keras.src.models.functional import functional_like_constructor

from keras_mp.rebuild.config import original_config
from keras_mp.rebuild.quantized_policies import policy_of, settle_policies, with_source
from keras_mp.rebuild.rule import Config
from keras_mp.rebuild.walk import layers_below

REGISTERED_NAME = "keras_mp>Treated"
# The name in models that version 0.1 saved.
REGISTERED_NAMES = (REGISTERED_NAME, "keras_mp>Stabilized")
# What Keras writes around a layer's config, not into it.
_OUTSIDE = ("shared_object_id", "inbound_nodes", "name")


def _nothing(*_: Any) -> None:
    return None


class Treatment(NamedTuple):
    """What is done to a layer under a name.

    Attributes:
        mixin: the class that comes before the layer's own, by the latter; None where there is none.
        prepare: called with the live layer before its class is changed.
        children: called with the live layer, each time before it computes: it treats the sublayers that the layer's
            own code creates, and no config shows.
        outermost: whether its mixin comes before those of the others.
        innermost: whether its mixin comes behind them, next to the layer's own class.
    """

    mixin: Callable[[type], type | None] = _nothing
    prepare: Callable[[Any], None] = _nothing
    children: Callable[[Any], None] | None = None
    outermost: bool = False
    innermost: bool = False


_TREATMENTS: dict[str, Treatment] = {}


def _treatment(name: str) -> Treatment:
    return _TREATMENTS[base_name(name)]


def base_name(name: str) -> str:
    """The name of a treatment without what may follow it: "remat segments:3-9" is "remat segments"."""
    return name.partition(":")[0]


def register_treatments(treatments: dict[str, Treatment]) -> None:
    """Makes treatments known by their names, which saved models contain."""
    _TREATMENTS.update(treatments)


class Treated:
    """A layer with treatments; it is still an instance of its own class.

    Its config holds the original layer's config and the names of the treatments, so that it saves, loads and clones.
    """

    _original: type
    _treatments: tuple[str, ...]
    _precision: str
    _untreated_policy: Any = None

    def get_config(self) -> Config:
        layer = original_config(self, self._original)
        if self._untreated_policy is not None:
            # The layer is built as it was before it is treated again: its treatments say which weights become float32.
            policy = keras.dtype_policies.serialize(self._untreated_policy)
            layer = {**layer, "config": {**layer["config"], "dtype": policy}}
        return {"name": self.name, "layer": layer, "treatments": list(self._treatments), "precision": self._precision}  # type: ignore[attr-defined]

    @classmethod
    def from_config(cls, config: Config) -> Any:
        layer = keras.saving.deserialize_keras_object(config["layer"])
        return treat(layer, config["treatments"], config["precision"])


# One name in saved models for whatever class was extended: Treated.from_config reads the class from the config.
_register = keras.saving.register_keras_serializable("keras_mp", "Treated")
keras.saving.register_keras_serializable("keras_mp", "Stabilized")(Treated)
_register(Treated)


class TreatedChildren:
    """Sublayers that the layer's own code creates, and no config shows, are treated before they first compute."""

    _treatments: tuple[str, ...]

    def call(self, *args: Any, **kwargs: Any) -> Any:
        self.treat_children()
        return super().call(*args, **kwargs)  # type: ignore[misc]

    def treat_children(self) -> None:
        settle_policies(self)  # type: ignore[arg-type]
        for name in self._treatments:
            children = _treatment(name).children
            if children is not None:
                children(self)


def treatments_of(layer: Any) -> tuple[str, ...]:
    """The names of a layer's treatments."""
    return layer._treatments if isinstance(layer, Treated) else ()


def original_class(layer: Any) -> Any:
    """The class of a layer without its treatments."""
    return layer._original if isinstance(layer, Treated) else type(layer)


def treat(layer: Any, treatments: Sequence[str], precision: str) -> Any:
    """Applies treatments to a live layer, besides those that it has, and returns it.

    Args:
        layer: a Keras layer, built or not, or an operation; it is part of no compiled function yet.
        treatments: their names.
        precision: the dtype that the layer computed in without any.
    """
    names = tuple(dict.fromkeys([*treatments_of(layer), *treatments]))
    original = original_class(layer)
    if isinstance(layer, keras.layers.Layer):
        settle_policies(layer)
    if "quantize" in vars(original) and not isinstance(layer, (keras.Model, Treated)):
        _let_keras_quantize(layer)
    if not isinstance(layer, Treated) and getattr(layer, "variable_dtype", "float32") in ("bfloat16", "float16"):
        layer._untreated_policy = layer.dtype_policy
    layer._treatments = names
    layer._precision = precision
    for name in names:
        _treatment(name).prepare(layer)
    layer.__class__ = _extended(original, names)
    if isinstance(layer, TreatedChildren):
        layer.treat_children()
    return layer


def _let_keras_quantize(layer: Any) -> None:
    """Keras quantizes no subclass of its own layers, which a layer with treatments is to it."""
    quantize = layer.quantize  # on the layer itself, where Keras puts its function around that of the class

    @functools.wraps(quantize)
    def quantize_treated(mode: Any = None, config: Any = None, **arguments: Any) -> None:
        quantize(mode, config=config, **{**arguments, "type_check": False})
        if layer._untreated_policy is not None:
            layer._untreated_policy = with_source(policy_of(layer), layer._untreated_policy.name)

    layer.quantize = quantize_treated


@functools.cache
def _extended(original: type, names: tuple[str, ...]) -> type:
    by_place = sorted(names, key=lambda name: _treatment(name).innermost - _treatment(name).outermost)
    mixins = [_treatment(name).mixin(original) for name in by_place]
    if any(_treatment(name).children for name in names):
        mixins.append(TreatedChildren)
    present = dict.fromkeys(mixin for mixin in mixins if mixin is not None)
    # It keeps the class's name: Keras files weights by it, so they can be loaded into the plain model, and back.
    extended = type(original.__name__, (Treated, *present, original), {"_original": original, "__module__": __name__})
    if issubclass(original, keras.Model) and functional_like_constructor(original):
        extended.__init__ = _init_of_graph(extended, names)  # type: ignore[misc]
    _register(extended)
    _register(Treated)
    return extended


def _init_of_graph(cls: Any, names: Sequence[str]) -> Callable[..., None]:
    """Makes `cls(inputs, outputs)` a model with the treatments of its class, as `keras.models.clone_model` wants it."""

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        super(cls, self).__init__(*args, **kwargs)
        self._treatments, self._precision = names, self.compute_dtype
        for name in names:
            _treatment(name).prepare(self)
        if isinstance(self, TreatedChildren):
            self.treat_children()

    return init


def treated_node(node: Config, layer: Any, treatments: Sequence[str], precision: str) -> Config:
    """Rewrites the config of a layer to that of the layer with treatments, besides those that it has.

    Args:
        node: as Keras serializes a layer.
        layer: the live layer.
        treatments: their names; with none the node is returned as it is.
        precision: the dtype that the layer computes in without any.
    """
    if not treatments:
        return node
    if node["registered_name"] in REGISTERED_NAMES:
        names = list(dict.fromkeys([*node["config"]["treatments"], *treatments]))
        return {**node, "config": {**node["config"], "treatments": names}}
    inner = {key: value for key, value in node.items() if key not in _OUTSIDE}
    config = {"layer": inner, "treatments": list(treatments), "precision": precision, "name": layer.name}
    named = {"module": __name__, "class_name": node["class_name"], "registered_name": REGISTERED_NAME}
    return {**named, "config": config, **{key: node[key] for key in _OUTSIDE if key in node}}


def untreated_node(node: Config, treatments: Collection[str]) -> Config:
    """Rewrites the config of a layer to that of the layer without treatments; any other dict is returned as it is."""
    if node.get("registered_name") not in REGISTERED_NAMES or "layer" not in node["config"]:
        return node
    names = [name for name in node["config"]["treatments"] if base_name(name) not in treatments]
    if names:
        return {**node, "config": {**node["config"], "treatments": names}}
    return {**node["config"]["layer"], **{key: node[key] for key in _OUTSIDE if key in node}}


class Reached:
    """The layers that a rule has met on its way through a config, innermost first."""

    def __init__(self) -> None:
        self._ids: set[int] = set()

    def hidden_below(self, layer: keras.Operation, wanted: Collection[int]) -> set[int]:
        """Notes a layer, and returns the ids of the wanted sublayers that its own code creates and no config shows.

        Args:
            layer: a live layer or operation.
            wanted: ids of live layers.
        """
        self._ids.add(id(layer))
        hidden = {id(sublayer) for sublayer in layers_below(layer)} & set(wanted) - self._ids
        self._ids |= hidden
        return hidden
