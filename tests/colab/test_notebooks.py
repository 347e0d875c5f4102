"""The notebooks: made from their sources, run to the end, without a trace of the machine; minutes long: run again."""

import importlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import types
import zipfile
from pathlib import Path

import pytest

for needed in ("jupytext", "nbclient", "ipykernel"):
    pytest.importorskip(needed, reason=f"{needed}, of the extra notebooks, is not installed")
nbformat = pytest.importorskip("nbformat")

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "colab"))
build, bundle = map(importlib.import_module, ("build", "bundle"))

LARGEST = 64 * 2**10
OUTSIDE = re.compile(r"(?<![\w.])/(home|root|tmp|work|Users|content)/|https?://|file://")


def committed(name):
    return nbformat.read(ROOT / "colab" / f"{name}.ipynb", as_version=4)


def printed(notebook):
    return "".join(output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", []))


def test_every_source_has_a_notebook():
    assert {path.stem for path in (ROOT / "colab").glob("*.ipynb")} == set(build.NAMES)
    assert {path.stem for path in (ROOT / "colab").glob("*.py")} == {*build.NAMES, "build", "bundle", "first_cell"}


@pytest.mark.parametrize("name", build.NAMES)
def test_a_notebook_has_the_cells_of_its_source(name):
    ours, theirs = build.read(name), committed(name)
    assert [(cell.id, cell.cell_type, cell.source) for cell in theirs.cells] == [
        (cell.id, cell.cell_type, cell.source) for cell in ours.cells
    ], "run `make notebooks`"


@pytest.mark.parametrize("name", build.NAMES)
def test_a_notebook_was_run_to_its_end_and_knows_nothing_of_the_machine(name):
    notebook = committed(name)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert not any(output.output_type == "error" for cell in code for output in cell.outputs)
    text = (ROOT / "colab" / f"{name}.ipynb").read_text()
    assert len(text) < LARGEST
    assert not OUTSIDE.search(printed(notebook)) and str(ROOT) not in text
    nbformat.validate(notebook)


def test_the_notebooks_for_an_accelerator_ask_colab_for_it():
    asked = {name: committed(name).metadata for name in build.NAMES}
    assert asked["train_on_tpu"].accelerator == "TPU" and asked["train_on_tpu"].colab.gpuType == "V5E1"
    for name in ("train_on_gpu", "lora_on_kerashub"):
        assert asked[name].accelerator == "GPU" and asked[name].colab.gpuType == "T4"
    assert not any("accelerator" in asked[name] for name in ("newcomer", "see_what_the_compiler_did"))


def test_the_bundle_is_the_repository_without_tests_and_the_same_each_time(tmp_path):
    first, second = bundle.write(tmp_path / "one.zip"), bundle.write(tmp_path / "two.zip")
    assert first.read_bytes() == second.read_bytes()
    with zipfile.ZipFile(first) as zipped:
        names = {name.removeprefix(f"{bundle.FOLDER}/") for name in zipped.namelist()}
        assert zipped.read(f"{bundle.FOLDER}/Makefile") == (ROOT / "Makefile").read_bytes()
    assert {"pyproject.toml", "keras_mp/__init__.py", "models/gpt.py", "recipes/common/fit.py"} <= names
    assert not any(name.startswith(("tests", ".git", ".ci", ".venv")) for name in names)
    assert first.stat().st_size < 2 * 2**20


@pytest.fixture(scope="module")
def zipped(tmp_path_factory):
    return bundle.write(tmp_path_factory.mktemp("bundle") / "any.zip")


@pytest.fixture
def first_cell(zipped, tmp_path, monkeypatch):
    """Runs the first cell's functions in an empty folder, and returns what it asked pip for."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("KERAS_MP_SOURCE", raising=False)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PYTHONPATH", "before")
    asked = []
    monkeypatch.setattr(
        subprocess, "run", lambda command, **options: asked.append(command) or types.SimpleNamespace(returncode=0)
    )

    def run(extras="", needed=()):
        names = {}
        exec((ROOT / "colab" / "first_cell.py").read_text(), names)
        names["install"](extras, needed)
        return asked

    return run


def test_the_first_cell_takes_the_zip_from_beside_the_notebook(first_cell, zipped, tmp_path):
    shutil.copy(zipped, tmp_path / "keras_mp (1).zip")  # as a browser names a second one
    assert first_cell() == []  # all is installed here
    assert sys.path[0] == os.environ["PYTHONPATH"].split(os.pathsep)[0] == str(tmp_path / bundle.FOLDER)
    assert (tmp_path / bundle.FOLDER / "recipes" / "digits.py").is_file()


def test_the_first_cell_takes_the_zip_from_an_address(first_cell, zipped, tmp_path, monkeypatch):
    monkeypatch.setenv("KERAS_MP_SOURCE", zipped.as_uri())
    first_cell()
    assert sys.path[0] == str(tmp_path / bundle.FOLDER)


def test_the_first_cell_opens_colab_s_upload_dialogue(first_cell, zipped, tmp_path, monkeypatch):
    def upload():
        shutil.copy(zipped, "chosen.zip")
        return {"chosen.zip": b"..."}

    colab = types.SimpleNamespace(files=types.SimpleNamespace(upload=upload))
    monkeypatch.setitem(sys.modules, "google", types.SimpleNamespace(colab=colab))
    monkeypatch.setitem(sys.modules, "google.colab", colab)
    first_cell()
    assert sys.path[0] == str(tmp_path / bundle.FOLDER)


def test_the_first_cell_says_what_is_missing(first_cell, tmp_path):
    with pytest.raises(SystemExit, match="keras_mp.zip is missing: put it beside this notebook, or set"):
        first_cell()
    with zipfile.ZipFile(tmp_path / "keras_mp.zip", "w") as other:
        other.writestr("keras_mp.txt", "")
    with pytest.raises(SystemExit, match="contains no keras_mp; `make bundle`"):
        first_cell()


def test_the_first_cell_installs_the_compilers_of_the_jax_that_is_there(first_cell, zipped, tmp_path):
    pytest.importorskip("jax")
    version = importlib.metadata.version("jax")
    shutil.copy(zipped, tmp_path / "keras_mp.zip")
    ((*_, kit, tpu, plugin, runtime),) = first_cell("inspect", ["a_package_that_is_not_there"])
    assert kit == f"{tmp_path / bundle.FOLDER}[inspect]"
    assert tpu == f"jax[tpu]=={version}" and {plugin, runtime} == {
        f"jax-cuda13-plugin=={version}",
        f"jax-cuda13-pjrt=={version}",
    }
