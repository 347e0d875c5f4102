"""Writes the public names of a commit, for `tests/test_public_names.py`: names, parameters, members, commands.

    git worktree add ../older 1731dec
    PYTHONPATH=../older python tests/compat/write_public_names.py tests/compat/public_names/1731dec.json

CHANGELOG.md says what is public. A written file stays as it is, and each new version gets its own. Commit 1731dec has
all the names of version 0.1.0 (bf23502), and more.
"""

import inspect
import json
import sys
from pathlib import Path

import keras_mp
from keras_mp.cli import app

MODULES = ("fp8", "hardware", "chips")


def public_names():
    """The objects by name, such as "stabilize" and "fp8.convert"."""
    names = {name: getattr(keras_mp, name) for name in keras_mp.__all__ if name not in (*MODULES, "backend")}
    for module_name in MODULES:
        module = getattr(keras_mp, module_name)
        names |= {f"{module_name}.{name}": getattr(module, name) for name in names_of(module)}
    return names


def names_of(module):
    if hasattr(module, "__all__"):
        return module.__all__
    own = {name for name, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__}
    return sorted(name for name in own | {name for name in vars(module) if name.isupper()} if name[0] != "_")


def parameters(function):
    """The parameters of a function or class: name, kind, whether it has a default."""
    listed = inspect.signature(function).parameters.values()
    return [[p.name, p.kind.name, p.default is not p.empty] for p in listed if p.name != "self"]


def members(cls):
    """The public members that the kit itself gives a class: the parameters of a method; None for an attribute."""
    own = [base for base in cls.__mro__ if base.__module__.startswith("keras_mp")]
    names = {name for base in own for name in (*vars(base), *getattr(base, "__annotations__", ()))}
    listed = {}
    for name in sorted(name for name in names if not name.startswith("_")):
        value = getattr(cls, name, None)
        listed[name] = parameters(value) if inspect.isroutine(value) else None
    return listed


def describe(value):
    if inspect.isclass(value):
        return {"parameters": parameters(value), "members": members(value)}
    return {"parameters": parameters(value)} if callable(value) else {}


def commands():
    """The options and arguments of each command of `keras-mp`."""
    import typer

    group = typer.main.get_command(app)
    return {
        name: sorted(option for parameter in command.params for option in parameter.opts)
        for name, command in group.commands.items()
    }


if __name__ == "__main__":
    written = {name: describe(value) for name, value in public_names().items()}
    written |= {f"keras-mp {name}": {"options": options} for name, options in commands().items()}
    lines = (f"{json.dumps(name)}: {json.dumps(written[name])}" for name in sorted(written))
    Path(sys.argv[1]).write_text("{\n" + ",\n".join(lines) + "\n}\n")
