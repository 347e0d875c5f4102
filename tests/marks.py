"""Marks that depend on the backend, or on the place in a list."""

import zlib

import keras
import pytest

# Folders of tests whose code is another one on JAX than on TensorFlow.
OF_A_BACKEND = ("backend", "fitting", "parallel", "xla")


def ci_on(backend: str) -> pytest.MarkDecorator:
    """The mark `ci` where the tests run on this backend; on the other the test is in `make test`."""
    return pytest.mark.ci if keras.backend.backend() == backend else pytest.mark.filterwarnings()


def slow_on(backend: str) -> pytest.MarkDecorator:
    """The mark `slow` where the tests run on this backend: what is tested is the same on both."""
    return pytest.mark.slow if keras.backend.backend() == backend else pytest.mark.filterwarnings()


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


def by_turns(values, *chosen):
    """As `few`; of those not chosen continuous integration has two thirds on TensorFlow, and the others on JAX.

    `make test-all` has all on both. For what is the same code on both backends, and takes long, on JAX longer.
    """
    marked, turn = [], 0
    for parameter in few(values, *chosen):
        if hasattr(parameter, "marks"):
            turn += 1
            other = "jax" if turn % 3 else "tensorflow"
            parameter = pytest.param(*parameter.values, marks=[*parameter.marks, slow_on(other)])
        marked.append(parameter)
    return marked


def has_turn(test: str) -> bool:
    """Whether continuous integration runs a test marked `ci` on JAX, too; `make test-all` runs all on both backends.

    It does where the code is JAX's own, and elsewhere half of the tests, chosen by their names.

    Args:
        test: its node id, such as "tests/lean/test_remat.py::test_gradients".
    """
    return any(f"/{folder}/" in test for folder in OF_A_BACKEND) or zlib.crc32(test.encode()) % 2 == 0
