"""The extra [inspect] is all that a GPU target needs: with the CUDA toolkit hidden, a step compiles all the same."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import shutil
import keras, keras_mp
assert shutil.which("ptxas") is None
model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(32, name="dense")])
model.compile("sgd", "mse")
batch = keras.KerasTensor((16, 64), "float32"), keras.KerasTensor((16, 32), "float32")
print(len(keras_mp.inspect(model, batch, "h100").matmuls))
"""


def can_mount():
    if shutil.which("unshare") is None:
        return False
    return subprocess.run(["unshare", "--map-root-user", "--mount", "true"], capture_output=True).returncode == 0


@pytest.mark.skipif(not can_mount(), reason="hiding folders needs Linux with user namespaces")
@pytest.mark.slow
def test_a_gpu_target_without_the_cuda_toolkit(tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    hidden = {str(path.resolve()) for path in Path("/usr/local").glob("cuda*") if path.is_dir()}
    hidden |= {folder for folder in os.environ["PATH"].split(os.pathsep) if (Path(folder) / "ptxas").exists()}
    hide = "".join(f"mount --bind {empty} {folder}; " for folder in sorted(hidden))
    done = subprocess.run(
        ["unshare", "--map-root-user", "--mount", "sh", "-c", f'{hide}exec "$0" -c "$1"', sys.executable, PROGRAM],
        env=os.environ | {"KERAS_MP_CACHE": str(tmp_path / "cache")},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split()[-1] == "2"
