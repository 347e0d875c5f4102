"""Makes the notebooks from their sources, and runs them: `python colab/build.py [name ...]`.

A source is a Python program in jupytext's percent format, and the only file to edit. The notebook beside it has the
same cells, and what they printed when they were last run. Each is run in an empty folder with keras_mp.zip beside it,
in an environment that has what Colab's image has (colab/image-*.txt), and nothing else.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import bundle
import jupytext
import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parent
# Each notebook, and the image of Colab's that it is run in.
IMAGES = {
    "lora_on_kerashub": "cpu",
    "newcomer": "cpu",
    "see_what_the_compiler_did": "cpu",
    "train_on_gpu": "cpu",
    "train_on_tpu": "tpu",
}
NAMES = tuple(IMAGES)
FIRST_CELL = "from first_cell import install\n"
METADATA = ("accelerator", "colab", "kernelspec")
# What decides how a program runs, and is not set in Colab.
UNSET = re.compile(r"PYTHON|VIRTUAL_ENV|KERAS|JAX|XLA|TF_|CUDA|NPROC|JUPYTER")
SECONDS = 1800
SITE = re.compile(r"\S*/site-packages/")
LOGGED = re.compile(r"[IW]\d{4} |WARNING: All log messages before absl|INFO:tensorflow|\s*$")


def read(name: str) -> Any:
    """Reads a source as a notebook without outputs."""
    notebook = jupytext.read(FOLDER / f"{name}.py", fmt="py:percent")
    notebook.metadata = {key: notebook.metadata[key] for key in METADATA if key in notebook.metadata}
    for index, cell in enumerate(notebook.cells):
        # jupytext draws them at random, and a notebook that is made anew should differ only where it does.
        cell.id = f"cell-{index}"
        cell.metadata = {}
        cell.source = cell.source.replace(FIRST_CELL, (FOLDER / "first_cell.py").read_text())
    return notebook


def image(name: str) -> Path:
    """Returns the environment with what Colab's image has, in which a notebook is run; `make` makes it."""
    return ROOT / f".venv-colab-{IMAGES[name]}"


def run(notebook: Any, environment: Path) -> Any:
    """Runs a notebook from its first cell to its last, in an empty folder with keras_mp.zip beside it.

    Args:
        notebook: without outputs.
        environment: a virtual environment, which stays as it is: what the notebook installs goes elsewhere.

    Returns:
        The notebook with its outputs.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell failed.
    """
    metadata = dict(notebook.metadata)
    with tempfile.TemporaryDirectory() as scratch:
        folder, kernels = Path(scratch, "notebook").resolve(), Path(scratch, "jupyter")
        folder.mkdir()
        bundle.write(folder / bundle.BUNDLE.name)
        _make_kernel(kernels, _layer(environment, Path(scratch, "environment")))
        os.environ["JUPYTER_PATH"] = str(kernels)
        resources = {"metadata": {"path": str(folder)}}
        client = NotebookClient(notebook, timeout=SECONDS, resources=resources, record_timing=False, kernel_name="bare")
        variables = {name: value for name, value in os.environ.items() if not UNSET.match(name)}
        client.execute(env=variables | {"KERAS_MP_CACHE": str(Path(scratch, "cache"))})
        for cell in notebook.cells:
            if cell.cell_type == "code":
                cell.outputs = [_clean(output, str(folder)) for output in cell.outputs]
                cell.outputs = [output for output in cell.outputs if output.get("text", "-").strip()]
    notebook.metadata = metadata
    return notebook


def _layer(environment: Path, folder: Path) -> Path:
    """Makes an empty environment over another one, whose packages it has; returns its Python."""
    python = environment / "bin" / "python"
    subprocess.run([python, "-m", "venv", "--without-pip", folder], check=True)
    (packages,) = (environment / "lib").glob("python3*/site-packages")
    (own,) = (folder / "lib").glob("python3*/site-packages")
    (own / "image.pth").write_text(f"{packages}\n")
    return folder / "bin" / "python"


def _make_kernel(folder: Path, python: Path) -> None:
    kernel = folder / "kernels" / "bare"
    kernel.mkdir(parents=True)
    command = [str(python), "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    (kernel / "kernel.json").write_text(json.dumps({"argv": command, "display_name": "bare", "language": "python"}))


def _clean(output: Any, folder: str) -> Any:
    """What a cell printed, without the machine's paths and without the lines that TensorFlow's C++ logs."""
    if "text" in output:
        lines = [line for line in output["text"].splitlines(keepends=True) if not LOGGED.match(line)]
        text = SITE.sub("", "".join(lines))
        output["text"] = text.replace(folder, ".").replace(str(Path.home()), "~")
    return output


def main(names: list[str]) -> int:
    """Makes and runs the notebooks of these names, or all."""
    for name in names or NAMES:
        if name not in NAMES:
            print(f"there is no notebook {name!r}: {', '.join(NAMES)}", file=sys.stderr)
            return 1
        start = time.monotonic()
        notebook = run(read(name), image(name))
        nbformat.write(notebook, FOLDER / f"{name}.ipynb")
        print(f"{name}: {len(notebook.cells)} cells, {time.monotonic() - start:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
