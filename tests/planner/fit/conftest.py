import pytest


@pytest.fixture(autouse=True, scope="session")
def compiled_once(tmp_path_factory):
    """What compilers make is kept for the session, away from the user's cache."""
    patch = pytest.MonkeyPatch()
    patch.setenv("KERAS_MP_CACHE", str(tmp_path_factory.getbasetemp() / "advised"))
    yield
    patch.undo()
