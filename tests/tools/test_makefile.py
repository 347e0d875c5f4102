import re
import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")]
ROOT = Path(__file__).parents[2]


def planned(tmp_path, *arguments):
    """The commands of `make train` in a fresh clone, which are printed and not run."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    command = ["make", "--dry-run", "train", *arguments]
    return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout


def test_train_installs_what_uses_an_nvidia_gpu(tmp_path):
    driver = tmp_path / "version"
    without = planned(tmp_path, f"NVIDIA_DRIVER={driver}")
    assert '-e ".[train]"' in without and "and-cuda" not in without and "NVIDIA" not in without
    driver.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06")
    plan = planned(tmp_path, f"NVIDIA_DRIVER={driver}")
    assert '-c constraints.txt -e ".[train]" "tensorflow[and-cuda]"' in plan
    assert "NVIDIA driver found" in plan and "To leave it out: make .venv/train CUDA=" in plan
    assert planned(tmp_path, f"NVIDIA_DRIVER={driver}", "CUDA=").split() == without.split()


def listed(variable):
    """The folders, files and tests that a variable of the Makefile names, beneath `tests/`."""
    makefile = (ROOT / "Makefile").read_text()
    return re.search(rf"^{variable} := (.*)$", makefile, re.MULTILINE)[1].replace('"', "").split()


def test_continuous_integration_runs_slow_tests_of_every_folder_that_has_some():
    tests = ROOT / "tests"
    slow = {
        file.relative_to(tests)
        for file in tests.glob("*/**/*.py")
        if re.search(r"\bmark\.slow\b|import.*\bSLOW\b", file.read_text())
    }
    # These two are in `make test-all`.
    folders = {file.parts[0] for file in slow} - {"long", "tools"}
    assert len(folders) > 10
    for variable in ("SLOW", "SLOW_ON_JAX"):
        named = listed(variable)
        run = {name: [file for file in slow if file.is_relative_to(name.partition("::")[0])] for name in named}
        assert [name for name, files in run.items() if not files] == []
        folders -= {file.parts[0] for files in run.values() for file in files}
    assert folders == set()


def test_the_newest_versions_run_tests_of_every_folder_that_has_some_for_jax():
    tests = ROOT / "tests"
    folders = {file.parts[-2] for file in tests.glob("*/test_*.py") if "mark.jax" in file.read_text()}
    assert {name.partition("/")[0] for name in listed("NEWEST")} == folders - {"long", "tools"}
    for name in listed("NEWEST"):
        files = (tests / name).glob("test_*.py") if (tests / name).is_dir() else [tests / name]
        assert any("mark.jax" in file.read_text() for file in files), name


def test_programs_that_the_makefile_names_are_there():
    named = re.findall(r"\b(?:tests|benchmarks|colab)/\S+\.py\b", (ROOT / "Makefile").read_text())
    assert "benchmarks/sweep.py" in named
    assert [name for name in named if "*" not in name and not (ROOT / name).exists()] == []
