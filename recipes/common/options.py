"""A command line made from a config: one option per dataclass field."""

import argparse
import dataclasses
import difflib
import types
import typing
from collections.abc import Sequence
from typing import Any, TypeVar

ConfigT = TypeVar("ConfigT")


def nearest(name: str, known: Sequence[str]) -> str:
    """Words the hint of an unknown name: the nearest known one, if one is near, and all that are known."""
    near = difflib.get_close_matches(name, known, n=1)
    return (f"did you mean {near[0]}? " if near else "") + f"Known: {', '.join(known)}"


def parse(config: ConfigT, arguments: Sequence[str], program: str, description: str) -> ConfigT:
    """Replaces fields of a config by what the command line says.

    A field `batch_size` is the option `--batch-size 64` or `--batch-size=64`; a boolean `export` is `--export` or
    `--no-export`. `--help` prints each field with its default and its text, and exits.

    Args:
        config: a dataclass instance, whose values are the defaults; each field is a bool, int, float or str, or one
            of these or None, and `Annotated` with its help text.
        arguments: the command line after the recipe's name.
        program: what the user typed before `arguments`, for the help.
        description: the text above the options in the help.

    Returns:
        A new config.

    Raises:
        ValueError: an option is unknown (names the nearest), lacks its value, or has one of the wrong type.
    """
    parser = argparse.ArgumentParser(
        prog=program, description=description, formatter_class=_Help, allow_abbrev=False, exit_on_error=False
    )
    hints = typing.get_type_hints(type(config), include_extras=True)
    for field in dataclasses.fields(config):  # type: ignore[arg-type]
        _add(parser, field.name, hints[field.name], getattr(config, field.name))
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


def _add(parser: argparse.ArgumentParser, name: str, hint: Any, default: Any) -> None:
    kind, text = typing.get_args(hint)
    if isinstance(kind, types.UnionType):
        kind = next(each for each in typing.get_args(kind) if each is not types.NoneType)
    option = "--" + name.replace("_", "-")
    if kind is bool:
        parser.add_argument(option, dest=name, action=argparse.BooleanOptionalAction, default=default, help=text)
    else:
        parser.add_argument(option, dest=name, type=kind, default=default, help=text, metavar=kind.__name__)
