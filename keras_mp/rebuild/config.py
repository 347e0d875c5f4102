"""A model's serialized config, rewritten by a rule."""

from __future__ import annotations

import contextlib
import inspect
from typing import Any, NamedTuple

import keras

from keras_mp.rebuild.arguments import by_arguments, hidden_arguments, with_hidden, with_left_out
from keras_mp.rebuild.notes import treatments_of
from keras_mp.rebuild.quantized_policies import maps_with_defaults
from keras_mp.rebuild.rule import Config, Rule
from keras_mp.rebuild.state import value_on_host
from keras_mp.rebuild.walk import with_self


class Rewrite(NamedTuple):
    """How a config is rewritten.

    Attributes:
        rule: as for `rebuild`.
        layers: the live layers and operations, by id.
        kept: names of the arguments that were read off layers without a config, by the layer's id.
    """

    rule: Rule
    layers: dict[int, keras.Operation]
    kept: dict[int, tuple[str, ...]]


def rewrite(node: Any, how: Rewrite) -> Any:
    """Applies the rule innermost first, and prepares what Keras needs to build the result."""
    if isinstance(node, (list, tuple)):
        return type(node)(rewrite(item, how) for item in node)
    if not isinstance(node, dict):
        return node
    layer = how.layers.get(node.get("shared_object_id", 0))
    if layer is None:  # something short-lived, whose id may have been used again
        ignored = {"shared_object_id"}
    else:
        node, ignored = _with_live_arguments(_with_policy(node, layer), layer), {"compile_config"}  # carried as objects
    if isinstance(layer, keras.layers.Layer):
        node = by_arguments(with_left_out(node, layer), type(layer), layer.name, how.kept.get(id(layer), ()))
    return how.rule({key: rewrite(value, how) for key, value in node.items() if key not in ignored}, layer)


def _with_policy(node: Config, layer: keras.Operation) -> Config:
    """Puts back a policy that the layer's get_config() reduced to its variable dtype, as SpatialDropout's does."""
    if isinstance(layer, keras.layers.InputLayer) or not isinstance(layer, keras.layers.Layer):
        return node  # has a dtype or nothing, but no policy
    policy = layer.dtype_policy
    if node["config"].get("dtype") != policy.variable_dtype or policy.variable_dtype == policy.compute_dtype:
        return node
    return {**node, "config": {**node["config"], "dtype": keras.dtype_policies.serialize(policy)}}


def lambdas(model: keras.Model) -> dict[str, Any]:
    """The live lambdas of layers: as bytecode they lose globals and closure, and Keras reads no activation from it."""
    values = [value for layer in with_self(model) for value in vars(layer).values()]
    return {_lambda_name(value): value for value in values if _is_lambda(value)}


def _is_lambda(value: Any) -> bool:
    return inspect.isfunction(value) and value.__name__ == "<lambda>"


def _lambda_name(function: Any) -> str:
    return f"lambda {id(function)}"


def _with_live_arguments(node: Config, layer: keras.Operation) -> Config:
    """Puts in what a config does not hold: lambdas, as of a Lambda layer, and the weights given to a JaxLayer."""
    treated = node["config"].get("layer")
    if treatments_of(layer) and isinstance(treated, dict):
        return {**node, "config": {**node["config"], "layer": _with_live_arguments(treated, layer)}}
    own = {key: _lambda_name(vars(layer)[key]) for key in node["config"] if _is_lambda(vars(layer).get(key))}
    if own:
        functions = {
            key: {"module": None, "class_name": "function", "config": name, "registered_name": name}
            for key, name in own.items()
        }
        return {**node, "config": {**node["config"], **functions}}
    if _is_of_params(layer):
        return {**node, "module": None, "registered_name": _name_of_params(layer)}
    return node


class _OfParams:
    """Makes a JaxLayer again whose weights were given to it, which its config leaves out."""

    def __init__(self, layer: keras.Operation) -> None:
        self.layer = layer

    def from_config(self, config: Config) -> Any:
        import jax

        weights = {
            name: jax.tree_util.tree_map(value_on_host, getattr(self.layer, name)) for name in ("params", "state")
        }
        return type(self.layer).from_config({**config, **weights})


def _is_of_params(layer: keras.Operation) -> bool:
    return isinstance(layer, keras.layers.JaxLayer) and layer.init_fn is None


def _name_of_params(layer: keras.Operation) -> str:
    return f"JaxLayer {id(layer)}"


def of_params(model: keras.Model) -> dict[str, Any]:
    return {_name_of_params(layer): _OfParams(layer) for layer in with_self(model) if _is_of_params(layer)}


def unshare_across_graphs(node: Any, seen: set[int]) -> tuple[Any, list[int]]:
    """Makes a layer of a functional graph that was created for another graph before a copy; returns which.

    Functional models find a tensor by its number among the calls of a layer, and count from the layer's first call
    anywhere, so a layer that another graph already called gives them the wrong tensor.
    """
    copied: list[int] = []
    if isinstance(node, (list, tuple)):
        items = [unshare_across_graphs(item, seen) for item in node]
        return type(node)(item for item, _ in items), [key for _, keys in items for key in keys]
    if not isinstance(node, dict):
        return node, copied
    key = node.get("shared_object_id")
    result = {}
    for name, value in node.items():
        result[name], more = unshare_across_graphs(value, seen)
        copied += more
    if key in seen and "inbound_nodes" in node:
        del result["shared_object_id"]
        copied.append(key)
    if key is not None:
        seen.add(key)
    return result, copied


def original_config(layer: keras.Operation, original: type) -> Config:
    """Serializes a layer whose class extends another as one of that class, for the config of the extension."""
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


def custom_objects_of(model: keras.Model) -> dict[str, Any]:
    """Every class and function outside Keras that the live model uses, by the names its config may call it."""
    custom_objects: dict[str, Any] = {}
    for layer in with_self(model):
        for value in [layer, *vars(layer).values()]:
            # Keras puts wrappers of a layer's methods, as of build, among its attributes.
            if inspect.ismethod(getattr(value, "__wrapped__", None)):
                continue
            for thing in [value] if inspect.isfunction(value) else type(value).__mro__:
                serializable = inspect.isfunction(thing) or hasattr(thing, "from_config")
                own = (thing.__module__ or "").partition(".")[0] not in ("keras", "keras_mp")
                if serializable and (own or inspect.isfunction(thing)) and thing.__name__ != "<lambda>":
                    for name in (thing.__name__, keras.saving.get_registered_name(thing)):
                        custom_objects.setdefault(name, thing)
    return custom_objects
