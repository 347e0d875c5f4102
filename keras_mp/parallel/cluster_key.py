"""The secret that the processes of a training share, and the proofs that a process has it."""

from __future__ import annotations

import hmac
import os
import secrets
import stat
import time
from pathlib import Path

from keras_mp.parallel.cluster import ClusterError

VARIABLE = "KERAS_MP_CLUSTER_KEY"
FILE = ".keras_mp_cluster_key"
SHORTEST = 16  # characters


def cluster_key(folder: Path, is_first: bool, deadline: float) -> bytes:
    """Reads the key: from the variable KERAS_MP_CLUSTER_KEY, else from a file that the first process makes.

    Args:
        folder: a folder that all processes share; the file `.keras_mp_cluster_key` in it is the user's alone, mode 600.
        is_first: whether this process makes the file where it is missing; the others wait for it.
        deadline: until when they wait, in seconds of `time.monotonic()`.

    Raises:
        ClusterError: the variable is too short, the file never appears, or others can read it.
        OSError: the folder cannot be written.
    """
    if text := os.environ.get(VARIABLE):
        if len(text) < SHORTEST:
            raise ClusterError(
                f"{VARIABLE} has {len(text)} characters, and needs at least {SHORTEST}: set it to the same random text "
                "in all processes, such as that of `openssl rand -hex 32`"
            )
        return text.encode()
    path = folder.absolute() / FILE
    if is_first:
        _make(path)
    while not path.exists():
        if time.monotonic() > deadline:
            raise ClusterError(
                f"{path} does not appear: the first process makes it, in a folder that all share. Where there is none, "
                f"set the variable {VARIABLE} to the same random text in all processes"
            )
        time.sleep(0.1)
    if os.name == "posix":
        status = path.stat()
        if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
            raise ClusterError(
                f"{path} must be yours and readable by nobody else, and it has owner {status.st_uid} and mode "
                f"{stat.S_IMODE(status.st_mode):o}: remove it, and the first process makes another"
            )
    return path.read_bytes()


def _make(path: Path) -> None:
    """Makes a file with a new key, whole as soon as its name is there; one that is there stays."""
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}-{secrets.token_hex(4)}")
    descriptor = os.open(partial, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_hex(32))
        try:
            os.link(partial, path)
        except FileExistsError:
            pass
    finally:
        partial.unlink()


def proof(key: bytes, *said: object) -> str:
    """The HMAC-SHA256 of what was said in both directions, in hexadecimal digits; the key itself is never sent."""
    return hmac.new(key, repr(said).encode(), "sha256").hexdigest()


def is_proof(given: object, key: bytes, *said: object) -> bool:
    """Whether another process, which sent `given`, has the key."""
    # JSON can hold half of a pair of surrogates, which UTF-8 cannot.
    return isinstance(given, str) and hmac.compare_digest(given.encode(errors="replace"), proof(key, *said).encode())
