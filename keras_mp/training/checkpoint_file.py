"""A checkpoint on disk: named arrays and a JSON text in one file, which is whole or not there."""

from __future__ import annotations

import errno
import json
import os
import re
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from keras_mp.system.atomic_write import atomic_write

FORMAT = 1
_MANIFEST = "manifest.json"
_NAME = re.compile(r"epoch(\d{5,})-step(\d{8,})\.npz")


class Place(NamedTuple):
    """Epoch and its steps that are done, from 0."""

    epoch: int
    step: int

    def __str__(self) -> str:
        return f"epoch {self.epoch + 1}, step {self.step}"


def path_of(folder: Path, place: Place) -> Path:
    """The file of a place."""
    return folder / f"epoch{place.epoch:05}-step{place.step:08}.npz"


def checkpoints_in(folder: Path) -> list[Path]:
    """The checkpoints of a folder, the newest first."""
    # A folder or a pipe of such a name is none, and opening a pipe would wait for ever.
    paths = [path for path in folder.glob("*.npz") if _NAME.fullmatch(path.name) and path.is_file()]
    return sorted(paths, key=place_of, reverse=True)


def place_of(path: Path) -> Place:
    """The place that a file's name says."""
    match = _NAME.fullmatch(path.name)
    assert match, "only files that checkpoints_in() returned"
    return Place(int(match[1]), int(match[2]))


def write(path: Path, arrays: Iterable[tuple[str, np.ndarray]], manifest: dict[str, Any]) -> None:
    """Writes a checkpoint beside its place, and renames it.

    It is seen onto the disk before. It is a NumPy .npz archive, whose members each carry a checksum, with the manifest,
    which JSON can hold, as one more member. Dtypes that NumPy does not know, such as bfloat16, are kept as unsigned
    integers, and by name in the manifest. Arrays are taken one at a time.

    Raises:
        OSError: there is no room, or the folder cannot be written.
    """
    dtypes = {}
    with atomic_write(path) as partial:
        with partial.open("wb") as file:
            with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
                for name, array in arrays:
                    dtypes[name] = array.dtype.name
                    with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                        known = array if array.dtype.isbuiltin == 1 else array.view(f"u{array.dtype.itemsize}")
                        np.lib.format.write_array(member, known, allow_pickle=False)
                archive.writestr(_MANIFEST, json.dumps({**manifest, "format": FORMAT, "dtypes": dtypes}))
            file.flush()
            os.fsync(file.fileno())
    if hasattr(os, "O_DIRECTORY"):  # sees the new name onto the disk
        descriptor = os.open(path.parent, os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


class CheckpointError(ValueError):
    """A checkpoint that cannot be resumed, as the message says."""


class Reader:
    """A whole checkpoint, open for reading; a context manager.

    Args:
        check: whether to read all of it once, to compare the checksums; not needed for one that was checked before.

    Raises:
        CheckpointError: the file is damaged, cut short, or of another format.
        OSError: it cannot be read.
    """

    def __init__(self, path: Path, *, check: bool = True) -> None:
        file = path.open("rb")
        try:
            self._archive = zipfile.ZipFile(file)
            if check and (damaged := self._archive.testzip()):
                raise CheckpointError(f"its part {damaged} does not have its checksum")
            self.manifest = json.loads(self._archive.read(_MANIFEST))
            if self.manifest["format"] != FORMAT:
                raise CheckpointError(f"it has format {self.manifest['format']}, and this keras_mp reads {FORMAT}")
            parts = {_MANIFEST, *(f"{name}.npy" for name in self.manifest["dtypes"])}
            if different := sorted(parts.symmetric_difference(self._archive.namelist())):
                raise CheckpointError(f"its parts and its list of them differ in {different[0]!r}")
        except Exception as error:
            file.close()
            if isinstance(error, CheckpointError):
                raise
            # A flipped bit of the directory can look like a compression, a password or a length: zipfile raises seven
            # kinds of errors for them. A place before the file's beginning is EINVAL; others are the disk's.
            if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno != errno.EINVAL):
                raise
            raise CheckpointError(f"{type(error).__name__}: {error}") from error
        self._file = file

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *exception: Any) -> None:
        self._archive.close()
        self._file.close()

    @property
    def names(self) -> set[str]:
        """The names of the arrays."""
        return set(self.manifest["dtypes"])

    def __getitem__(self, name: str) -> np.ndarray:
        with self._archive.open(f"{name}.npy") as member:
            array = np.lib.format.read_array(member, allow_pickle=False)
        dtype = self.manifest["dtypes"][name]
        if array.dtype.name == dtype:
            return array
        import ml_dtypes  # comes with TensorFlow and with JAX, one of which wrote such an array

        return array.view(getattr(ml_dtypes, dtype))


def remove_partial(folder: Path) -> None:
    """Removes what a process that was killed left half written."""
    for path in folder.glob(".partial-*.npz"):
        path.unlink(missing_ok=True)
