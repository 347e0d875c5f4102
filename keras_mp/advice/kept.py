"""Figures of earlier calls, kept in files: a second call compiles and lowers nothing again."""

from __future__ import annotations

import functools
import hashlib
import json
import re
from pathlib import Path
from typing import Any

from keras_mp.backend.common.lowered import Lowered
from keras_mp.reporting.plain_values import plain_values
from keras_mp.system.atomic_write import write_text
from keras_mp.system.versions import installed
from keras_mp.xla.compile import cache_folder

_PACKAGES = ("keras", "keras-hub", "jax", "jaxlib", "libtpu", "jax-cuda13-plugin", "jax-cuda13-pjrt", "tensorflow")
# Where an operation was called, in which names are counted up from model to model.
_PLACES = re.compile(rb"^#loc.*$|\bloc\((?:[^()\"]|\"[^\"]*\"|\([^()]*\))*\)", re.MULTILINE)
_FUNCTION = re.compile(rb"a_inference_\w+?_\d+__\.\d+")


def fingerprint(lowered: Lowered) -> str:
    """What a model computes in a step, as text that is the same for the same model.

    It is that of the step's operations. On JAX it does not depend on the names that Keras gives to layers. On
    TensorFlow it does: a new run of a program finds what was kept, a model that is built a second time in one run may
    not, because automatic names and TensorFlow's functions are counted up.
    """
    content = _FUNCTION.sub(b"", _PLACES.sub(b"", lowered.module))
    arguments = [(argument.kind, argument.shape, argument.dtype) for argument in lowered.arguments]
    calls = [call.kind for call in lowered.calls]
    return hashlib.sha256(content + json.dumps([arguments, calls, lowered.backend]).encode()).hexdigest()


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
