"""A step of a model that a function builds, with the options of a command line."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import keras

from keras_mp import backend
from keras_mp.cli.training_recipe import parse
from keras_mp.conversion.model_file import shapes_of_step
from keras_mp.lean.chunked_head import calls_behind
from keras_mp.lean.chunked_loss import ChunkedCrossEntropy
from keras_mp.precision.policy import set_global_policy


def step_of_function(
    given: str, build: Callable[..., Any], options: Sequence[str], batch_size: int, length: int | None = None
) -> tuple[Any, tuple[Any, Any], bool]:
    """Builds a model and a batch's shapes.

    Args:
        given: the text that the user wrote: module:function.
        build: the function that builds the model. Its arguments of a type that an option can have are the options,
            besides `--policy`, the dtype policy, by default "auto". A lean model with a vocabulary that it does not
            compile gets AdamW and `ChunkedCrossEntropy`.
        options: the command line after the function.
        batch_size: the number of samples.
        length: the option --length: an argument of the function, or else the size of what the model leaves open, as for
            `shapes_of_step`.

    Returns:
        (model, (x, y), whether the model is compiled for training).

    Raises:
        ValueError: an argument has no default, the function returns no model, or as `shapes_of_step`.
    """
    if length is not None and "length" in inspect.signature(build).parameters:
        options, length = [*options, "--length", str(length)], None
    config = parse(_options(given, build), options, f"keras-mp inspect {given}", inspect.getdoc(build) or "")
    if "policy" not in inspect.signature(build).parameters:
        set_global_policy(config.pop("policy"))
    taken = (
        f"{given} is taken for a function that builds a model, as its module defines no train(config), which a "
        "training recipe has"
    )
    try:
        inspect.signature(build).bind(**config)
    except TypeError as error:
        raise ValueError(f"{taken}: {error}") from error
    with backend.no_allocation():
        model = build(**config)
        if not isinstance(model, keras.Model):
            raise ValueError(f"{taken}: build() must return a keras.Model, got {type(model).__name__}")
        if calls_behind(model) is not None and not model.compiled:
            model.compile(keras.optimizers.AdamW(), ChunkedCrossEntropy(), jit_compile=True)
    trains = bool(model.compiled and model.optimizer is not None)
    return model, shapes_of_step(model, batch_size, length, trains, "call keras_mp.inspect(build, batch)"), trains


def _options(given: str, build: Callable[..., Any]) -> list[tuple[str, Any, Any]]:
    """Lists arguments that can be options: name, type and default."""
    try:
        hints = typing.get_type_hints(build)
    except NameError:  # of a type that is imported for type checkers alone
        hints = {}
    parameters = inspect.signature(build).parameters
    options: list[tuple[str, Any, Any]] = [] if "policy" in parameters else [("policy", str, "auto")]
    for name, parameter in parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if parameter.default is parameter.empty:
            raise ValueError(f"{given} cannot be built: its argument {name} has no default")
        hint = hints.get(name, type(parameter.default))
        kinds = [kind for kind in (hint, *typing.get_args(hint)) if kind in (bool, int, float, str, Path)]
        if len(kinds) == 1 and isinstance(parameter.default, (*kinds, type(None))):
            options.append((name, kinds[0], parameter.default))
    return options
