"""Training recipes: where they are, what they offer, and how they are run.

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

import ast
import dataclasses
import importlib
import importlib.util
import inspect
import logging
import os
import sys
import textwrap
import typing
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import typer

from keras_mp.parallel.cluster import find_cluster
from keras_mp.system.argument_checks import did_you_mean
from keras_mp.system.quiet_import import import_keras

FOLDER = Path("recipes")
WHAT = (
    "A training recipe is a Python file with a function of its own name, which returns its config, an instance of a "
    "dataclass, and a function train(config)"
)
WHERE = "keras-mp's own are in the folder recipes/ of its repository, and are run from a clone of it"


@dataclasses.dataclass(frozen=True)
class TrainingRecipe:
    """The functions of a training recipe.

    Raises:
        ValueError: it has no such function or no `train`; names the file, the function and what is right.
    """

    given: str  # what the user wrote: a name, a path, or module:function
    module: ModuleType
    function: str  # the name of the function that returns the config

    def __post_init__(self) -> None:
        missing = [name for name in (self.function, "train") if not callable(getattr(self.module, name, None))]
        if missing:
            raise ValueError(
                f"{self.file} is no training recipe: it defines no function {' and no function '.join(missing)}. {WHAT}"
            )

    @property
    def file(self) -> Path:
        """Where it is written."""
        return Path(str(self.module.__file__))

    def config(self, options: Sequence[str], program: str) -> Any:
        """Makes the config, an instance of the recipe's dataclass.

        Args:
            options: the command line after the training recipe; see `parse`.

        Raises:
            ValueError: the function returns something else.
        """
        config = getattr(self.module, self.function)()
        if not dataclasses.is_dataclass(config) or isinstance(config, type):
            raise ValueError(
                f"{self.file}: {self.function}() must return its config, an instance of a dataclass, whose fields are "
                f"the options of the command line; it returned {_short(config)}"
            )
        hints = typing.get_type_hints(type(config), include_extras=True)
        fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(config) if field.init}
        known = [(name, hints[name], default) for name, default in fields.items()]
        return dataclasses.replace(config, **parse(known, options, program, self.module.__doc__ or ""))

    def train(self, config: Any) -> bool:
        """Trains; returns whether ctrl-C ended it early.

        Of what the training recipe's `train` returns, only `interrupted` is read, so that a training is not lost for
        what its end returned, or did not.
        """
        return bool(getattr(self.module.train(config), "interrupted", False))

    def step(self, config: Any) -> tuple[Any, Any]:
        """Builds a compiled model and a batch, or its shapes.

        Raises:
            ValueError: the training recipe has no function `step(config)`, or it returns something else.
        """
        import keras  # here, because a config is made, and --help printed, without it

        self._check_has_step()
        made = self.module.step(config)
        right = isinstance(made, (tuple, list)) and len(made) == 2 and isinstance(made[0], keras.Model)
        if not right or not isinstance(made[1], (tuple, list)) or len(made[1]) not in (2, 3):
            raise ValueError(
                f"{self.file}: step(config) must return a compiled keras.Model and a batch, (model, (x, y)) or (model, "
                f"(x, y, sample_weight)), of arrays or keras.KerasTensor; it returned {_short(made)}"
            )
        return made[0], tuple(made[1])

    def check_can_be_measured(self, config: Any) -> None:
        """Checks that a benchmark can set a step's policy."""
        self._check_has_step()
        if not hasattr(config, "policy"):
            raise ValueError(
                f"{self.file}: the config of {self.function}() has no field policy, which a benchmark sets to each "
                'precision: add policy: str = "auto", and have step(config) build the model in it'
            )

    def _check_has_step(self) -> None:
        if not hasattr(self.module, "step"):
            raise ValueError(
                f"{self.file} defines no function step(config), which returns a compiled keras.Model and a batch"
            )

    def batches(self, config: Any) -> Any:
        """Reads the training data; None without a function `batches`.

        Raises:
            ValueError: `batches` returns None.
        """
        if not hasattr(self.module, "batches"):
            return None
        data = self.module.batches(config)
        if data is None:
            raise ValueError(
                f"{self.file}: batches(config) must return the training data, batches (x, y) to iterate over; it "
                "returned None"
            )
        return data


def _short(value: Any) -> str:
    """A value in a line, for an error."""
    return textwrap.shorten(repr(value), 120)


def parse(
    options: Iterable[tuple[str, Any, Any]], arguments: Sequence[str], program: str, description: str
) -> dict[str, Any]:
    """Reads a command line by typer, as `keras-mp` does.

    `--help` prints each option with its default and its text, and ends the command.

    Args:
        options: the name, the type, which may be `Annotated` with a help text, and the default of each option.
        arguments: the command line after the training recipe.
    """

    def command(**values: Any) -> dict[str, Any]:
        return values

    parameters = []
    for name, hint, default in options:
        kind, *notes = typing.get_args(hint) if typing.get_origin(hint) is Annotated else (hint,)
        text = next((note for note in notes if isinstance(note, str)), None)
        hint = Annotated[kind, typer.Option(help=text)]
        parameters.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint))
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    # "\b": paragraphs are shown as they are.
    app.command(help="\b\n" + description.replace("\n\n", "\n\n\b\n"))(command)
    values = app(list(arguments), prog_name=program, standalone_mode=False)
    if values == 0:  # --help was printed
        raise typer.Exit
    return values


def find_recipe(given: str) -> TrainingRecipe:
    """Finds a training recipe and imports it.

    Args:
        given: the path of its file, `"mine/wide.py"`; or `"module:function"`, where `function` returns the config and
            `train` is in the same module (the path of a file may stand for the module); or a bare name, `"digits"`,
            for the file `digits.py` of the folder `recipes` in the current one.

    Raises:
        FileNotFoundError, ModuleNotFoundError: there is no such file or module.
        ValueError: there is no training recipe of that name, or the file is none; says what is right.
    """
    place, colon, function = given.rpartition(":")
    if given.endswith(".py"):
        return TrainingRecipe(given, _module(given, given), Path(given).stem)
    if colon:
        if not place or not function:
            raise ValueError(f"training recipe {given!r} must have a name on both sides of the colon: module:function")
        return TrainingRecipe(given, _module(place, given), function)
    path = FOLDER / f"{given}.py"
    if path.is_file():
        return TrainingRecipe(given, import_file(path), given)
    if known := list(recipes_in()):
        raise ValueError(
            f"unknown training recipe {given!r}.{did_you_mean(given, known)} Known: {', '.join(known)}; "
            "or the path of a .py file, or module:function"
        )
    raise ValueError(
        f"unknown training recipe {given!r}: there is no file {str(FOLDER.absolute() / given)}.py. {WHAT}. {WHERE}; "
        "your own is given as the path of its file, or as module:function"
    )


def find_model_function(given: str) -> Callable[..., Any] | None:
    """Finds a function that builds a model, by `"module:function"`.

    Returns:
        The function; None where its module defines `train`, as a recipe does, and for anything else that is given.

    Raises:
        FileNotFoundError, ModuleNotFoundError: there is no such file or module.
    """
    place, _, function = given.rpartition(":")
    if not place or not function or given.endswith(".py"):
        return None
    module = _module(place, given)
    build = getattr(module, function, None)
    return build if callable(build) and not hasattr(module, "train") else None


def recipes_in() -> dict[str, str]:
    """Lists the recipes of `recipes/`, each with a line.

    A file that is no Python is left out: it says what is wrong with it when it is run.
    """
    recipes = {}
    for path in sorted(FOLDER.glob("*.py")):
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):
            continue
        if any(isinstance(node, ast.FunctionDef) and node.name == path.stem for node in tree.body):
            recipes[path.stem] = (ast.get_docstring(tree) or "").split("\n")[0]
    return recipes


def import_file(path: Path) -> ModuleType:
    """Imports a Python file, beside which others can be imported."""
    path = path.resolve()
    parts, root = [path.stem], path.parent
    while (root / "__init__.py").is_file():
        parts, root = [root.name, *parts], root.parent
    name = ".".join(parts)
    if str(root) not in (os.path.realpath(folder) for folder in sys.path):
        sys.path.append(str(root))
    importlib.invalidate_caches()  # the file may be younger than what is known of its folder
    try:
        specification = importlib.util.find_spec(name)
    except (ImportError, ValueError):  # another package of that name, or the program that runs
        specification = None
    if specification is not None and specification.origin and Path(specification.origin).resolve() == path:
        return importlib.import_module(name)
    specification = importlib.util.spec_from_file_location(f"recipe_{path.stem}", path)
    assert specification is not None and specification.loader is not None, "a .py file always has a loader"
    module = importlib.util.module_from_spec(specification)
    # Dataclasses and Keras's serialization look a class's module up by its name.
    sys.modules[module.__name__] = module
    try:
        specification.loader.exec_module(module)
    except BaseException:
        del sys.modules[module.__name__]
        raise
    return module


def _module(place: str, given: str) -> ModuleType:
    if place.endswith(".py"):
        if not Path(place).is_file():
            raise FileNotFoundError(f"there is no training recipe {place!r}: no such file. {WHAT}. {WHERE}")
        return import_file(Path(place))
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{place}.".startswith(f"{error.name}."):
            raise  # of something that the module imports
        raise ModuleNotFoundError(
            f"no training recipe {given!r}: there is no module {error.name!r}", name=place
        ) from None


def run_recipe(arguments: Sequence[str]) -> int:
    """Trains as a command line says; returns the exit status.

    Args:
        arguments: the name of the training recipe, then its options: `["digits", "--epochs", "3"]`; none, or `--help`,
            lists them all.
    """
    # absl writes pages about folders before the first line of ours.
    logging.getLogger("absl").setLevel(logging.ERROR)
    if not arguments or arguments[0] in ("-h", "--help"):
        known = recipes_in() or {"": f"none in {str(FOLDER.absolute())!r}: {WHERE}"}
        print("usage: keras-mp train TRAINING_RECIPE [--help] [--option value ...]\n")
        print("  keras-mp train digits --epochs 3\n")
        print("training recipes:")
        for name, text in known.items():
            print(f"  {name:<20} {text}")
        print("  path/to/mine.py      a file of yours, with a function of its own name and train(config)")
        print("  module:function      a function that returns the config; train(config) is in the same module")
        return 0
    try:
        import_keras()
        from keras_mp.parallel.workers import join  # not above, because it imports Keras

        recipe = find_recipe(arguments[0])
        config = recipe.config(arguments[1:], f"keras-mp train {arguments[0]}")
        cluster = find_cluster(getattr(config, "hosts", None), getattr(config, "host_index", None))
        own = {name: value for name, value in vars(config).items() if name not in ("hosts", "host_index", "output")}
        # Processes that train together are joined before TensorFlow or JAX compute anything.
        with join(cluster, {"recipe": recipe.given, **own}):
            return 130 if recipe.train(config) else 0
    except KeyboardInterrupt:
        print("stopped at once: only the finished files of the run are kept", file=sys.stderr)
        return 130


def timed_step(arguments: Sequence[str], precision: str, batch_size: int | None = None) -> Any:
    """Step of a recipe on random numbers, to be timed.

    Args:
        arguments: the training recipe, then its options, as on the command line.
        batch_size: the number of samples of a step, instead of the training recipe's.
    """
    from keras_mp.bench.keras_step import check_can_run, of_model  # in the process that measures
    from keras_mp.numerics.data import random_batches

    check_can_run(precision)
    given, *options = arguments
    recipe = find_recipe(given)
    config = recipe.config(options, f"keras-mp bench {given}")
    size = {} if batch_size is None else {"batch_size": batch_size}
    model, shapes = recipe.step(dataclasses.replace(config, policy=precision, **size))
    return of_model(model, random_batches(model, shapes, 1)[0], precision)
