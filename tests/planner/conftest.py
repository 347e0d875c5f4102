import os

import pytest

from keras_mp.planner.compile.compiler import CompileError
from keras_mp.system.packages import installed

# What the compilers that come with jax 0.7 cannot do, by what they say.
OLD_COMPILERS = {
    "does not know this chip": "libtpu of the time of jax 0.7 does not know TPU7x",
    "Too small divisible part of the contracting dimension": "the compiler of jax 0.7 for GPUs fails on odd sizes",
}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """Skips what the compiler of the installed JAX cannot do, if it is an old one."""
    try:
        return (yield)
    except CompileError as error:
        reasons = [reason for said, reason in OLD_COMPILERS.items() if said in str(error)]
        if reasons and installed(["jax"])["jax"].startswith("0.7."):
            pytest.skip(reasons[0])
        raise


@pytest.fixture(autouse=True, scope="session")
def compiled_once(tmp_path_factory):
    """What compilers make is kept for the session, away from the user's cache; the workers share it."""
    base = tmp_path_factory.getbasetemp()
    patch = pytest.MonkeyPatch()
    patch.setenv("KERAS_MP_CACHE", str((base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "compiled"))
    yield
    patch.undo()
