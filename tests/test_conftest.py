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

pytestmark = pytest.mark.once

ROOT = Path(__file__).parents[1]
# Files that other tests start in a process of their own, and who starts them.
SCALING = "tests/loss_scaling"
STARTED_BY = {
    f"{SCALING}/on_replicas.py": f"{SCALING}/test_optimizer_replicas.py::test_several_replicas_do_as_one",
    "tests/fp8/on_two_replicas.py": "tests/fp8/test_replicas.py::test_several_replicas_equal_the_reference",
    "tests/parallel/on_several_devices.py": "tests/parallel/test_distribute.py::test_several_devices_do_as_one",
}
FIXED = (ROOT / "docs" / "what-we-fixed.md").read_text()
DRAWS = """
import random, keras, numpy as np

def test_draws():
    numbers = [np.random.default_rng().normal(), np.random.default_rng().normal(), np.random.normal(), random.random()]
    numbers += [float(keras.random.normal(())), float(keras.initializers.RandomNormal()(()))]
    print("drawn", *numbers)
    assert len(set(numbers)) < len(numbers)
"""


def run_pytest(*arguments, seed=None):
    """Output of pytest in a process of its own, on files that use this conftest."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "KERAS_MP_TEST"))
    }
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


@pytest.mark.parametrize("text", ["", "-1", "1.5", "nine"])
def test_a_seed_that_is_none_is_refused(text, monkeypatch):
    monkeypatch.setenv(random_seed.VARIABLE, text)
    with pytest.raises(ValueError, match=f"{random_seed.VARIABLE}='{text}' must be a whole number from 0"):
        random_seed.of_this_run()


def test_a_test_that_hangs_in_compiled_code_is_ended_and_named(file_beside_the_tests):
    file_beside_the_tests.write_text("import ctypes\n\ndef test_hangs():\n    ctypes.CDLL(None).sleep(600)\n")
    output = run_pytest(file_beside_the_tests, "--timeout", "3")
    assert "in test_hangs" in output and "Timeout" in output


def started(file):
    """The tests of a file in STARTED_BY that its quick part runs, if that part is in `make test`."""
    functions = [node for node in ast.parse((ROOT / file).read_text()).body if isinstance(node, ast.FunctionDef)]
    marks = {"pytest.mark.ci", "pytest.mark.slow"}
    return {
        f"{file}::{function.name}"
        for function in functions
        if not marks.intersection(ast.unparse(decorator) for decorator in function.decorator_list)
    }


def test_each_fault_that_was_fixed_has_a_test_in_make_test():
    collected = run_pytest("--collect-only", "-m", "not ci and not slow", "tests")
    here = {re.sub(r"\[.*", "", line) for line in collected.splitlines() if "::" in line}
    assert len(here) > 500 and set(STARTED_BY.values()) <= here, collected[-2000:]
    here = here.union(*map(started, STARTED_BY))
    rows = re.findall(r"^\| (\d+\w?) \|(.*)\|$", FIXED, re.MULTILINE)
    named = {number: re.findall(r"`(tests/[\w/]+\.py::\w+)`", row) for number, row in rows}
    assert len(rows) >= 24 and [number for number, tests in named.items() if not here.intersection(tests)] == []
