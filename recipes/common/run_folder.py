"""The folder of a run, whose files are whole or not there."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def new_run_folder(output: str, name: str) -> Path:
    """Makes the folder of a run: `output/name`, or `output/name-2`, `-3`, ... when there was one.

    Args:
        output: the folder of all runs; made when missing.
        name: the run's name.

    Returns:
        The new, empty folder.

    Raises:
        ValueError: the name is empty or is a path.
    """
    if name in ("", "..") or Path(name).name != name:
        raise ValueError(f"name is the name of a folder in {output!r}, without a slash, got {name!r}")
    Path(output).mkdir(parents=True, exist_ok=True)
    number = 1
    while True:
        folder = Path(output) / (name if number == 1 else f"{name}-{number}")
        try:
            folder.mkdir()
            return folder
        except FileExistsError:
            number += 1


@contextmanager
def written_beside(path: Path) -> Iterator[Path]:
    """Gives a path to write to, which becomes `path` when the block ends well and vanishes when it does not."""
    partial = path.with_name(f".partial-{path.name}")
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
