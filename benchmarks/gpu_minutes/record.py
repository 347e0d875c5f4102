"""The one JSON of the command: written beside and renamed after each row, so that it is whole at any moment."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from keras_mp.system.atomic_write import write_text


class Record:
    """What was measured so far.

    Args:
        path: the JSON file.
        header: facts that hold for all parts: the command, versions, the device.
    """

    def __init__(self, path: Path, header: dict[str, Any]) -> None:
        self.path = path
        self.content: dict[str, Any] = {**header, "parts": {}}
        self.save()

    def begin(self, name: str, limit: float) -> dict[str, Any]:
        """The entry of a part: its rows, its limit in seconds, and how it ended."""
        entry: dict[str, Any] = {"limit_s": limit, "seconds": None, "status": "running", "error": "", "rows": []}
        self.content["parts"][name] = entry
        self.save()
        return entry

    def save(self) -> None:
        """Replaces the file."""
        write_text(json.dumps(self.content, indent=1) + "\n", self.path)
