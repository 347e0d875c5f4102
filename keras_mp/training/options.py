"""A command line made from a config: one option per dataclass field."""

import argparse
import dataclasses
import difflib
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

ConfigT = TypeVar("ConfigT")

KINDS = (bool, int, float, str, Path)


class FieldError(ValueError):
    """A field of a config has a type that a command line option cannot have; the message lists those it can."""


def nearest(name: str, known: Sequence[str]) -> str:
    """Words the hint of an unknown name: the nearest known one, if one is near, and all that are known."""
    near = difflib.get_close_matches(name, known, n=1)
    return (f"did you mean {near[0]}? " if near else "") + f"Known: {', '.join(known)}"


def parse(config: ConfigT, arguments: Sequence[str], program: str, description: str) -> ConfigT:
    """Replaces fields of a config by what the command line says.

    A field `batch_size` is the option `--batch-size 64` or `--batch-size=64`; a boolean `export` is `--export` or
    `--no-export`. `--help` prints each field with its default and its text, and exits.

    Args:
        config: a dataclass instance, whose values are the defaults; each field is a bool, int, float, str or Path, or
            one of these or None, and may be `Annotated` with its help text.
        arguments: the command line after the training recipe.
        program: what the user typed before `arguments`, for the help.
        description: the text above the options in the help.

    Returns:
        A new config.

    Raises:
        FieldError: a field is of another type.
        ValueError: an option is unknown (names the nearest), lacks its value, or has one of the wrong type.
    """
    parser = argparse.ArgumentParser(
        prog=program, description=description, formatter_class=_Help, allow_abbrev=False, exit_on_error=False
    )
    hints = _type_hints(type(config))
    for field in dataclasses.fields(config):  # type: ignore[arg-type]
        if field.init:
            kind, text = _kind_and_text(hints[field.name], f"{type(config).__name__}.{field.name}")
            _add(parser, field.name, kind, text, getattr(config, field.name))
    try:
        values, unknown = parser.parse_known_args(list(arguments))
    except argparse.ArgumentError as error:
        raise ValueError(str(error)) from None
    if unknown:
        option = unknown[0].split("=")[0]
        raise ValueError(f"unknown option {option}: {nearest(option, list(parser._option_string_actions))}")
    return dataclasses.replace(config, **vars(values))  # type: ignore[type-var]


class _Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows the defaults, and the description as it is."""


def _type_hints(config_class: type) -> dict[str, Any]:
    try:
        return typing.get_type_hints(config_class, include_extras=True)
    except NameError as error:
        raise FieldError(f"the type of a field of {config_class.__name__} is not known: {error}") from None


def _kind_and_text(hint: Any, field: str) -> tuple[type, str]:
    """The type of a field's values, and its help text."""
    text = ""
    if typing.get_origin(hint) is Annotated:
        hint, *notes = typing.get_args(hint)
        text = next((note for note in notes if isinstance(note, str)), "")
    choices = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    kinds = [choice for choice in choices if choice is not types.NoneType]
    if len(kinds) != 1 or kinds[0] not in KINDS:
        named = hint.__name__ if isinstance(hint, type) else hint
        raise FieldError(
            f"{field} has the type {named}, which is no option of a command line: a field is a bool, int, float, str "
            "or Path, or one of these or None"
        )
    return kinds[0], text


def _add(parser: argparse.ArgumentParser, name: str, kind: type, text: str, default: Any) -> None:
    option = "--" + name.replace("_", "-")
    text = text or "default: %(default)s"  # argparse adds the default to a text only
    if kind is bool:
        parser.add_argument(option, dest=name, action=argparse.BooleanOptionalAction, default=default, help=text)
    else:
        parser.add_argument(option, dest=name, type=kind, default=default, help=text, metavar=kind.__name__)
