import os

import pytest


@pytest.fixture(autouse=True, scope="session")
def compiled_once(tmp_path_factory):
    """What compilers make is kept for the session, away from the user's cache; the workers share it."""
    base = tmp_path_factory.getbasetemp()
    patch = pytest.MonkeyPatch()
    patch.setenv("KERAS_MP_CACHE", str((base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "compiled"))
    yield
    patch.undo()
