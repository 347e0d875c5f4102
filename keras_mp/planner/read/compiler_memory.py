"""The memory of a step in the compiler's own words: what it writes before it generates code, and why it refuses."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

# The compiler's files, in the folder of a compilation; whoever started the compiler removes them when it has ended.
WRITTEN = "written"
_MODULE = "*after_optimizations.txt"
_BUFFERS = "*after_optimizations-buffer-assignment.txt"
# What is written behind them: by libtpu only if the step fits, for GPUs with the first kernel.
_LAST = {"tpu": "*.after_optimizations_after_buffer_assignment.txt", "cuda": "*.ir-no-opt.ll"}
_ALLOCATION = re.compile(r"^allocation \d+: size (\d+), (.*)$", re.MULTILINE)


def dumping_to(folder: Path) -> dict[str, object]:
    """The options of XLA with which the files are written."""
    return {"xla_dump_to": str(folder), "xla_dump_hlo_as_text": True}


def is_assigned(folder: Path, platform: str) -> bool:
    """Whether a compiler wrote whole files, and refused nothing."""
    return any(folder.glob(_LAST[platform]))


def compiled_text(folder: Path) -> str:
    """The compiled module, on TPUs without its kernels' cycles."""
    return _read(folder, _MODULE)


def assigned_memory(folder: Path, platform: str) -> dict[str, int]:
    """Statistics of the chip's main memory, without the code.

    For GPUs they are the same, but the peak has the gaps between arrays when memory is fullest. For TPUs there is no
    peak: that structure's own, of libtpu 0.0.42, has the chip's vector memory, and its temporary memory the gaps twice.
    """
    sizes, constants = dict.fromkeys(("argument", "output", "alias", "temp"), 0), 0
    for size, words in _ALLOCATION.findall(_read(folder, _BUFFERS)):
        if "color" in words or "thread-local" in words:  # in another memory, and inside of kernels
            continue
        if "constant" in words and platform == "cuda":  # beside the program
            constants += int(size)
            continue
        given, returned = "parameter" in words, "maybe-live-out" in words
        sizes["argument"] += int(size) * given
        sizes["output"] += int(size) * returned
        sizes["alias"] += int(size) * (given and returned)
        sizes["temp"] += int(size) * (not given and not returned)
    if platform == "cuda":
        sizes["peak_memory"] = sizes["argument"] + sizes["output"] - sizes["alias"] + sizes["temp"] + constants
    return sizes


def _read(folder: Path, pattern: str) -> str:
    # A step that does not fit is compiled again, with arrays computed twice.
    return max(folder.glob(pattern), key=lambda path: path.stat().st_mtime_ns).read_text()


_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
# libtpu's. With the arguments, although it speaks of temporaries: the sum of both, where both are known, is the figure.
_OUT_OF_MEMORY = re.compile(
    r"total memory required for HLO temporaries \(([\d.]+)([KMGT])\) exceeds available HBM \(([\d.]+)([KMGT])\)"
    r"|Used ([\d.]+)([KMGT]) of ([\d.]+)([KMGT]) hbm"
)


@dataclass(frozen=True)
class Refusal:
    """What the compiler says.

    Args:
        message: the part of the compiler's message that names the memory.
        needed: bytes of the step on one device, rounded by the compiler to a hundredth of its unit.
        available: bytes that the compiler leaves a program on one device; the runtime has the rest.
    """

    message: str
    needed: int
    available: int


def refusal_in(text: str) -> Refusal | None:
    """Finds a refusal in what a compiler printed, or None."""
    match = _OUT_OF_MEMORY.search(text)
    if match is None:
        return None
    numbers = [group for group in match.groups() if group is not None]
    needed, available = (int(float(numbers[place]) * _UNITS[numbers[place + 1]]) for place in (0, 2))
    return Refusal(match[0], needed, available)
