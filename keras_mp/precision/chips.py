"""A table of chips: the dtypes that each multiplies in, its rates and its memory, with their sources."""

import difflib
import math
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from keras_mp.precision.amd_gpus import AMD_GPUS
from keras_mp.precision.chip import GIB, GIGA, TERA, Chip, GpuDescription, TpuSlices
from keras_mp.precision.chip_names import PLAIN_WORDS, cores_in_name, name_among, name_words, split_count
from keras_mp.precision.google_tpus import GOOGLE_TPUS
from keras_mp.precision.nvidia_data_center_gpus import NVIDIA_DATA_CENTER_GPUS
from keras_mp.precision.nvidia_desktop_gpus import NVIDIA_DESKTOP_GPUS

__all__ = [
    "CHIPS",
    "GIB",
    "GIGA",
    "TERA",
    "Chip",
    "GpuDescription",
    "TpuSlices",
    "chip_name",
    "find_chip",
    "identify_chip",
    "nearest_hint",
    "parse_target",
]

CHIPS: Mapping[str, Chip] = MappingProxyType(
    {chip.name: chip for chip in (*GOOGLE_TPUS, *NVIDIA_DATA_CENTER_GPUS, *NVIDIA_DESKTOP_GPUS, *AMD_GPUS)}
)


def chip_name(text: str) -> str | None:
    """Reads a chip's name as people and runtimes write it.

    Args:
        text: Such as "H100", "NVIDIA H100 80GB HBM3", "RTX 4090", "a100-40gb", "TPU v5e" or "TPU v5 lite".

    Returns:
        The key in `CHIPS`, or None where no chip is called so, or the text names a form with other figures (a laptop's
        GPU, a MIG slice).
    """
    return name_among(CHIPS.values(), text)


def find_chip(name: str) -> Chip:
    """Looks a chip up by its name.

    Args:
        name: A key of `CHIPS`, such as "h100", or another spelling that `chip_name` reads.

    Returns:
        The chip.

    Raises:
        ValueError: If there is no such chip; the message lists those there are, and the nearest.
    """
    known = chip_name(str(name))
    if known is None:
        raise ValueError(f"name={name!r} is not a known chip.{nearest_hint(name, CHIPS)} Known: {', '.join(CHIPS)}.")
    return CHIPS[known]


def parse_target(text: str) -> tuple[Chip, int]:
    """Reads a chip and how many of it, as people write both.

    Args:
        text: Such as "h100", "h100x8", "4x RTX 4090", "v5e-8", "v5litepod-8" or "v5e-2x4". The number after the dash is
            Google's: it counts the chips of a v5e or v6e slice, and of the other TPUs the TensorCores, of which a chip
            has two ("v4-8" has 4 chips).

    Returns:
        The chip, and the number of chips; 1 where the text names none.

    Raises:
        ValueError: If there is no such chip, the message then lists those there are, and the nearest; or no such
            number of them.
    """
    whole = chip_name(str(text))
    if whole is not None:
        return CHIPS[whole], 1
    rest = str(text)
    for name, number, dashed in split_count(str(text)):
        chip = CHIPS.get(chip_name(name) or "")
        if chip is None or (dashed and chip.vendor != "google"):
            rest = name if chip is None else rest
            continue
        if isinstance(number, tuple):
            return chip, math.prod(number)
        cores = cores_in_name(chip) if dashed else 1
        if number < 1 or number % cores:
            form = f"a name ends in a multiple of {cores}, its TensorCores" if cores > 1 else "the least is 1"
            raise ValueError(f"target={text!r} names {number / cores:g} {chip.title} chips: {form}")
        return chip, number // cores
    hint = nearest_hint(rest, CHIPS) or nearest_hint(str(text), CHIPS)
    raise ValueError(f"target={text!r} is not a known chip.{hint} Known: {', '.join(CHIPS)}.")


def nearest_hint(text: str, names: Iterable[str]) -> str:
    """The question whether a name was meant that a text, or a word of it, comes near to; "" where none is near."""
    names = list(names)
    words = name_words(str(text))
    told = [word for word in words if word not in PLAIN_WORDS]
    whole = [str(text).lower(), "".join(words), "".join(told)]
    if told and told[0].isdecimal():  # "4080" is an RTX 4080
        whole.append("rtx" + "".join(told))
    for wanted in (whole, told):
        near = list(dict.fromkeys(name for word in wanted for name in difflib.get_close_matches(word, names, n=1)))
        if near:
            return f" Did you mean {' or '.join(map(repr, near))}?"
    return ""


def identify_chip(device_name: str) -> Chip | None:
    """Finds the chip behind the name that a runtime gives a device.

    Args:
        device_name: Such as "NVIDIA H100 80GB HBM3", "NVIDIA GeForce RTX 4090" or "TPU v5 lite".

    Returns:
        The chip, or None where the name is not in the table or is of a form with other figures (a laptop's GPU, a
        MIG slice). Of an RTX 4060 Ti the name does not say its memory: the one with 8 GB.
    """
    return CHIPS.get(chip_name(device_name) or "")
