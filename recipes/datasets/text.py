"""Text as bytes, from what every Python brings, or from a file: nothing is downloaded.

`pydoc` is the language reference as `help()` shows it: 0.5 MB of English. `stdlib` is the source of the standard
library: 4 MiB of Python. Both differ a little from one Python to the next.
"""

import sysconfig
from pathlib import Path

import numpy as np

CORPORA = ("pydoc", "stdlib")
VOCABULARY = 256
STDLIB_BYTES = 4 * 2**20
# Tests and installed packages are not the library; a module with this prefix holds the paths of the machine.
NOT_STDLIB = ("test", "tests", "site-packages", "dist-packages", "idlelib", "lib2to3")
MACHINE_PREFIX = "_sysconfigdata"
VALIDATION_SHARE = 0.1


def read(corpus: str) -> bytes:
    """Reads a corpus.

    Args:
        corpus: `"pydoc"`, `"stdlib"` or the path of a file; any bytes will do.

    Returns:
        Its bytes, at least one.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is empty.
    """
    if corpus == "pydoc":
        return _pydoc()
    if corpus == "stdlib":
        return _stdlib()
    path = Path(corpus)
    if not path.is_file():
        raise FileNotFoundError(
            f"corpus is {', '.join(CORPORA)} or the path of a text file; there is no file {corpus!r}"
        )
    text = path.read_bytes()
    if not text:
        raise ValueError(f"corpus must hold text, but the file {corpus!r} is empty")
    return text


def split(text: bytes, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Cuts a text in two: the last tenth, in whole sequences, is for validation.

    Args:
        text: the corpus.
        length: bytes of a sequence.

    Returns:
        The training and the validation bytes, uint8, without overlap. The first validation byte is only seen, never
        predicted: the number of the others is a multiple of `length`.

    Raises:
        ValueError: either part would be shorter than one sequence.
    """
    sequences = int(VALIDATION_SHARE * len(text)) // length
    cut = len(text) - sequences * length - 1
    if sequences == 0 or cut <= length:
        raise ValueError(
            f"sequence_length must be at most {int(VALIDATION_SHARE * len(text))}, a tenth of this corpus of "
            f"{len(text)} bytes, got {length}"
        )
    data = np.frombuffer(text, np.uint8)
    return data[:cut], data[cut:]


def sequences(data: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Cuts bytes into sequences, each beside the bytes that follow its own.

    Args:
        data: uint8, shape `(bytes,)`.
        length: bytes of a sequence.

    Returns:
        Inputs and targets, int32, both of shape `((bytes - 1) // length, length)`: `targets[i, j]` follows
        `inputs[i, j]`. What is left over at the end is dropped.
    """
    count = (len(data) - 1) // length
    inputs, targets = data[: count * length], data[1 : count * length + 1]
    return tuple(part.reshape(count, length).astype(np.int32) for part in (inputs, targets))


def _pydoc():
    from pydoc_data.topics import topics

    return "\n\n".join(text for _, text in sorted(topics.items())).encode()


def _stdlib():
    """The library's files in the order of their paths, until there is enough."""
    folder = Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder).parts
        if set(parts).isdisjoint(NOT_STDLIB) and not path.name.startswith(MACHINE_PREFIX):
            text += path.read_bytes()
            if len(text) >= STDLIB_BYTES:
                break
    return bytes(text[:STDLIB_BYTES])
