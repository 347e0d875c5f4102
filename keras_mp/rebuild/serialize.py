"""From a live model to its config, and from a config to a model."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import keras

# Private, because the public serializer duplicates a layer that two submodels share.
from keras.src.backend.common import global_state
from keras.src.saving.serialization_lib import ObjectSharingScope

from keras_mp.rebuild.arguments import configs_of_arguments
from keras_mp.rebuild.config import Rewrite, rewrite
from keras_mp.rebuild.quantized_policies import maps_with_defaults
from keras_mp.rebuild.rule import Config, RebuildError
from keras_mp.rebuild.walk import layers_by_path, with_self


class _RecordsEverything(dict):
    """Makes Keras write the id of every object into its config, where it would mark only those it notices as shared.

    It misses a layer that two Sequential models share, because they copy the config that it would mark.
    """

    def __contains__(self, key: object) -> bool:
        return True

    def __getitem__(self, key: object) -> Config:
        return {}


def serialize(model: keras.Layer) -> tuple[Config, dict[int, tuple[str, ...]]]:
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
            layers = {id(inner): inner for inner in with_self(layer)}
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
