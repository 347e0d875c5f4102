"""Marks that hold on one backend."""

import keras
import pytest


def ci_on(backend: str) -> pytest.MarkDecorator:
    """The mark `ci` where the tests run on this backend; on the other the test is in `make test`."""
    return pytest.mark.ci if keras.backend.backend() == backend else pytest.mark.filterwarnings()
