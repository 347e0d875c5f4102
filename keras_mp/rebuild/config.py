"""From a model to its config, rewritten, and back."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import keras

from keras_mp.backend.common.keras_private import ObjectSharingScope, global_state
from keras_mp.rebuild.arguments import by_arguments, configs_of_arguments, with_left_out
from keras_mp.rebuild.quantized_policies import maps_with_defaults
from keras_mp.rebuild.walk import (
    LIBRARIES,
    Config,
    RebuildError,
    Rule,
    Walk,
    layers_by_path,
    package_of,
    treatments_of,
    value_on_host,
)


class Rewrite(NamedTuple):
    """How a config is rewritten."""

    rule: Rule  # the rule, as for `rebuild`
    layers: dict[int, keras.Operation]  # the live layers and operations, by id
    # names of the arguments that were read off layers without a config, by the layer's id
    kept: dict[int, tuple[str, ...]]


def rewrite(node: Any, how: Rewrite) -> Any:
    """Applies the rule innermost first."""
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
    """Puts back a policy that the config shortened."""
    if isinstance(layer, keras.layers.InputLayer) or not isinstance(layer, keras.layers.Layer):
        return node  # has a dtype or nothing, but no policy
    policy = layer.dtype_policy
    if node["config"].get("dtype") != policy.variable_dtype or policy.variable_dtype == policy.compute_dtype:
        return node
    return {**node, "config": {**node["config"], "dtype": keras.dtype_policies.serialize(policy)}}


def live_objects(model: keras.Model) -> dict[str, Any]:
    """Live lambdas and layers that a rewritten config names.

    As bytecode lambdas lose globals and closure, and Keras reads no activation from it.
    """
    layers = Walk(model).every
    lambdas = [value for layer in layers for value in vars(layer).values() if _is_lambda(value)]
    of_params = {_name_of_params(layer): _OfParams(layer) for layer in layers if _is_of_params(layer)}
    return {_lambda_name(value): value for value in lambdas} | of_params


def _is_lambda(value: Any) -> bool:
    return inspect.isfunction(value) and value.__name__ == "<lambda>"


def _lambda_name(function: Any) -> str:
    return f"lambda {id(function)}"


def _with_live_arguments(node: Config, layer: keras.Operation) -> Config:
    """Puts in lambdas, and the weights given to a JaxLayer."""
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
    """Makes a JaxLayer again whose weights were given to it."""

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


def unshare_across_graphs(node: Any, seen: set[int], copied: list[int]) -> Any:
    """Copies a layer that two functional graphs share.

    Functional models find a tensor by its number among the calls of a layer, and count from the layer's first call
    anywhere, so a layer that another graph already called gives them the wrong tensor.

    Args:
        seen: ids of the objects so far.
        copied: ids of the layers that are copied, to which more are added.
    """
    if isinstance(node, (list, tuple)):
        return type(node)(unshare_across_graphs(item, seen, copied) for item in node)
    if not isinstance(node, dict):
        return node
    key = node.get("shared_object_id")
    result = {name: unshare_across_graphs(value, seen, copied) for name, value in node.items()}
    if key in seen and "inbound_nodes" in node:
        del result["shared_object_id"]
        copied.append(key)
    if key is not None:
        seen.add(key)
    return result


def custom_objects_of(model: keras.Model) -> dict[str, Any]:
    """Classes and functions of a model outside Keras, by name."""
    custom_objects: dict[str, Any] = {}
    for layer in Walk(model).every:
        for value in [layer, *vars(layer).values()]:
            # Keras puts wrappers of a layer's methods, as of build, among its attributes.
            if inspect.ismethod(getattr(value, "__wrapped__", None)):
                continue
            for thing in [value] if inspect.isfunction(value) else type(value).__mro__:
                serializable = inspect.isfunction(thing) or hasattr(thing, "from_config")
                own = package_of(thing) not in LIBRARIES
                if serializable and (own or inspect.isfunction(thing)) and thing.__name__ != "<lambda>":
                    for name in (thing.__name__, keras.saving.get_registered_name(thing)):
                        custom_objects.setdefault(name, thing)
    return custom_objects


# From a live model to its config, and from a config to a model.


class _RecordsEverything(dict):
    """Makes Keras write the id of every object.

    It misses a layer that two Sequential models share, because they copy the config that it would mark.
    """

    def __contains__(self, key: object) -> bool:
        return True

    def __getitem__(self, key: object) -> Config:
        return {}


def serialize(model: keras.Layer) -> tuple[Config, dict[int, tuple[str, ...]]]:
    """Config of a model, and arguments read off layers."""
    try:
        return _serialize_as_is(model), {}
    except Exception:
        pass
    by_depth = sorted(layers_by_path(model).items(), key=lambda item: -item[0].count("/"))
    innermost_first = [layer for _, layer in by_depth]
    try:
        with configs_of_arguments([*innermost_first, model]) as kept:
            return _serialize_as_is(model), kept
    except Exception as error:
        path, layer = _first_that_fails(model, keras.saving.serialize_keras_object)
        raise RebuildError(
            f"layer {path!r} ({type(layer).__name__}) cannot be rebuilt, because it cannot be serialized: {error}. "
            f"Give {type(layer).__name__} a get_config() that returns the arguments of its __init__"
        ) from error


def _serialize_as_is(model: keras.Layer) -> Config:
    with warnings.catch_warnings(), ObjectSharingScope(), maps_with_defaults(model):
        global_state.set_global_attribute("shared_objects/id_to_config_map", _RecordsEverything())
        warnings.filterwarnings("ignore", message="(?s).*includes a `lambda`.*")  # it never leaves this process
        return keras.saving.serialize_keras_object(model)


def _first_that_fails(model: keras.Layer, check: Callable[[keras.Layer], Any]) -> tuple[str, keras.Layer]:
    # Deepest first: a parent fails too, because of its child.
    for path, layer in sorted(layers_by_path(model).items(), key=lambda item: -item[0].count("/")):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                check(layer)
        except Exception:
            return path, layer
    return model.name, model


def deserialize(config: Config, custom_objects: dict[str, Any], model: keras.Layer) -> keras.Layer:
    try:
        with warnings.catch_warnings(), ObjectSharingScope():
            warnings.filterwarnings("ignore", message=".*could not be built.*")  # the check of weights tells
            # safe_mode guards against code in foreign files; this config comes from the live model.
            return keras.saving.deserialize_keras_object(config, custom_objects=custom_objects, safe_mode=False)
    except Exception as error:

        def round_trip(layer: keras.Layer) -> None:
            serialized, kept = serialize(layer)
            layers = {id(inner): inner for inner in Walk(layer).every}
            config = rewrite(serialized, Rewrite(lambda node, _: node, layers, kept))
            keras.saving.deserialize_keras_object(config, custom_objects=custom_objects, safe_mode=False)

        path, layer = _first_that_fails(model, round_trip)
        # Keras wraps the cause once a level, each time with the whole config.
        cause = str(error).rpartition("Exception encountered: ")[2]
        raise RebuildError(
            f"layer {path!r} ({type(layer).__name__}) cannot be rebuilt from its config: {cause}. "
            f"{type(layer).__name__}.from_config(layer.get_config()) must work: return every argument of __init__ "
            "from get_config(), and let __init__ take **kwargs for the layer's name and dtype"
        ) from error
