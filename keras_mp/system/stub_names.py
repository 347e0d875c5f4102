"""The names that a stub declares, imported when they are first used: a package names each public name once."""

from __future__ import annotations

import ast
from importlib import import_module
from pathlib import Path
from typing import Any


def names_in_stub(path: Path) -> dict[str, str]:
    """Reads a stub of lines `from module import name as name`.

    Returns:
        The module of each name, in the order of the file.
    """
    imports = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ImportFrom)]
    return {alias.asname or alias.name: node.module or "" for node in imports for alias in node.names}


def load(module: str, name: str) -> Any:
    """Imports a name of a module, or the submodule of that name.

    Raises:
        ImportError: the module has neither.
    """
    submodule = f"{module}.{name}"
    loaded = import_module(module)
    # Not getattr, which would ask the package that is loading the name.
    return vars(loaded)[name] if name in vars(loaded) else import_module(submodule)
