"""Rewrite a model's serialized config by a rule, rebuild it, and carry its state over."""

from __future__ import annotations

import inspect
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np

# Private, because the public serializer duplicates a layer that two submodels share.
from keras.src.backend.common import global_state
from keras.src.saving.serialization_lib import ObjectSharingScope

from keras_mp import backend
from keras_mp.precision.policy import restored_policy
from keras_mp.rebuild.arguments import by_arguments, configs_of_arguments, with_left_out

# What `keras_mp.tensor_rules` leaves on a model, and no config holds.
RULES = "tensor_rules"

Config = dict[str, Any]
Rule = Callable[[Config, Any], Config]


class RebuildError(ValueError):
    """A model cannot be rebuilt; the message names the layer and the way out."""


class Rebuilt(NamedTuple):
    """What `rebuild` returns.

    Attributes:
        model: the new model.
        unreached: names of the weights, optimizer slots and compile arguments that were not carried over, a sentence
            each. Empty when everything arrived.
        unshared: names of layers that two functional graphs share and of which the new model has a copy in each: they
            compute the same but train apart. Keras cannot reload such a model either.
    """

    model: Any
    unreached: tuple[str, ...]
    unshared: tuple[str, ...] = ()


def rebuild(model: Any, rule: Rule, *, policy: Any = None, sample: Any = None, carry_compile: bool = True) -> Rebuilt:
    """Rebuild a model from its config after `rule` rewrote it; the original is left alone.

    Args:
        model: a built Keras model: functional, sequential, subclassed, nested, with shared layers.
        rule: `rule(node, layer) -> node`, called on every dict of the serialized config, innermost first. `layer` is
            the live layer (or operation of a functional graph) that the node describes, or None where it describes
            something else: a policy, an initializer, a part of a config. Returns the node itself or a replacement;
            must not change its argument.
        policy: the global dtype policy during the rebuild. Layers whose config says nothing of a dtype, and layers
            created inside custom layers, take it. The model's own policy by default.
        sample: a batch of inputs (any structure of arrays, batch first) that builds a subclassed model which cannot
            be built from its recorded input shapes.
        carry_compile: also compile the new model with the old one's arguments and carry its optimizer's state.

    Returns:
        `Rebuilt(model, unreached, unshared)`.

    Raises:
        RebuildError: the model is not built, a layer cannot be serialized or deserialized, or a weight changed shape.
    """
    if not is_built(model):
        raise RebuildError(
            f"model {model.name!r} is not built, so it has no weights to carry over: call it once on a batch, "
            "or model.build(input_shape)"
        )
    custom_objects = custom_objects_of(model) | _lambdas(model) | _of_params(model)
    layers = {id(layer): layer for layer in [*_with_self(model), *operations_of(model)]}
    serialized, kept = _serialize(model)
    config = _rewrite(serialized, _Rewrite(rule, layers, kept))
    config, copied = _unshare_across_graphs(config, set())
    with restored_policy():
        keras.config.set_dtype_policy(policy or model.dtype_policy)
        new = _deserialize(config, custom_objects, model)
        if sample is not None and not (new.built and len(new.weights) == len(model.weights)):
            new(sample, training=False)
    carried = _carry_state(model, new)
    unreached = list(carried.unreached)
    if carry_compile and getattr(model, "compiled", False):
        unreached += _carry_compile(model, new, carried.variables)
    return Rebuilt(new, tuple(unreached), tuple(layers[key].name for key in copied))


def is_built(model: Any) -> bool:
    """Whether a model has its weights; one that only trains models, and has no `call()`, is built when they are."""
    parts = children_of(model)
    return model.built or (has_no_call(model) and bool(parts) and all(part.built for part in parts))


def has_no_call(model: Any) -> bool:
    """Whether a model has no `call()`, because its `train_step()` calls the models in it, as that of a GAN does."""
    cls = getattr(model, "_original", type(model))  # the class that an extension, such as a stabilized one, extends
    return isinstance(model, keras.Model) and cls.call is keras.Model.call


def layers_by_path(model: Any) -> dict[str, Any]:
    """Every layer below `model`, depth first, by the `/`-joined names that lead to it; a shared layer appears once."""
    found: dict[str, Any] = {}
    seen: set[int] = set()

    def visit(layer: Any, path: str) -> None:
        for child in children_of(layer):
            if id(child) not in seen:
                seen.add(id(child))
                child_path = f"{path}/{child.name}" if path else child.name
                found[child_path] = child
                visit(child, child_path)

    visit(model, "")
    return found


def operations_of(model: Any) -> list[Any]:
    """The operations that are no layers, such as keras.ops.softmax, in the graphs of a model and its submodels."""
    found = [operation for layer in _with_self(model) for operation in getattr(layer, "operations", [])]
    return [operation for operation in found if not isinstance(operation, keras.layers.Layer)]


def _with_self(model: Any) -> list[Any]:
    return [model, *layers_by_path(model).values()]


def children_of(layer: Any) -> list[Any]:
    """The layers directly inside a layer; an operation has none."""
    if not isinstance(layer, keras.layers.Layer):
        return []
    # Private: composite layers have no public list of their sublayers, as models have in `Model.layers`, which is this.
    return layer._flatten_layers(include_self=False, recursive=False)


def layers_below(layer: Any) -> Iterator[Any]:
    """Yields every layer below another, depth first; a shared one as often as it is reached."""
    for child in children_of(layer):
        yield child
        yield from layers_below(child)


class _RecordsEverything(dict):
    """Makes Keras write the id of every object into its config, where it would mark only those it notices as shared.

    It misses a layer that two Sequential models share, because they copy the config that it would mark.
    """

    def __contains__(self, key: object) -> bool:
        return True

    def __getitem__(self, key: object) -> Config:
        return {}


def _serialize(model: Any) -> tuple[Config, dict[int, tuple[str, ...]]]:
    """The config of a model, and of its layers without one of their own the arguments that were read off them."""
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
        path, layer = _first_that_fails(model, lambda layer: keras.saving.serialize_keras_object(layer))
        raise RebuildError(
            f"layer {path!r} ({type(layer).__name__}) cannot be rebuilt, because it cannot be serialized: {error}. "
            f"Give {type(layer).__name__} a get_config() that returns the arguments of its __init__"
        ) from error


def _serialize_as_is(model: Any) -> Config:
    with warnings.catch_warnings(), ObjectSharingScope():
        global_state.set_global_attribute("shared_objects/id_to_config_map", _RecordsEverything())
        warnings.filterwarnings("ignore", message="(?s).*includes a `lambda`.*")  # it never leaves this process
        return keras.saving.serialize_keras_object(model)


def _first_that_fails(model: Any, check: Callable[[Any], Any]) -> tuple[str, Any]:
    # Deepest first: a parent fails too, because of its child.
    for path, layer in sorted(layers_by_path(model).items(), key=lambda item: -item[0].count("/")):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                check(layer)
        except Exception:
            return path, layer
    return model.name, model


def _deserialize(config: Config, custom_objects: dict[str, Any], model: Any) -> Any:
    try:
        with warnings.catch_warnings(), ObjectSharingScope():
            warnings.filterwarnings("ignore", message=".*could not be built.*")  # the check of weights tells
            # safe_mode guards against code in foreign files; this config comes from the live model.
            return keras.saving.deserialize_keras_object(config, custom_objects=custom_objects, safe_mode=False)
    except Exception as error:

        def round_trip(layer: Any) -> None:
            serialized, kept = _serialize(layer)
            layers = {id(each): each for each in _with_self(layer)}
            config = _rewrite(serialized, _Rewrite(lambda node, _: node, layers, kept))
            keras.saving.deserialize_keras_object(config, custom_objects=custom_objects, safe_mode=False)

        path, layer = _first_that_fails(model, round_trip)
        # Keras wraps the cause once a level, each time with the whole config.
        cause = str(error).rpartition("Exception encountered: ")[2]
        raise RebuildError(
            f"layer {path!r} ({type(layer).__name__}) cannot be rebuilt from its config: {cause}. "
            f"{type(layer).__name__}.from_config(layer.get_config()) must work: return every argument of __init__ "
            "from get_config(), and let __init__ take **kwargs for the layer's name and dtype"
        ) from error


class _Rewrite(NamedTuple):
    """How a config is rewritten.

    Attributes:
        rule: as for `rebuild`.
        layers: the live layers and operations, by id.
        kept: names of the arguments that were read off layers without a config, by the layer's id.
    """

    rule: Rule
    layers: dict[int, Any]
    kept: dict[int, tuple[str, ...]]


def _rewrite(node: Any, how: _Rewrite) -> Any:
    """Applies the rule innermost first, and prepares what Keras needs to build the result."""
    if isinstance(node, (list, tuple)):
        return type(node)(_rewrite(item, how) for item in node)
    if not isinstance(node, dict):
        return node
    layer = how.layers.get(node.get("shared_object_id", 0))
    if layer is None:  # something short-lived, whose id may have been used again
        ignored = {"shared_object_id"}
    else:
        node, ignored = _with_live_arguments(_with_policy(node, layer), layer), {"compile_config"}  # carried as objects
    if isinstance(layer, keras.layers.Layer):
        node = by_arguments(with_left_out(node, layer), type(layer), layer.name, how.kept.get(id(layer), ()))
    return how.rule({key: _rewrite(value, how) for key, value in node.items() if key not in ignored}, layer)


def _with_policy(node: Config, layer: Any) -> Config:
    """Puts back a policy that the layer's get_config() reduced to its variable dtype, as SpatialDropout's does."""
    if isinstance(layer, keras.layers.InputLayer) or not isinstance(layer, keras.layers.Layer):
        return node  # has a dtype or nothing, but no policy
    policy = layer.dtype_policy
    if node["config"].get("dtype") != policy.variable_dtype or policy.variable_dtype == policy.compute_dtype:
        return node
    return {**node, "config": {**node["config"], "dtype": keras.dtype_policies.serialize(policy)}}


def _lambdas(model: Any) -> dict[str, Any]:
    """The live functions of Lambda layers: as bytecode they would lose their globals and closure."""
    return {_lambda_name(layer): layer.function for layer in _with_self(model) if _is_lambda(layer)}


def _is_lambda(layer: Any) -> bool:
    return isinstance(layer, keras.layers.Lambda) and getattr(layer.function, "__name__", "") == "<lambda>"


def _lambda_name(layer: Any) -> str:
    return f"lambda of layer {id(layer)}"


def _with_live_arguments(node: Config, layer: Any) -> Config:
    """Puts in what a config does not hold: the function of a Lambda layer, the weights given to a JaxLayer."""
    if _is_lambda(layer):
        name = _lambda_name(layer)
        function = {"module": None, "class_name": "function", "config": name, "registered_name": name}
        return {**node, "config": {**node["config"], "function": function}}
    if _is_of_params(layer):
        return {**node, "module": None, "registered_name": _name_of_params(layer)}
    return node


class _OfParams:
    """Makes a JaxLayer again whose weights were given to it, which its config leaves out."""

    def __init__(self, layer: Any) -> None:
        self.layer = layer

    def from_config(self, config: Config) -> Any:
        import jax

        weights = {name: jax.tree_util.tree_map(_host, getattr(self.layer, name)) for name in ("params", "state")}
        return type(self.layer).from_config({**config, **weights})


def _is_of_params(layer: Any) -> bool:
    return isinstance(layer, keras.layers.JaxLayer) and layer.init_fn is None


def _name_of_params(layer: Any) -> str:
    return f"JaxLayer {id(layer)}"


def _of_params(model: Any) -> dict[str, Any]:
    return {_name_of_params(layer): _OfParams(layer) for layer in _with_self(model) if _is_of_params(layer)}


def _unshare_across_graphs(node: Any, seen: set[int]) -> tuple[Any, list[int]]:
    """Makes a layer of a functional graph that was created for another graph before a copy; returns which.

    Functional models find a tensor by its number among the calls of a layer, and count from the layer's first call
    anywhere, so a layer that another graph already called gives them the wrong tensor.
    """
    copied: list[int] = []
    if isinstance(node, (list, tuple)):
        items = [_unshare_across_graphs(item, seen) for item in node]
        return type(node)(item for item, _ in items), [key for _, keys in items for key in keys]
    if not isinstance(node, dict):
        return node, copied
    key = node.get("shared_object_id")
    result = {}
    for name, value in node.items():
        result[name], more = _unshare_across_graphs(value, seen)
        copied += more
    if key in seen and "inbound_nodes" in node:
        del result["shared_object_id"]
        copied.append(key)
    if key is not None:
        seen.add(key)
    return result, copied


def original_config(layer: Any, original: type) -> Config:
    """Serializes a layer whose class extends another as one of that class, for the config of the extension."""
    extended = type(layer)
    layer.__class__ = original  # Keras reads the class's name, module and constructor off the object
    try:
        config = with_left_out(keras.saving.serialize_keras_object(layer), layer)
        config = by_arguments(config, original, layer.name)
    finally:
        layer.__class__ = extended
    for key in ("compile_config", "shared_object_id"):  # those of the config around this one count
        config.pop(key, None)
    return config


def custom_objects_of(model: Any) -> dict[str, Any]:
    """Every class and function outside Keras that the live model uses, by the names its config may call it."""
    found: dict[str, Any] = {}
    for layer in _with_self(model):
        for value in [layer, *vars(layer).values()]:
            # Keras puts wrappers of a layer's methods, as of build, among its attributes.
            if inspect.ismethod(getattr(value, "__wrapped__", None)):
                continue
            for thing in [value] if inspect.isfunction(value) else type(value).__mro__:
                serializable = inspect.isfunction(thing) or hasattr(thing, "from_config")
                own = (thing.__module__ or "").partition(".")[0] not in ("keras", "keras_mp")
                if serializable and (own or inspect.isfunction(thing)) and thing.__name__ != "<lambda>":
                    for name in (thing.__name__, keras.saving.get_registered_name(thing)):
                        found.setdefault(name, thing)
    return found


class _Carried(NamedTuple):
    variables: dict[int, Any]  # id of the old variable -> the new variable
    unreached: list[str]


def _carry_state(old: Any, new: Any) -> _Carried:
    variables: dict[int, Any] = {}
    arrived: set[int] = set()
    for path, old_layer, new_layer in _pairs(old, new, old.name, set()):
        if has_no_call(new_layer):
            new_layer.built = old_layer.built
        if not new_layer.built and old_layer.built and old_layer.weights and not _build_as(old_layer, new_layer):
            raise RebuildError(
                f"layer {path!r} ({type(new_layer).__name__}) was not built by rebuilding {old.name!r}: pass a batch "
                "of inputs (verify= or sample=), or give the model a build_from_config() that builds it"
            )
        if hasattr(old_layer, RULES):
            setattr(new_layer, RULES, getattr(old_layer, RULES))
        if new_layer.trainable != old_layer.trainable:
            new_layer.trainable = old_layer.trainable
        pairs = _carry_layer(path, old_layer, new_layer)
        variables |= {id(old_variable): new_variable for old_variable, new_variable in pairs}
        arrived |= {id(new_variable) for _, new_variable in pairs}
    lost = [
        f"weight {v.path!r} of the original has no place in the new model"
        for v in old.weights
        if id(v) not in variables and not _is_fp8_state(v)
    ]
    fresh = [
        f"weight {v.path!r} of the new model still has its initial value"
        for v in new.weights
        if id(v) not in arrived and not _is_fp8_state(v)
    ]
    return _Carried(variables, lost + fresh)


def _build_as(old: Any, new: Any) -> bool:
    """Builds a layer for the shapes that another was built for, if that other knows them."""
    shapes = old.get_build_config()
    if not shapes:
        return False
    new._parent_path = old._parent_path  # private, and what Keras names weights by
    new.build_from_config(shapes)
    return len(own_variables(new)) == len(own_variables(old))


def _is_fp8_state(variable: Any) -> bool:
    # Keras marks scales and amax histories so; they mean nothing outside the FP8 layer that made them.
    return bool(getattr(variable, "overwrite_with_gradient", False))


def _pairs(old: Any, new: Any, path: str, seen: set[tuple[int, int]]) -> Iterator[tuple[str, Any, Any]]:
    """Walks two models side by side: by name where names agree, else (automatic names) in order."""
    if (id(old), id(new)) in seen:
        return
    seen.add((id(old), id(new)))
    yield path, old, new
    olds, news = children_of(old), children_of(new)
    by_name = {layer.name: layer for layer in news}
    if {layer.name for layer in olds} <= by_name.keys():
        couples = [(layer, by_name[layer.name]) for layer in olds]
    else:
        couples = list(zip(olds, news, strict=False))  # what is left over is reported as unreached
    for old_child, new_child in couples:
        yield from _pairs(old_child, new_child, f"{path}/{old_child.name}", seen)


def _carry_layer(path: str, old: Any, new: Any) -> list[tuple[Any, Any]]:
    pairs = _pair_variables(own_variables(old), own_variables(new))
    if isinstance(new, type(old)) and len(pairs) == len(own_variables(old)) == len(own_variables(new)):
        # The layer's own way first: custom layers keep more than variables there, and Normalization recomputes from it.
        store: dict[str, Any] = {}
        old.save_own_variables(store)
        new.load_own_variables(store)
    for old_variable, new_variable in pairs:
        if _is_fp8_state(new_variable) and isinstance(new, type(old)):
            continue  # its layer has carried over what fits
        if tuple(old_variable.shape) != tuple(new_variable.shape):
            raise RebuildError(
                f"weight {old_variable.name!r} of layer {path!r} has shape {tuple(old_variable.shape)}, "
                f"rebuilt {tuple(new_variable.shape)}: the layer's config does not describe what it built"
            )
        _copy(old_variable, new_variable)
    if hasattr(old, "save_assets") and hasattr(new, "load_assets"):
        with tempfile.TemporaryDirectory() as folder:
            old.save_assets(folder)
            if any(Path(folder).iterdir()):
                new.load_assets(folder)
    return pairs


def _copy(old: Any, new: Any) -> None:
    # A real copy: on JAX assigning would share the buffer, which training one of the two models donates and deletes.
    # By way of the host, because the two may lie on different devices.
    new.assign(_host(old))


def _host(variable: Any) -> Any:
    return np.array(backend.to_numpy(variable))


def own_variables(layer: Any) -> list[Any]:
    """The layer's variables, seed state included, without those of its sublayers."""
    inner = {id(variable) for child in children_of(layer) for variable in child.variables}
    return [variable for variable in layer.variables if id(variable) not in inner]


def _pair_variables(olds: list[Any], news: list[Any]) -> list[tuple[Any, Any]]:
    """Pairs by name, the nth of several with one name with the nth; the rest (automatic names) in order."""
    waiting: dict[str, list[Any]] = {}
    for variable in news:
        waiting.setdefault(variable.name, []).append(variable)
    pairs = [(variable, waiting[variable.name].pop(0)) for variable in olds if waiting.get(variable.name)]
    paired = {id(variable) for pair in pairs for variable in pair}
    rest = [[variable for variable in side if id(variable) not in paired] for side in (olds, news)]
    if [tuple(variable.shape) for variable in rest[0]] == [tuple(variable.shape) for variable in rest[1]]:
        pairs += zip(*rest, strict=True)
    return pairs


def _carry_compile(old: Any, new: Any, variables: dict[int, Any]) -> list[str]:
    own_compile = type(old).compile is not keras.Model.compile
    config = old.get_compile_config() if own_compile else None
    if config and type(old).compile_from_config is not keras.Model.compile_from_config:
        new.compile_from_config(config)
    elif own_compile:
        arguments = _kept_compile_arguments(old)
        if arguments is None:
            name = type(old).__name__
            return [
                f"compile arguments: {name} overrides compile() without get_compile_config() and "
                "compile_from_config(), and keeps not every argument as an attribute; compile the new model yourself"
            ]
        new.compile(**keras.tree.map_structure(_fresh, arguments))
        scaler = keras.optimizers.LossScaleOptimizer
        if isinstance(new.optimizer, scaler) and not isinstance(old.optimizer, scaler):
            new.optimizer = new.optimizer.inner_optimizer  # auto_scale_loss=False, which Keras does not keep
    else:
        # Private, because the public get_compile_config() is already serialized and loses what is not registered.
        arguments = keras.tree.map_structure(_fresh, dict(old._compile_config.config))
        if old.dtype_policy.name == "mixed_float16" and not isinstance(
            old.optimizer, keras.optimizers.LossScaleOptimizer
        ):
            arguments["auto_scale_loss"] = False  # asked for, but not among the arguments that Keras keeps
        new.compile(**arguments)
    lost: list[str] = []
    for name, old_optimizer, new_optimizer in _optimizers(old, new):
        if not old_optimizer.built:
            continue
        trained = getattr(old_optimizer, "inner_optimizer", old_optimizer)._trainable_variables
        ours = [variables[id(weight)] for weight in trained if id(weight) in variables]
        new_optimizer.build(new.trainable_variables if name == "optimizer" else ours)
        lost += _carry_optimizer(
            _unwrapped(old_optimizer, new_optimizer), _unwrapped(new_optimizer, old_optimizer), variables
        )
    return lost


def _kept_compile_arguments(model: Any) -> Config | None:
    """The arguments that a `compile()` of the model's own was called with, if the model still has each.

    Those that it hands on to Keras's are with Keras; the rest are attributes of the same name, where the usual
    `self.d_optimizer = d_optimizer` keeps them.
    """
    handed_on = dict(model._compile_config.config)
    _, *parameters = inspect.signature(type(model).compile).parameters.values()
    named = {each.name for each in parameters}
    arguments: Config = {}
    for each in parameters:
        if each.kind is each.VAR_KEYWORD:
            arguments |= {name: value for name, value in handed_on.items() if name not in named}
        elif each.name in handed_on:
            arguments[each.name] = handed_on[each.name]
        elif hasattr(model, each.name) and each.kind is not each.VAR_POSITIONAL:
            arguments[each.name] = getattr(model, each.name)
        else:
            return None
    return arguments


def _fresh(value: Any) -> Any:
    # Metrics and optimizers hold state, so two models must not share one; losses and functions hold none.
    stateful = (keras.metrics.Metric, keras.optimizers.Optimizer)
    return type(value).from_config(value.get_config()) if isinstance(value, stateful) else value


def _optimizers(old: Any, new: Any) -> Iterator[tuple[str, Any, Any]]:
    """The optimizers of two models, such as a GAN's two, side by side, by the attributes that hold them."""
    seen: set[int] = set()
    for name in ("optimizer", *vars(old)):
        pair = (getattr(old, name, None), getattr(new, name, None))
        if all(isinstance(each, keras.optimizers.Optimizer) for each in pair) and id(pair[0]) not in seen:
            seen.add(id(pair[0]))
            yield (name, *pair)


def _unwrapped(optimizer: Any, other: Any) -> Any:
    """The inner optimizer where only one of the two is a loss-scaling wrapper."""
    wrapper = keras.optimizers.LossScaleOptimizer
    return optimizer.inner_optimizer if isinstance(optimizer, wrapper) and not isinstance(other, wrapper) else optimizer


def _carry_optimizer(old: Any, new: Any, variables: dict[int, Any]) -> list[str]:
    """Copies optimizer state; slots follow their weight, whatever its place in the new model's order."""
    reached = _copy_optimizer(old, new, variables)
    return [f"optimizer variable {v.path!r} was not carried over" for v in old.variables if id(v) not in reached]


def _copy_optimizer(old: Any, new: Any, variables: dict[int, Any]) -> set[int]:
    reached: set[int] = set()

    def copy(old_variable: Any, new_variable: Any) -> None:
        if new_variable is not None and tuple(old_variable.shape) == tuple(new_variable.shape):
            _copy(old_variable, new_variable)
            reached.add(id(old_variable))

    # Private, because optimizers publish their variables only as one flat list. A slot is kept in a list with a place
    # for each weight, in the order of `_trainable_variables`.
    old_weights = list(old._trainable_variables)
    place = {id(variable): index for index, variable in enumerate(new._trainable_variables)}
    for name, value in vars(old).items():
        other = getattr(new, name, None)
        if isinstance(value, keras.Variable):
            copy(value, other)
        elif isinstance(value, keras.optimizers.Optimizer):
            reached |= _copy_optimizer(value, other, variables)
        elif isinstance(value, (list, tuple)) and isinstance(other, (list, tuple)) and name != "_trainable_variables":
            if any(isinstance(item, keras.optimizers.Optimizer) for item in value):
                for old_inner, new_inner in zip(value, other, strict=True):
                    reached |= _copy_optimizer(old_inner, new_inner, variables)
            elif name != "_variables" and len(value) == len(old_weights) and len(other) == len(place):
                for weight, slot in zip(old_weights, value, strict=True):
                    index = place.get(id(variables.get(id(weight))))
                    if isinstance(slot, keras.Variable) and index is not None:
                        copy(slot, other[index])
    return reached
