"""The tests' own frame: seeds that repeat a run, tests that hang, and the selection of `make test`."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import random_seed

import keras_mp

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow
# Files that other tests start in a process of their own, and who starts them.
REPLICAS = "tests/loss_scaling/test_optimizer_replicas.py::test_several_replicas_do_as_one"
DEVICES = "tests/parallel/test_distribute.py::test_several_devices_do_as_one"
STARTED_BY = {
    **dict.fromkeys(("tests/loss_scaling/on_replicas.py", "tests/fp8/scales_on_replicas.py"), REPLICAS),
    **dict.fromkeys(("tests/parallel/on_several_devices.py", "tests/parallel/loading_on_devices.py"), DEVICES),
}
FIXED = (ROOT / "docs" / "maintainers" / "what-we-fixed.md").read_text()
DRAWS = """
import random, keras, numpy as np

def test_draws():
    numbers = [np.random.default_rng().normal(), np.random.default_rng().normal(), np.random.normal(), random.random()]
    numbers += [float(keras.random.normal(())), float(keras.initializers.RandomNormal()(()))]
    print("drawn", *numbers)
    assert len(set(numbers)) < len(numbers)
"""


def run_pytest(*arguments, seed=None, backend=None):
    """Output of pytest in a process of its own, on files that use this conftest."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "KERAS_MP_TEST"))
    }
    if backend is not None:
        environment["KERAS_BACKEND"] = backend
    if seed is not None:
        environment[random_seed.VARIABLE] = str(seed)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", *map(str, arguments)]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    return done.stdout + done.stderr


@pytest.fixture
def file_beside_the_tests():
    """A place for a test file that conftest.py serves."""
    path = ROOT / "tests" / f"test_written_by_{os.getpid()}.py"
    yield path
    path.unlink(missing_ok=True)


def test_a_test_that_fails_prints_the_seed_that_repeats_it(file_beside_the_tests):
    file_beside_the_tests.write_text(DRAWS)
    first = run_pytest(file_beside_the_tests)
    seed = re.search(rf"{random_seed.VARIABLE}=(\d+) repeats this test", first)[1]
    numbers = re.search(r"drawn .*", first)[0]
    assert numbers == re.search(r"drawn .*", run_pytest(file_beside_the_tests, seed=seed))[0]
    assert numbers != re.search(r"drawn .*", run_pytest(file_beside_the_tests, seed=int(seed) + 1))[0]


def test_a_test_draws_the_same_in_any_order():
    random_seed.start("first")
    first = np.random.default_rng().normal(size=3)
    random_seed.start("second")
    assert np.all(np.random.default_rng().normal(size=3) != first)
    random_seed.start("first")
    np.testing.assert_array_equal(np.random.default_rng().normal(size=3), first)
    assert np.all(np.random.default_rng().normal(size=3) != first)
    np.testing.assert_array_equal(np.random.default_rng(5).normal(size=3), random_seed.numpys_own(5).normal(size=3))


def test_a_test_that_hangs_in_compiled_code_is_ended_and_named(file_beside_the_tests):
    # Keras is imported before the clock runs.
    hangs = "import ctypes\nimport keras\n\ndef test_hangs():\n    ctypes.CDLL(None).sleep(600)\n"
    file_beside_the_tests.write_text(hangs)
    output = run_pytest(file_beside_the_tests, "--timeout", "3")
    assert "in test_hangs" in output and "Timeout" in output


def started(file):
    """The tests of a file in STARTED_BY that its quick part runs, if that part is in `make test`."""
    functions = [node for node in ast.parse((ROOT / file).read_text()).body if isinstance(node, ast.FunctionDef)]
    return {
        f"{file}::{function.name}"
        for function in functions
        if "pytest.mark.slow" not in map(ast.unparse, function.decorator_list)
    }


def collected(backend, marks):
    """The tests of a backend that marks select, by file and name."""
    output = run_pytest("--collect-only", "-m", marks, "tests", backend=backend)
    names = {re.sub(r"\[.*", "", line) for line in output.splitlines() if "::" in line}
    assert len(names) > 100 and set(STARTED_BY.values()) <= names, output[-2000:]
    return names


@pytest.fixture(scope="module")
def quick():
    """The tests that `make test` runs on one backend or the other."""
    pytest.importorskip("tensorflow")
    pytest.importorskip("jax")
    recipe = (ROOT / "Makefile").read_text().partition("\ntest-tensorflow:")[2].partition("\ntest-slow:")[0]
    selections = re.findall(r'KERAS_BACKEND=(\w+) .* -m "(.*)"', recipe)
    assert {backend for backend, _ in selections} == {"tensorflow", "jax"}
    return set().union(*(collected(*selection) for selection in selections))


def test_each_fault_that_was_fixed_has_a_test_in_make_test(quick):
    here = quick.union(*map(started, STARTED_BY))
    rows = re.findall(r"^\| (\d+\w?) \|(.*)\|$", FIXED, re.MULTILINE)
    named = {number: re.findall(r"`(tests/[\w/]+\.py::\w+)`", row) for number, row in rows}
    assert len(rows) >= 24 and [number for number, tests in named.items() if not here.intersection(tests)] == []


def without_the_rest(file, quick):
    """The text of a test file without the tests that are not in `make test`."""
    text = (ROOT / file).read_text()
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_") and f"{file}::{node.name}" not in quick:
            text = text.replace(ast.get_source_segment((ROOT / file).read_text(), node), "")
    return text


def test_each_public_name_is_used_in_make_test(quick):
    files = {name.partition("::")[0] for name in quick} - {"tests/test_import.py"}
    files = {file for file in files if (ROOT / file).is_file()}  # another worker's file may be gone
    texts = "\n".join(without_the_rest(file, quick) for file in sorted(files))
    returned_or_raised = re.compile(r"Error$|Report$|^NonFinite$")  # by calls that are named themselves
    names = {name for name in (*keras_mp.__all__, *keras_mp.fp8.__all__) if not returned_or_raised.search(name)}
    assert len(names) > 20 and sorted(name for name in names if not re.search(rf"\b{name}\b", texts)) == []
