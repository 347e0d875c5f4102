import os
import sys
from importlib.metadata import version
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Tests compile many small programs and run each once: with little of LLVM's optimizer they take less time. XLA's own
# passes, which decide precision and memory, are all there; at level 0 tanh and erf are less exact than without flags.
# `XLA_FLAGS= make test` runs what users run, and so do the tests of qat where they run alone: they promise bits.
FLAGS = "--xla_backend_optimization_level=1 --xla_llvm_disable_expensive_passes=true"
FLAGS += " --xla_cpu_parallel_codegen_split_count=1"  # they are too small to be compiled in parts
paths = [word for word in sys.argv if word.startswith("tests/")]
if paths and all(path.startswith("tests/qat") for path in paths):
    FLAGS = ""
elif os.environ.get("KERAS_BACKEND") == "jax":
    # Two thirds of the time go to compilers there. Without LLVM's optimizer, and with the older emitters of kernels
    # that jax 0.10 still has, a step is compiled in a quarter of it; a tanh may be off by 5.5 units in place of 4.4.
    FLAGS = FLAGS.replace("_level=1", "_level=0")
    FLAGS += " --xla_cpu_use_fusion_emitters=false" * version("jaxlib").startswith("0.10.")
    # A program that another test, worker or run has compiled is read from a file.
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parents[1] / "build" / "jax"))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
os.environ.setdefault("XLA_FLAGS", FLAGS)

import gc

# The frameworks make half a million objects, none of which is ever garbage: they are looked through neither while they
# are imported nor with what the tests leave.
gc.disable()

import ctypes

import psutil
import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # the helpers beside the tests: zoo, fake_devices

import random_seed

limit = 2 * 2**30  # bytes that a worker may hold from one file to the next
GROWTH = 2**29  # bytes that it may hold more after that
SEED = f"{random_seed.VARIABLE}={random_seed.of_this_run()}"


def pytest_configure(config):
    if config.getoption("--hypothesis-seed", None) is None and config.pluginmanager.hasplugin("hypothesispytest"):
        import hypothesis

        hypothesis.core.global_force_seed = random_seed.of_this_run()


def pytest_report_header():
    return f"random numbers: {SEED} repeats this run"


def pytest_collection_finish():
    gc.freeze()
    gc.enable()


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
    import keras  # not above: the process that only hands tests to workers would take seconds to import it

    keras.config.set_dtype_policy("float32")
    yield
    keras.config.set_dtype_policy("float32")


@pytest.fixture(autouse=True, scope="module")
def memory():
    """After a file, what nothing holds is let go, and what is left is not looked through again.

    It is graphs and programs of millions of objects: to look for garbage among them took a third of all the time. A
    worker that has grown lets go of what was compiled, too.
    """
    global limit
    yield
    rss = psutil.Process().memory_info().rss
    if rss > limit:
        import keras

        gc.unfreeze()
        keras.backend.clear_session(free_memory=False)
        if "jax" in sys.modules:
            sys.modules["jax"].clear_caches()
    gc.collect()
    gc.freeze()
    if rss > limit:
        if sys.platform == "linux":
            ctypes.CDLL(None).malloc_trim(0)
        limit = max(limit, psutil.Process().memory_info().rss + GROWTH)
