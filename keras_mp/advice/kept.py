"""Figures of earlier calls, kept in files: a second call compiles nothing again, and lowers one step."""

from __future__ import annotations

import functools
import hashlib
import json
from pathlib import Path
from typing import Any

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
