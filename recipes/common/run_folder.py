"""The folder of a run, whose files are whole or not there."""

import atexit
import shutil
import tempfile
from pathlib import Path

from keras_mp.parallel import workers
from recipes.common.config import TrainingConfig
from recipes.common.require import require


def run_folder(config: TrainingConfig) -> Path:
    """Finds the folder of the run to resume, or makes that of a new one.

    Args:
        config: the training recipe's config, with `output`, `name` and `resume`.

    Returns:
        With `resume` the last folder of that name; where there is none a new one, and says so. Of several processes
        the first one has it, and the others one that vanishes.

    Raises:
        ValueError: the name is empty or is a path.
        MissingPackageError: matplotlib is not installed.
    """
    _check(config.output, config.name)
    require("matplotlib.figure", extra="plots")  # now, and not when all is trained and its curves are drawn
    if not workers.is_first():
        return _scratch_folder(Path(workers.from_first(None)))
    folder = _folder(config)
    workers.from_first(str(folder.absolute()))
    return folder


def _scratch_folder(folder: Path) -> Path:
    """A folder that vanishes, for what only the first process writes; the checkpoints in it are the first one's."""
    scratch = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, scratch, ignore_errors=True)
    (scratch / "checkpoints").symlink_to(folder / "checkpoints")
    return scratch


def _folder(config: TrainingConfig) -> Path:
    if config.resume:
        if folder := _last(Path(config.output), config.name):
            if config.export and (folder / "saved_model").exists():
                print(f"{folder / 'saved_model'} exists, and is replaced when this training has ended")
            return folder
        print(f"there is no run {config.name!r} in {config.output!r} to resume: this is the first")
    return new_run_folder(config.output, config.name)


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
    _check(output, name)
    Path(output).mkdir(parents=True, exist_ok=True)
    number = 1
    while True:
        folder = Path(output) / (name if number == 1 else f"{name}-{number}")
        try:
            folder.mkdir()
            return folder
        except FileExistsError:
            number += 1


def _last(output: Path, name: str) -> Path | None:
    numbered = {0: output / name}
    for path in output.glob(f"{name}-*"):
        number = path.name.removeprefix(f"{name}-")
        if number.isdecimal():
            numbered[int(number)] = path
    existing = [number for number, path in numbered.items() if path.is_dir()]
    return numbered[max(existing)] if existing else None


def _check(output: str, name: str) -> None:
    if name in ("", "..") or Path(name).name != name:
        raise ValueError(f"name is the name of a folder in {output!r}, without a slash, got {name!r}")
