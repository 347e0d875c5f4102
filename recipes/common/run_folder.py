"""The folder of a run, whose files are whole or not there."""

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
