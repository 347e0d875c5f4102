"""Exports with TensorFlow, for a process on another backend.

    python -m keras_mp.export.worker FOLDER

The folder holds `model.keras`, and `request.pickle`. `result.pickle` is written into it: the report and what the
SavedModel gives on the batch of the request, or the class and the message of an error.
"""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any

import keras

from keras_mp.conversion.model_file import load_model_file
from keras_mp.export.saved_model import export_float32, served


def main(folder: Path) -> None:
    """Reads, exports and writes, as the module says."""
    try:
        result = _exported(folder)
    except Exception as error:  # whatever the code of a layer raises
        # An error of the system has a class for each of its numbers.
        kind = "OSError" if isinstance(error, OSError) else type(error).__name__
        result = {"error": kind, "message": str(error)}
    (folder / "result.pickle").write_bytes(pickle.dumps(result))


def _exported(folder: Path) -> dict[str, Any]:
    request = pickle.loads((folder / "request.pickle").read_bytes())
    # Layers whose config names no dtype take it, and are otherwise not those that were saved.
    keras.mixed_precision.set_global_policy(keras.dtype_policies.deserialize(request["policy"]))
    batch = request["batch"]
    model = load_model_file(folder / "model.keras", request["modules"], unsafe=True, compile=False)
    report = export_float32(model, request["path"], batch, tolerance=request["tolerance"])
    return {"report": report, "outputs": None if batch is None else served(report.path, model, batch)}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
