"""An operation in the code of a layer, in words: its name, and the line of Python that calls it."""

from __future__ import annotations

import importlib.util
import linecache
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from keras_mp.backend.common.tap import Frame
from keras_mp.numerics import plain_step

# Whose lines say how an operation is made, and not which layer asked for it.
_LIBRARIES = ("keras", "keras_mp", "jax", "jaxlib", "tensorflow", "numpy", "optree", "tree", "absl")


def described(name: str, frames: Sequence[Frame]) -> str:
    """The operation in a line; "" where no code but that of libraries led to it.

    Args:
        name: the backend's.
        frames: (file, line number) of the Python that led to it, the innermost first.
    """
    folders = _folders()
    for file, line in frames:
        if file == plain_step.__file__:  # what calls the model
            break
        if not any(Path(file).is_relative_to(folder) for folder in folders):
            return f"{name} in {Path(file).name}, line {line}: {linecache.getline(file, line).strip()}"
    return ""


def _folders() -> list[Path]:
    specs = (importlib.util.find_spec(library) for library in _LIBRARIES)
    packages = [Path(folder) for spec in specs if spec for folder in spec.submodule_search_locations or ()]
    return [*packages, *(Path(sysconfig.get_path("stdlib"), name) for name in ("contextlib.py", "functools.py"))]
