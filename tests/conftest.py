import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Tests compile many small programs and run each once: with little of LLVM's optimizer they take less time. XLA's own
# passes, which decide precision and memory, are all there; at level 0 tanh and erf are less exact than without flags.
# `XLA_FLAGS= make test` runs what users run.
FLAGS = "--xla_backend_optimization_level=1 --xla_llvm_disable_expensive_passes=true"
os.environ.setdefault("XLA_FLAGS", FLAGS)

import ctypes
import gc
import sys
from pathlib import Path

import keras
import psutil
import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # the helpers beside the tests: zoo, fake_devices

import random_seed

GROWN = 2 * 2**30  # bytes that a worker may hold from one file to the next
SEED = f"{random_seed.VARIABLE}={random_seed.of_this_run()}"


def pytest_configure(config):
    if config.getoption("--hypothesis-seed", None) is None and config.pluginmanager.hasplugin("hypothesispytest"):
        import hypothesis

        hypothesis.core.global_force_seed = random_seed.of_this_run()


def pytest_report_header():
    return f"random numbers: {SEED} repeats this run"


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    random_seed.start(item.nodeid)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.failed:
        report.sections.append(("random numbers", f"{SEED} repeats this test"))
    return report


@pytest.fixture(autouse=True)
def float32_policy():
    """Each test starts under float32 and leaves no other policy behind."""
    keras.config.set_dtype_policy("float32")
    yield
    keras.config.set_dtype_policy("float32")


@pytest.fixture(autouse=True, scope="module")
def memory():
    """A worker that has grown lets go, after a file, of what the file's tests compiled."""
    yield
    if psutil.Process().memory_info().rss > GROWN:
        keras.backend.clear_session(free_memory=False)
        if "jax" in sys.modules:
            sys.modules["jax"].clear_caches()
        gc.collect()
        if sys.platform == "linux":
            ctypes.CDLL(None).malloc_trim(0)
