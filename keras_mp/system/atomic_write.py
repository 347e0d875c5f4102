"""Atomic file writes: a file is complete or absent."""

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Opens a path that is renamed when all is written.

    It becomes `path` when the block ends well, and vanishes when it does not.
    """
    # Of its own: another process may be writing to the same path.
    partial = path.with_name(f".partial-{secrets.token_hex(4)}-{path.name}")
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def write_text(text: str, path: Path) -> Path:
    """Writes a file beside its place, then moves it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as partial:
        partial.write_text(text, encoding="utf-8")
    return path


@contextmanager
def parents_made(path: Path) -> Iterator[None]:
    """Makes a path's folders; removes them after an error."""
    missing = [folder for folder in path.absolute().parents if not folder.exists()]
    path.absolute().parent.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        for folder in missing:
            try:
                folder.rmdir()
            except OSError:  # another's file is in it
                break
        raise
