"""Optional packages, imported where they are needed, with the command that installs them."""

import importlib
import importlib.util
from pathlib import Path
from types import ModuleType

CLONE = "." if Path.cwd() == Path(__file__).parents[2] else Path(__file__).parents[2]


class MissingPackageError(ImportError):
    """An optional package is not installed; the message is the command that installs it."""


def require(module: str, extra: str) -> ModuleType:
    """Imports an optional package.

    Args:
        module: the module to import, for example `"sklearn.datasets"`.
        extra: the extra of keras-mp that brings it, for example `"data"`.

    Returns:
        The module.

    Raises:
        MissingPackageError: the package, or one that it needs, is not installed; says what to run.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise MissingPackageError(
            f"{module} needs the package {error.name}, which is not installed. Run: {install_command(_all_of(extra))}"
        ) from error


def install_command(extra: str) -> str:
    """The command that installs an extra of keras-mp, in a clone, where the recipes are."""
    return f'pip install -e "{CLONE}[{extra}]"'


def _all_of(extra: str) -> str:
    """The extra that brings all that a training recipe needs, so that the next run does not ask for another one."""
    if extra not in ("data", "plots"):
        return extra
    return "data,plots" if importlib.util.find_spec("tensorflow") is None else "train"
