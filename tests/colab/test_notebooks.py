"""The notebooks: made from their sources, run to the end, without a trace of the machine; minutes long: run again."""

import importlib.util
import re
from pathlib import Path

import keras
import pytest

for needed in ("jupytext", "nbclient", "ipykernel"):
    pytest.importorskip(needed, reason=f"{needed}, of the extra notebooks, is not installed")
nbformat = pytest.importorskip("nbformat")

ROOT = Path(__file__).resolve().parents[2]
specification = importlib.util.spec_from_file_location("colab_build", ROOT / "colab" / "build.py")
build = importlib.util.module_from_spec(specification)
specification.loader.exec_module(build)
LARGEST = 64 * 2**10
OUTSIDE = re.compile(r"(?<![\w.])/(home|root|tmp|work|Users|content)/|https?://|file://")
# The notebooks of one backend run on it whatever the tests run on: once is enough.
ONLY = {"train_on_tpu": "jax", "see_what_the_compiler_did": "jax"}


def committed(name):
    return nbformat.read(ROOT / "colab" / f"{name}.ipynb", as_version=4)


def printed(notebook):
    return "".join(output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", []))


def test_every_source_has_a_notebook():
    assert {path.stem for path in (ROOT / "colab").glob("*.ipynb")} == set(build.NAMES)
    assert {path.stem for path in (ROOT / "colab").glob("*.py")} == {*build.NAMES, "build"}


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


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", build.NAMES)
def test_a_notebook_runs(name):
    if ONLY.get(name, keras.backend.backend()) != keras.backend.backend():
        pytest.skip(f"{name} runs on {ONLY[name]} whatever the tests run on")
    if name in ("newcomer", "see_what_the_compiler_did") and importlib.util.find_spec("jax_cuda13_plugin") is None:
        pytest.skip("the compilers, of the extra inspect, are not installed")
    if name in ("newcomer", "train_on_gpu") and importlib.util.find_spec("tensorflow") is None:
        pytest.skip(f"{name} exports a SavedModel, which needs TensorFlow")
    notebook = build.run(build.read(name), ROOT / "runs" / "tests" / f"{name}-{keras.backend.backend()}")
    text = printed(notebook)
    if name == "train_on_tpu":
        assert "0 of them in low precision" in text
        differences = {
            words: float(value) for words, value in re.findall(r"from the model in (\w+) on .*: (\S+)", text)
        }
        assert differences["float32"] <= 1e-5 < differences["bfloat16"] < 0.2
    if name == "train_on_gpu":
        assert "0 low-precision ops" in text
        scales = [float(scale) for scale in re.findall(r"after step +\d+: loss scale (\S+)", text)]
        assert scales[0] > scales[-1] >= 1
    if name == "see_what_the_compiler_did":
        counts = re.findall(r"(\d+) of (\d+) products that ask for FP8 run in FP8", text)
        assert len(counts) == 2 and counts[0][0] == "0" and counts[1][0] == counts[1][1] != "0"
    if name == "newcomer":
        assert text.count("0 low-precision ops") == 2 and "error:" not in text
        assert float(re.search(r"float32 outputs, (\S+) right", text)[1]) > 0.9
