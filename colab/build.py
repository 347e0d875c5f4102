"""Makes the notebooks from their sources, and runs them: `python colab/build.py [name ...]`.

A source is a Python program in jupytext's percent format, and the only file to edit. The notebook beside it has the
same cells, and what they printed when they were last run.
"""

import re
import shutil
import sys
from pathlib import Path
from typing import Any

import jupytext
import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parent
NAMES = ("newcomer", "see_what_the_compiler_did", "train_on_gpu", "train_on_tpu")
SECONDS = 1800
SITE = re.compile(r"\S*/site-packages/")
LOGGED = re.compile(r"[IW]\d{4} |WARNING: All log messages before absl|INFO:tensorflow|\s*$")


def read(name: str) -> Any:
    """Reads a source as a notebook without outputs."""
    notebook = jupytext.read(FOLDER / f"{name}.py")
    notebook.metadata = {"kernelspec": notebook.metadata["kernelspec"]}
    for index, cell in enumerate(notebook.cells):
        # jupytext draws them at random, and a notebook that is made anew should differ only where it does.
        cell.id = f"cell-{index}"
        cell.metadata = {}
    return notebook


def run(notebook: Any, folder: Path) -> Any:
    """Runs a notebook from its first cell to its last, in a new folder within the repository.

    Args:
        notebook: without outputs.
        folder: where it runs; what is there is removed first.

    Returns:
        The notebook with its outputs.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell failed.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    NotebookClient(
        notebook, timeout=SECONDS, resources={"metadata": {"path": str(folder)}}, record_timing=False
    ).execute()
    notebook.metadata = {"kernelspec": notebook.metadata["kernelspec"]}
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [output for output in map(_clean, cell.outputs) if output.get("text", "-").strip()]
    return notebook


def _clean(output: Any) -> Any:
    """What a cell printed, without the machine's paths and without the lines that TensorFlow's C++ logs."""
    if "text" in output:
        lines = [line for line in output["text"].splitlines(keepends=True) if not LOGGED.match(line)]
        text = SITE.sub("", "".join(lines))
        output["text"] = text.replace(str(ROOT), ".").replace(str(Path.home()), "~")
    return output


def main(names: list[str]) -> int:
    """Makes and runs the notebooks of these names, or all."""
    for name in names or NAMES:
        if name not in NAMES:
            print(f"there is no notebook {name!r}: {', '.join(NAMES)}", file=sys.stderr)
            return 1
        notebook = run(read(name), ROOT / "runs" / "notebooks" / name)
        nbformat.write(notebook, FOLDER / f"{name}.ipynb")
        print(f"{name}: {len(notebook.cells)} cells")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
