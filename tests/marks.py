"""Marks that depend on the backend, or on the place in a list."""

import keras
import pytest


def ci_on(backend: str) -> pytest.MarkDecorator:
    """The mark `ci` where the tests run on this backend; on the other the test is in `make test`."""
    return pytest.mark.ci if keras.backend.backend() == backend else pytest.mark.filterwarnings()


def slow_on(backend: str) -> pytest.MarkDecorator:
    """The mark `slow` where the tests run on this backend: what is tested is the same on both."""
    return pytest.mark.slow if keras.backend.backend() == backend else pytest.mark.filterwarnings()


def few(values, *chosen):
    """Parameters of which those chosen are in `make test`, by default the first two; continuous integration has all."""
    values = list(values)
    chosen = chosen or values[:2]
    assert set(chosen) <= set(values), f"{set(chosen) - set(values)} are not among {values}"
    return [value if value in chosen else pytest.param(value, marks=pytest.mark.ci) for value in values]
