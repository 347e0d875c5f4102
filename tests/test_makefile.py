import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = [pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")]
ROOT = Path(__file__).parents[1]


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
