"""The float32 model that a model is judged against."""

from __future__ import annotations

from typing import Any

import keras

from keras_mp.conversion.to_float32 import to_float32
from keras_mp.rebuild import RebuildError, layers_by_path, rebuild


def in_float32(model: keras.Model, x: Any) -> keras.Model:
    """A model that computes in float32, with the weights and the loss of another.

    Args:
        model: a built Keras model in any precision.
        x: a batch of inputs, which builds a subclassed model.

    Returns:
        The model itself where it computes in float32 throughout, otherwise a new one.

    Raises:
        RebuildError: it has a layer that cannot be rebuilt; the message names it.
    """
    return model if computes_in_float32(model) else copy_of(model, x, to_float32)


def computes_in_float32(model: keras.Model) -> bool:
    """Whether every layer of a model computes in float32."""
    return all(layer.compute_dtype == "float32" for layer in [model, *layers_by_path(model).values()])


def copy_of(model: keras.Model, x: Any, rule: Any, policy: str | None = "float32") -> keras.Model:
    """A new model with the same weights and the same loss, and without the optimizer's state.

    Args:
        model: a built Keras model.
        x: a batch of inputs.
        rule: as for `keras_mp.rebuild.rebuild`.
        policy: the global policy during the rebuild; None for the model's own.

    Raises:
        RebuildError: as `rebuild`, or a weight could not be carried over.
    """
    # A class that says how it is compiled again may keep more than a loss for its compute_loss.
    own_config = type(model).compile_from_config is not keras.Model.compile_from_config
    new, unreached, _ = rebuild(model, rule, policy=policy, sample=x, carry_compile=own_config)
    weights = [sentence for sentence in unreached if not sentence.startswith("optimizer variable")]
    if weights:
        raise RebuildError(f"model {model.name!r} could not be rebuilt: {'; '.join(weights)}")
    if getattr(model, "compiled", False) and not own_config:
        _carry_loss(model, new)
    return new


def _carry_loss(old: Any, new: Any) -> None:
    """Compiles with only the old model's loss, past a compile() of its class that requires more."""
    # Private, because the public get_compile_config() is serialized and loses what is not registered.
    arguments = old._compile_config.config
    keras.Model.compile(
        new, "sgd", loss=arguments["loss"], loss_weights=arguments["loss_weights"], auto_scale_loss=False
    )
    if type(old).compile is not keras.Model.compile:
        # What such a compile() puts beside the loss, a compute_loss of the class may read.
        for name in vars(old).keys() - vars(new).keys():
            setattr(new, name, vars(old)[name])
