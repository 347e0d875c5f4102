"""Marks that depend on the backend, or on the place in a list."""

import zlib
from functools import cache
from pathlib import Path

import keras
import pytest

BACKEND = keras.backend.backend()
# Folders of tests whose code is another one on JAX than on TensorFlow.
OF_A_BACKEND = {"backend", "parallel"}


def ci_on(backend: str) -> pytest.MarkDecorator:
    """The mark `ci` where the tests run on this backend; on the other the test is in `make test`."""
    return pytest.mark.ci if BACKEND == backend else pytest.mark.filterwarnings()


def slow_on(backend: str) -> pytest.MarkDecorator:
    """The mark `slow` where the tests run on this backend; on the other the test has a turn whatever its name."""
    return pytest.mark.slow if BACKEND == backend else pytest.mark.both


def few(values, *chosen):
    """Parameters of which those chosen are in `make test`, by default the first two; continuous integration has all."""
    values = list(values)
    return _others_marked(values, chosen or values[:2], pytest.mark.ci)


def at_least(values, *chosen):
    """Parameters of which those chosen run wherever the test does, and the others in `make test-all` alone."""
    return _others_marked(list(values), chosen, pytest.mark.slow)


def _others_marked(values, chosen, mark):
    absent = [value for value in chosen if value not in values]
    assert not absent, f"{absent} are not among {values}"
    return [value if value in chosen else pytest.param(value, marks=mark) for value in values]


def has_turn(item: pytest.Item) -> bool:
    """Whether `make test`, or continuous integration after it, runs a test on this backend.

    Both backends run the code of their own. Of what is the same code on both, JAX has a third of the tests, by their
    names; TensorFlow has all in `make test`, and of those marked `ci` the other two thirds. `make test-all` runs all on
    both.
    """
    of_both = any(item.get_closest_marker(name) for name in ("both", "once", "skipif"))
    if of_both or _is_whole(item.path) or item.path.parent.name in OF_A_BACKEND:
        return True
    on_jax = zlib.crc32(item.nodeid.encode()) % 3 == 0
    return on_jax if BACKEND == "jax" else not (on_jax and item.get_closest_marker("ci"))


@cache
def _is_whole(file: Path) -> bool:
    """Whether a file has all its tests on both backends.

    One that is no test_*.py is run as a whole by another; one that skips within a test may skip on one backend.
    """
    return not file.name.startswith("test_") or "pytest.skip(" in file.read_text()
