"""Figures of earlier calls, kept in files by what a step computes: a second call compiles nothing again."""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras

from keras_mp.backend.common.lowered import Lowered
from keras_mp.rebuild import layers_by_path, operations_of
from keras_mp.reporting.report import plain_values
from keras_mp.system.atomic_write import write_text
from keras_mp.system.packages import installed
from keras_mp.xla.compile import cache_folder

_PACKAGES = ("keras", "keras-hub", "jax", "jaxlib", "libtpu", "jax-cuda13-plugin", "jax-cuda13-pjrt", "tensorflow")


def load(*key: Any) -> Any:
    """What was kept under a key, or None."""
    path = _path(key)
    return json.loads(path.read_text()) if path.is_file() else None


def keep(value: Any, *key: Any) -> None:
    """Keeps a value under a key, for these versions of the packages and of the kit."""
    write_text(json.dumps(plain_values(value)), _path(key))


def _path(key: tuple[Any, ...]) -> Path:
    text = json.dumps([plain_values(list(key)), installed(_PACKAGES), _sources()], sort_keys=True)
    return cache_folder() / "advice" / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"


@functools.cache
def _sources() -> str:
    """The kit's own code, which measures are made of."""
    digest = hashlib.sha256()
    root = Path(__file__).parents[1]
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return digest.hexdigest()


# Keras numbers automatic names: dense, dense_1.
_COUNTER = re.compile(r"_\d+(?=/|$)")
# The code of other packages is the user's. Of these the version, or all of the code, is in the key of what is kept.
_NOT_THE_USERS = {"keras", "keras_hub", "keras_mp", "tensorflow", "jax", *sys.stdlib_module_names}


def fingerprint(lowered: Lowered, model: keras.Model) -> str:
    """What decides the steps of a model under all measures of one precision, as text.

    It is made of the program of a step, with nothing left out but names and the places in the code; and of what
    decides how measures change the step and the program does not show: the class, the precision and the settings of
    each layer, of the loss and of the optimizer. Names that differ in the number at their end are the same.

    Args:
        lowered: a step of the model, in any precision.
        model: the model in the precision of the measures.

    Raises:
        ImportError: If JAX is not installed, without which nothing is compiled.
    """
    from keras_mp.xla.program_hash import program_hash  # imports JAX, on TensorFlow too

    arguments = [(argument.kind, argument.shape, argument.dtype) for argument in lowered.arguments]
    content = [lowered.backend, arguments, program_hash(lowered.module), _parts(model)]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _parts(model: keras.Model) -> list[Any]:
    compiled: Sequence[Any] = keras.tree.flatten(
        [model.optimizer, getattr(model.optimizer, "inner_optimizer", None), getattr(model, "loss", None)]
    )
    layers = [[_unnumbered(path), *_described(layer)] for path, layer in layers_by_path(model).items()]
    return layers + [_described(part) for part in (model, *operations_of(model), *compiled, *model.metrics)]


def _described(part: Any) -> list[Any]:
    """The class of a part, its precision, its plain settings, and the code of a class of the user's."""
    settings = {
        name: _unnumbered(value) if isinstance(value, str) else value
        for name, value in getattr(part, "__dict__", {}).items()
        if isinstance(value, bool | int | float | str)
    }
    policy = getattr(part, "dtype_policy", None)
    kind = part if inspect.isfunction(part) else type(part)
    return [f"{kind.__module__}.{kind.__qualname__}", policy and policy.name, settings, _code(kind)]


def _code(kind: Any) -> str:
    """The source of a class and its bases, or of a function, where it is the user's and can be found."""
    sources = []
    for part in getattr(kind, "__mro__", (kind,)):
        if part.__module__.partition(".")[0] not in _NOT_THE_USERS:
            try:
                sources.append(inspect.getsource(part))
            except (OSError, TypeError):  # not from a file
                sources.append("")
    return "".join(sources)


def _unnumbered(name: str) -> str:
    return _COUNTER.sub("", name)
