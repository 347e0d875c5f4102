"""Chips by names that people, shops and runtimes write."""

import math
import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from keras_mp.precision.chip import GIB, Chip
from keras_mp.precision.chip_table import AMD_GPUS, GOOGLE_TPUS, NVIDIA_DATA_CENTER_GPUS, NVIDIA_DESKTOP_GPUS
from keras_mp.system.argument_checks import did_you_mean

CHIPS: Mapping[str, Chip] = MappingProxyType(
    {chip.name: chip for chip in (*GOOGLE_TPUS, *NVIDIA_DATA_CENTER_GPUS, *NVIDIA_DESKTOP_GPUS, *AMD_GPUS)}
)

# What people call chips beside their names and titles, words only.
_NICKNAMES = {
    "trillium": "v6e",
    "ironwood": "v7x",
    "tpu7x": "v7x",
    "v5 lite": "v5e",
    "v5lite": "v5e",
    "v5litepod": "v5e",
}
# Words of a name that change no figure. "Laptop", "Max-Q", "MIG", "SUPER", "Ti" and "D" do.
_PLAIN_WORDS = {
    *("google", "cloud", "tpu", "nvidia", "tesla", "geforce", "rtx", "amd", "instinct", "gpu"),
    *("hbm2", "hbm2e", "hbm3", "hbm3e"),
}
# Where a word begins that is written together with the one before it: TPUv5e, RTX4090, 4060Ti, 6000Ada.
_JOINTS = (r"tpu(?=v\d)", r"geforce(?=\D)", r"rtx(?=a?\d)", r"\d{4}(?=ti\b|super\b|ada\b|d\b)")
# Google counts the chips of a v5e or v6e slice in its name, and the TensorCores of the others, two a chip.
_CORES_IN_NAME = {"v2": 2, "v3": 2, "v4": 2, "v5p": 2, "v7x": 2}


def _name_words(text: str) -> list[str]:
    """Words in lower case; "16 GB" is one, "RTX4090" two."""
    lowered = re.sub(r"(\d+)\s*(?:gb|gib)\b", r" \1gb ", text.lower())
    for joint in _JOINTS:
        lowered = re.sub(f"({joint})", r"\1 ", lowered)
    return re.findall(r"[a-z0-9]+", lowered)


def _split_count(text: str) -> list[tuple[str, int | tuple[int, ...], bool]]:
    """The readings of a text: chip, number, Google's spelling."""
    # Of a slice ("v5e-2x4") the sides are the number; Google writes numbers after a dash.
    ways: list[tuple[str, int | tuple[int, ...], bool]] = []
    stripped = text.strip()
    if match := re.fullmatch(r"(\d+)\s*[xX×]\s*(.+)", stripped):
        ways.append((match[2], int(match[1]), False))
    if match := re.fullmatch(r"(.+?)\s*[xX×]\s*(\d+)", stripped):
        ways.append((match[1], int(match[2]), False))
    if match := re.fullmatch(r"(.+?)[-\s_:](\d+(?:x\d+){1,2})", stripped, re.IGNORECASE):
        ways.append((match[1], tuple(map(int, match[2].lower().split("x"))), True))
    if match := re.fullmatch(r"(.+?)-(\d+)", stripped):
        ways.append((match[1], int(match[2]), True))
    return ways


def _words_of(chip: Chip) -> set[str]:
    words = _name_words(" ".join([chip.name, chip.title, *chip.device_kinds]))
    sxm = ["sxm"] if any(re.fullmatch(r"sxm\d?", word) for word in words) else []
    return {*words, f"{chip.memory_bytes // GIB}gb", *_PLAIN_WORDS, *sxm}


def chip_name(text: str) -> str | None:
    """Reads a chip's name as people and runtimes write it.

    Returns:
        The key in `CHIPS`, or None where no chip is called so, or the text names a form with other figures (a laptop's
        GPU, a MIG slice).
    """
    words = _name_words(text)
    joined = " ".join(words)
    plain = " ".join(word for word in words if word not in _PLAIN_WORDS)
    if plain in _NICKNAMES:
        return _NICKNAMES[plain]
    for chip in CHIPS.values():
        if joined in (" ".join(_name_words(name)) for name in (chip.title, *chip.device_kinds)):
            return chip.name
    for chip in CHIPS.values():
        needed = set(_name_words(chip.name)) - _PLAIN_WORDS
        if needed <= set(words) <= _words_of(chip):
            return chip.name
    return None


def find_chip(name: str) -> Chip:
    """Looks a chip up by its name.

    Args:
        name: A key of `CHIPS`, such as "h100", or another spelling, such as "NVIDIA H100 80GB HBM3".

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
    """Reads a chip and how many of it.

    Args:
        text: A chip and a number, such as "h100", "h100x8", "4x RTX 4090", "v5e-8", "v5litepod-8" or "v5e-2x4". The
            number after the dash is Google's: it counts the chips of a v5e or v6e slice, and of the other TPUs the
            TensorCores, of which a chip has two ("v4-8" has 4 chips).

    Returns:
        The chip, and the number of chips; 1 where the text names none.
    """
    named = target_in(str(text))
    if named is not None:
        return named
    rest = [str(text), *(name for name, _, _ in _split_count(str(text)) if chip_name(name) is None)][-1]
    hint = nearest_hint(rest, CHIPS) or nearest_hint(str(text), CHIPS)
    raise ValueError(f"target={text!r} is not a known chip.{hint} Known: {', '.join(CHIPS)}.")


def target_in(text: str) -> tuple[Chip, int] | None:
    """Reads as `parse_target` does; None without such a chip."""
    whole = chip_name(text)
    if whole is not None:
        return CHIPS[whole], 1
    for name, number, dashed in _split_count(text):
        chip = CHIPS.get(chip_name(name) or "")
        if chip is None or (dashed and chip.vendor != "google"):
            continue
        if isinstance(number, tuple):
            return chip, math.prod(number)
        cores = _CORES_IN_NAME.get(chip.name, 1) if dashed else 1
        if number < 1 or number % cores:
            form = f"a name ends in a multiple of {cores}, its TensorCores" if cores > 1 else "the least is 1"
            raise ValueError(f"target={text!r} names {number / cores:g} {chip.title} chips: {form}")
        return chip, number // cores
    return None


def nearest_hint(text: str, names: Iterable[str]) -> str:
    """Asks whether a near name was meant; "" without one."""
    names = list(names)
    words = _name_words(str(text))
    told = [word for word in words if word not in _PLAIN_WORDS]
    whole = ["".join(words), "".join(told)]
    if told and told[0].isdecimal():  # "4080" is an RTX 4080
        whole.append("rtx" + "".join(told))
    return did_you_mean(text, names, *whole) or (did_you_mean(told[0], names, *told[1:]) if told else "")


def identify_chip(device_name: str) -> Chip | None:
    """Finds the chip behind a runtime's name for a device.

    It is None as `chip_name` is. Of an RTX 4060 Ti the name does not say its memory: the one with 8 GB.
    """
    return CHIPS.get(chip_name(device_name) or "")
