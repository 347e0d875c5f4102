"""The names that a stub declares, imported when they are first used: a package names each public name once.

`lazy_loader.attach_stub` reads only relative imports of a package's own modules: most stubs here name other rooms.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from keras_mp.system.registration import register_classes


def door(space: dict[str, Any], registers: bool = True) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Makes a module import its stub's names when used.

    Args:
        space: the `globals()` of the module, which keep a name once it is imported.
        registers: whether the classes that saved models name are registered, too, when a name is imported.

    Returns:
        The module's `__getattr__`, which also answers for `__all__`, and its `__dir__`.
    """
    module = space["__name__"]

    @functools.cache
    def home() -> dict[str, str]:
        return names_in_stub(Path(space["__file__"]).with_suffix(".pyi"))

    def get(name: str) -> Any:
        if name == "__all__":
            return list(home())
        if name not in home():
            folder, inside = Path(space["__file__"]).parent, ""
            for place in (place for place, owner in home().items() if owner == module):  # the modules within
                stubs = (folder / place / "__init__.pyi", folder / f"{place}.pyi")
                if any(name in names_in_stub(stub) for stub in stubs if stub.is_file()):
                    inside = inside or place
            known = f"it is {module}.{inside}.{name}" if inside else f"it has {', '.join(home())}"
            raise AttributeError(f"module {module!r} has no attribute {name!r}; {known}")
        place = home()[name]
        if registers and place != module:  # a module within registers for itself
            register_classes()
        space[name] = load(place, name)
        return space[name]

    return get, lambda: sorted({*space, *home()})


def names_in_stub(path: Path) -> dict[str, str]:
    """Reads a stub's imported names, each with its module."""
    imports = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ImportFrom)]
    return {alias.asname or alias.name: node.module or "" for node in imports for alias in node.names}


def load(module: str, name: str) -> Any:
    """Imports a name or a submodule of a module."""
    submodule = f"{module}.{name}"
    loaded = import_module(module)
    # Not getattr, which would ask the package that is loading the name.
    return vars(loaded)[name] if name in vars(loaded) else import_module(submodule)
