"""Layers rebuilt by the arguments of their `__init__`."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np

from keras_mp.backend.common.keras_private import functional_like_constructor
from keras_mp.rebuild.walk import LIBRARIES, Config, package_of
from keras_mp.system.argument_checks import takes

REGISTERED_NAME = "keras_mp>ByArguments"
# What Keras's base class writes into every config, whether or not the class's `__init__` takes it.
_OF_THE_BASE = ("activity_regularizer", "dtype", "name", "trainable")
# What Keras writes around a layer's config, not into it.
_OUTSIDE = ("shared_object_id", "inbound_nodes", "name", "build_config", "compile_config")


@keras.saving.register_keras_serializable("keras_mp", "ByArguments")
class ByArguments:
    """Rebuilds a layer from the arguments that its class takes.

    Then it gives the layer what the class does not take.

        layer = Class(**arguments)
        layer.name, layer.dtype_policy, layer.trainable = those of the layer that was saved

    It stands in a config in the class's place, so it is never made itself.
    """

    def get_config(self) -> Config:
        raise NotImplementedError("it is never made; Keras registers only classes that have a config")

    @classmethod
    def from_config(cls, config: Config) -> Any:
        node, kept = config["layer"], config["kept"]
        if kept:  # these values were read off a layer, and its class does not know them for serialized ones
            arguments = {
                key: keras.saving.deserialize_keras_object(value) if key in kept else value
                for key, value in node["config"].items()
            }
            node = {**node, "config": arguments}
        layer = keras.saving.deserialize_keras_object(node)
        for name in kept:
            if not same(getattr(layer, name, None), node["config"][name]):
                raise TypeError(
                    f"{type(layer).__name__}(..., {name}={_short(node['config'][name])}) keeps "
                    f"{_short(getattr(layer, name, None))} as its {name}, so how the layer was made cannot be read off "
                    "it: give it a get_config()"
                )
        given = config["given"]
        if "name" in given:
            layer.name = given["name"]
        if "activity_regularizer" in given:
            layer.activity_regularizer = keras.regularizers.get(given["activity_regularizer"])
        if "dtype" in given:
            layer.dtype_policy = keras.dtype_policies.get(given["dtype"])
        if given.get("trainable") is False:  # True would thaw layers inside that are frozen
            layer.trainable = False
        return layer


def by_arguments(node: Config, cls: type, name: str, kept: tuple[str, ...] = ()) -> Config:
    """Rewrites a config that has more than the class takes.

    The entries of Keras's base class that `__init__` does not take are given to the layer after it is made.

    Args:
        kept: arguments whose values were read off the layer; see `configs_of_arguments`.
    """
    if (
        node["registered_name"] == REGISTERED_NAME
        or "from_config" in _defined_below_keras(cls)
        or issubclass(cls, keras.Sequential)  # made by its name alone; rules look for its layers in its config
    ):
        if node["registered_name"] == REGISTERED_NAME or takes(cls.__init__, "dtype"):  # type: ignore[misc]
            return node
        return {**node, "config": {name: value for name, value in node["config"].items() if name != "dtype"}}
    whole = {"name": name, **node["config"]}  # Keras itself leaves out a name that the class does not take
    given = {key: whole[key] for key in _OF_THE_BASE if key in whole and not takes(cls.__init__, key)}  # type: ignore[misc]
    if not given and not kept:
        return node
    accepted = {key: value for key, value in node["config"].items() if key not in given}
    inner = {key: value for key, value in node.items() if key not in _OUTSIDE}
    config = {"layer": {**inner, "config": accepted}, "given": given, "kept": list(kept), "name": name}
    outside = {key: node[key] for key in _OUTSIDE if key in node}
    named = {"module": __name__, "class_name": node["class_name"], "registered_name": REGISTERED_NAME}
    return {**named, "config": config, **outside}


def hidden_arguments(layer: keras.Layer, cls: type) -> tuple[str, ...]:
    """Names arguments of a model's `__init__` that no config holds.

    Without a `get_config()`, Keras writes none of them: made again, the model would have the defaults, and the weights
    of the other.
    """
    described = functional_like_constructor(cls) or "get_config" in _defined_below_keras(cls)
    if described or not issubclass(cls, keras.Model) or issubclass(cls, keras.Sequential):
        return ()
    _, *parameters = inspect.signature(cls.__init__).parameters.values()  # type: ignore[misc]
    named = [one for one in parameters if one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)]
    return tuple(one.name for one in named if one.name not in _OF_THE_BASE)


def with_hidden(node: Config, layer: keras.Layer, names: tuple[str, ...]) -> Config | None:
    """Puts in arguments kept as attributes, or returns None."""
    nothing = object()
    values = {name: getattr(layer, name, nothing) for name in names}
    if not all(isinstance(value, (bool, int, float, str, type(None))) for value in values.values()):
        return None
    return {**node, "config": {**node["config"], **values}}


def _defined_below_keras(cls: type) -> set[str]:
    """Names that a class and its bases define before Keras's."""
    names: set[str] = set()
    for base in cls.__mro__:
        if package_of(base) == "keras":
            break
        names |= vars(base).keys()
    return names


def with_left_out(node: Config, layer: keras.Layer) -> Config:
    """Puts in the arguments that a `get_config()` forgets.

    KerasHub's Llama forgets `tie_word_embeddings`: rebuilt without it, a model with one matrix has two. Only numbers,
    strings and booleans: of anything else an attribute may hold what was made of the argument.
    """
    cls = type(layer)
    if package_of(cls) in LIBRARIES or "get_config" not in _defined_below_keras(cls):
        return node
    definer = next(base for base in cls.__mro__ if {"from_config", "get_config"} & vars(base).keys())
    if "from_config" in vars(definer):
        return node  # what its get_config() writes need not be arguments
    left_out: Config = {}
    for parameter in inspect.signature(cls.__init__).parameters.values():
        name, value = parameter.name, getattr(layer, parameter.name, None)
        if parameter.default is parameter.empty or name in node["config"] or name in _OF_THE_BASE:
            continue
        if type(value) is type(parameter.default) and isinstance(value, (bool, int, float, str)):
            left_out |= {name: value} if value != parameter.default else {}
    return {**node, "config": {**node["config"], **left_out}} if left_out else node


@contextlib.contextmanager
def configs_of_arguments(layers: list[keras.Layer]) -> Iterator[dict[int, tuple[str, ...]]]:
    """Lets layers without a `get_config()` be serialized by their attributes.

    A class that keeps `encoder` as `self.encoder` shows what it was made of, though it has no config. `ByArguments`
    checks that a layer made again keeps the same.

    Args:
        layers: the layers, innermost first.

    Yields:
        The names of the arguments, by the id of each layer that was so helped.
    """
    helped: dict[int, tuple[str, ...]] = {}
    patched = []
    try:
        for layer in layers:
            if _has_config(layer):
                continue
            names = _kept_arguments(layer)
            if names is not None:
                # Past Keras's tracking of attributes, and gone again before anyone else sees the layer.
                object.__setattr__(layer, "get_config", lambda layer=layer, names=names: _config(layer, names))
                patched.append(layer)
                helped[id(layer)] = names
        yield helped
    finally:
        for layer in patched:
            object.__delattr__(layer, "get_config")


def _has_config(layer: keras.Layer) -> bool:
    try:
        layer.get_config()
    except Exception:
        return False
    return True


def _kept_arguments(layer: keras.Layer) -> tuple[str, ...] | None:
    """Arguments of `__init__`, if each is an attribute, or None."""
    _, *parameters = inspect.signature(type(layer).__init__).parameters.values()
    own = [parameter for parameter in parameters if parameter.name not in _OF_THE_BASE]
    own = [parameter for parameter in own if parameter.kind is not parameter.VAR_KEYWORD]
    if any(parameter.kind in (parameter.VAR_POSITIONAL, parameter.POSITIONAL_ONLY) for parameter in own):
        return None
    names = tuple(parameter.name for parameter in own)
    return names if all(hasattr(layer, name) for name in names) else None


def _config(layer: keras.Layer, names: tuple[str, ...]) -> Config:
    dtype = keras.dtype_policies.serialize(layer.dtype_policy)
    base = {"name": layer.name, "trainable": layer.trainable, "dtype": dtype}
    return {**base, **{name: keras.saving.serialize_keras_object(_plain(getattr(layer, name))) for name in names}}


def _plain(value: Any) -> Any:
    """Lists and dicts without Keras's tracking."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return (tuple if isinstance(value, tuple) else list)(map(_plain, value))
    return value


def same(kept: Any, given: Any) -> bool:
    """Whether an object keeps an argument as it was given."""
    if kept is given:
        return True
    if isinstance(given, dict):
        return isinstance(kept, dict) and kept.keys() == given.keys() and all(same(kept[k], given[k]) for k in given)
    if isinstance(given, (list, tuple)):
        pairs = zip(kept, given, strict=False)
        return isinstance(kept, (list, tuple)) and len(kept) == len(given) and all(same(*pair) for pair in pairs)
    plain = isinstance(given, (bool, int, float, str, type(None), np.ndarray, np.generic))
    return plain and type(kept) is type(given) and bool(np.all(kept == given))


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
