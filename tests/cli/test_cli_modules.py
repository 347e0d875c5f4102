"""Which modules the shell's commands import from the current folder."""

import os
import subprocess
import sys
from pathlib import Path


def test_a_module_of_keras_s_name_beside_a_model_does_not_run(tmp_path):
    (tmp_path / "keras.py").write_text("print('this ran')\n")
    (tmp_path / "x.keras").write_bytes(b"no model")
    program = "import sys; sys.argv = ['keras-mp', 'audit', 'x.keras']; from keras_mp.cli import main; main()"
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "KERAS_BACKEND": "jax"}  # imported sooner
    # -P, as of an installed command: Python itself puts no folder of the caller's first.
    command = [sys.executable, "-P", "-c", program]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 1 and "this ran" not in done.stdout and "x.keras" in done.stderr, done
