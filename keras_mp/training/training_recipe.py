"""What a training recipe offers, checked before anything is trained.

A training recipe is a Python file with a function, called as the file, that returns its config, and `train(config)`:

    @dataclasses.dataclass(frozen=True)
    class Config:
        epochs: Annotated[int, "passes over the data"] = 10       # the option --epochs
        policy: str = "auto"                                      # bench sets it to each precision
        batch_size: int = 64                                      # inspect, audit and bench set it, when asked to

    def mine() -> Config: ...
    def train(config): ...        # may return something with `interrupted`, which is true where ctrl-C ended it early
    def step(config): ...         # for inspect, audit and bench: a compiled model and a batch (x, y), or its shapes
    def batches(config): ...      # for audit, may be left out: the training data, batches (x, y)
"""

import argparse
import dataclasses
import inspect
import types
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, TypeVar

from keras_mp.system.one_of import did_you_mean

WHAT = (
    "A training recipe is a Python file with a function of its own name, which returns its config, an instance of a "
    "dataclass, and a function train(config)"
)


@dataclasses.dataclass(frozen=True)
class TrainingRecipe:
    """The functions of a training recipe, each checked when it is called.

    Args:
        given: the text that the user wrote: a name, a path, or module:function.
        function: the name of the function that returns the config.

    Raises:
        ValueError: it has no such function or no `train`, or one takes other arguments; names the file, the function
            and what is right.
    """

    given: str
    module: ModuleType
    function: str

    def __post_init__(self) -> None:
        missing = [name for name in (self.function, "train") if not callable(getattr(self.module, name, None))]
        if missing:
            raise ValueError(
                f"{self.file} is no training recipe: it defines no function {' and no function '.join(missing)}. {WHAT}"
            )
        self._check_takes(self.function, ())
        self._check_takes("train", ("config",))

    @property
    def file(self) -> Path:
        """Where it is written."""
        return Path(str(self.module.__file__))

    def config(self, options: Sequence[str], program: str) -> Any:
        """Makes the config.

        Args:
            options: the command line after the training recipe; `--help` prints the options and exits.

        Returns:
            An instance of the training recipe's dataclass.

        Raises:
            ValueError: the function returns something else, a field has no type that an option can have, or an option
                is unknown or of a wrong value.
        """
        config = getattr(self.module, self.function)()
        if not dataclasses.is_dataclass(config) or isinstance(config, type):
            returned = f"the class {config.__name__} itself" if isinstance(config, type) else _a(config)
            raise ValueError(
                f"{self.file}: {self.function}() must return its config, an instance of a dataclass, whose fields are "
                f"the options of the command line; it returned {returned}"
            )
        try:
            return parse(config, options, program, self.module.__doc__ or "")
        except FieldError as error:
            raise ValueError(f"{self.file}: {error}") from None

    def train(self, config: Any) -> bool:
        """Trains.

        Returns:
            Whether ctrl-C ended it early. Of what the training recipe's `train` returns, only `interrupted` is read, so
            that a training is not lost for what its end returned, or did not.
        """
        return bool(getattr(self.module.train(config), "interrupted", False))

    def step(self, config: Any) -> tuple[Any, Any]:
        """Builds what the training recipe trains, without training.

        Returns:
            A compiled model, and a batch or its shapes.

        Raises:
            ValueError: the training recipe has no function `step(config)`, or it returns something else.
        """
        import keras  # here, because a config is made, and --help printed, without it

        right = "a compiled keras.Model and a batch, or its shapes: (model, (x, y))"
        made = self._optional("step", right)(config)
        if not isinstance(made, (tuple, list)) or len(made) != 2 or not isinstance(made[0], keras.Model):
            raise ValueError(f"{self.file}: step(config) must return {right}; it returned {_a(made)}")
        model, batch = made
        if not isinstance(batch, (tuple, list)) or len(batch) not in (2, 3):
            raise ValueError(
                f"{self.file}: the batch that step(config) returns beside its model must be (x, y) or "
                f"(x, y, sample_weight), arrays or keras.KerasTensor; it is {_a(batch)}"
            )
        return model, tuple(batch)

    def batches(self, config: Any) -> Any:
        """Reads the training data, without training.

        Returns:
            What the training recipe's function `batches` returns; None where it has no such function.

        Raises:
            ValueError: it returns None.
        """
        if not hasattr(self.module, "batches"):
            return None
        right = "the training data, batches (x, y) to iterate over"
        data = self._optional("batches", right)(config)
        if data is None:
            raise ValueError(f"{self.file}: batches(config) must return {right}; it returned None")
        return data

    def check_can_be_measured(self, config: Any) -> None:
        """Checks what a benchmark needs: a step, and a field `policy`, which it sets to each precision.

        Raises:
            ValueError: one is missing; names it.
        """
        self._optional("step", "a compiled keras.Model and a batch, or its shapes")
        if not hasattr(config, "policy"):
            raise ValueError(
                f"{self.file}: the config of {self.function}() has no field policy, which a benchmark sets to each "
                'precision: add policy: str = "auto", and have step(config) build the model in it'
            )

    def _optional(self, name: str, returns: str) -> Callable[[Any], Any]:
        if not callable(getattr(self.module, name, None)):
            raise ValueError(f"{self.file} defines no function {name}(config), which returns {returns}")
        self._check_takes(name, ("config",))
        return getattr(self.module, name)

    def _check_takes(self, name: str, arguments: tuple[str, ...]) -> None:
        signature = inspect.signature(getattr(self.module, name))
        try:
            signature.bind(*arguments)
        except TypeError:
            raise ValueError(
                f"{self.file}: {name}{signature} must be callable as {name}({', '.join(arguments)})"
            ) from None


def _a(value: Any) -> str:
    """A value in a word or two, for an error."""
    if value is None:
        return "None"
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)}: ({', '.join(type(item).__name__ for item in value)})"
    name = type(value).__name__
    return f"{'an' if name[0].lower() in 'aeio' else 'a'} {name}"


# A command line made from a config: one option per dataclass field.

ConfigT = TypeVar("ConfigT")

KINDS = (bool, int, float, str, Path)


class FieldError(ValueError):
    """A field of a config has a type that a command line option cannot have; the message lists those it can."""


def parse(config: ConfigT, arguments: Sequence[str], program: str, description: str) -> ConfigT:
    """Replaces fields of a config by what the command line says.

    A field `batch_size` is the option `--batch-size 64` or `--batch-size=64`; a boolean `export` is `--export` or
    `--no-export`. `--help` prints each field with its default and its text, and exits.

    Args:
        config: a dataclass instance, whose values are the defaults; each field is a bool, int, float, str or Path, or
            one of these or None, and may be `Annotated` with its help text.
        arguments: the command line after the training recipe.

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
        option, known = unknown[0].split("=")[0], list(parser._option_string_actions)
        raise ValueError(f"unknown option {option}.{did_you_mean(option, known)} Known: {', '.join(known)}.")
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
