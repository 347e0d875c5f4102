import shutil
import subprocess
import sys
from pathlib import Path

import keras

from keras_mp.system.packages import clone_folder, install_command, installed

ROOT = Path(__file__).parents[2]


def test_a_clone_installs_itself(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert clone_folder() == ROOT
    assert install_command("jax") == 'pip install -e ".[jax]"'
    assert install_command("jax", "jax[cuda13]") == 'pip install -e ".[jax]" "jax[cuda13]"'
    monkeypatch.chdir(tmp_path)
    assert install_command("jax") == f'pip install -e "{ROOT}[jax]"'


def test_a_wheel_has_no_clone(tmp_path):
    shutil.copytree(ROOT / "keras_mp", tmp_path / "site" / "keras_mp", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "pyproject.toml").write_text('name = "another"')
    code = "from keras_mp.system.packages import install_command; print(install_command('jax'))"
    environment = {"PYTHONPATH": str(tmp_path / "site"), "PATH": ""}
    for project in (None, 'name = "another"'):
        if project is not None:
            (tmp_path / "site" / "pyproject.toml").write_text(project)
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, cwd=tmp_path, capture_output=True, text=True, check=True
        )
        assert done.stdout == 'pip install "keras-mp[jax]"\n'


def test_only_what_is_installed_is_there():
    assert installed(["keras", "no-such-package"]) == {"keras": keras.__version__}
