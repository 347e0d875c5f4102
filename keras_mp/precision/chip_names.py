"""Reads the names of chips as people, shops and runtimes write them."""

import re
from collections.abc import Iterable, Sequence

from keras_mp.precision.chip import GIB, Chip

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
PLAIN_WORDS = {
    *("google", "cloud", "tpu", "nvidia", "tesla", "geforce", "rtx", "amd", "instinct", "gpu"),
    *("hbm2", "hbm2e", "hbm3", "hbm3e"),
}
# Where a word begins that is written together with the one before it: TPUv5e, RTX4090, 4060Ti, 6000Ada.
_JOINTS = (r"tpu(?=v\d)", r"geforce(?=\D)", r"rtx(?=a?\d)", r"\d{4}(?=ti\b|super\b|ada\b|d\b)")
# Google counts the chips of a v5e or v6e slice in its name, and the TensorCores of the others, two a chip.
_CORES_IN_NAME = {"v2": 2, "v3": 2, "v4": 2, "v5p": 2, "v7x": 2}


def name_among(chips: Iterable[Chip], text: str) -> str | None:
    """Finds the chip that a text names: all words of the chip's name are in it, and no word that is not the chip's.

    Args:
        chips: those that may be meant.
        text: such as "H100", "NVIDIA H100 80GB HBM3", "rtx4090" or "TPU v5 lite".

    Returns:
        The chip's name, or None where the text names none of them, or a form with other figures.
    """
    words = name_words(text)
    joined = " ".join(words)
    plain = " ".join(word for word in words if word not in PLAIN_WORDS)
    if plain in _NICKNAMES:
        return _NICKNAMES[plain]
    for chip in chips:
        if joined in (" ".join(name_words(name)) for name in (chip.title, *chip.device_kinds)):
            return chip.name
    for chip in chips:
        needed = set(name_words(chip.name)) - PLAIN_WORDS
        if needed <= set(words) <= _words_of(chip):
            return chip.name
    return None


def name_words(text: str) -> list[str]:
    """The words of a name in lower case; "16 GB" is one word, "RTX4090" two."""
    lowered = re.sub(r"(\d+)\s*(?:gb|gib)\b", r" \1gb ", text.lower())
    for joint in _JOINTS:
        lowered = re.sub(f"({joint})", r"\1 ", lowered)
    return re.findall(r"[a-z0-9]+", lowered)


def split_count(text: str) -> list[tuple[str, int | tuple[int, ...], bool]]:
    """The ways to read a text as a chip and a number of chips.

    Returns:
        For each way the name, the number, or the sides of a slice ("v5e-2x4"), and whether the number is written as
        Google writes it, after a dash.
    """
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


def cores_in_name(chip: Chip) -> int:
    """By how much the number in a slice's name is larger than its number of chips: 2 for "v4-8", 1 for "v5e-8"."""
    return _CORES_IN_NAME.get(chip.name, 1)


def _words_of(chip: Chip) -> set[str]:
    words = name_words(" ".join([chip.name, chip.title, *chip.device_kinds]))
    sizes = [f"{chip.memory_bytes // GIB}gb"]
    return {*words, *sizes, *PLAIN_WORDS, *(["sxm"] if _is_sxm(words) else [])}


def _is_sxm(words: Sequence[str]) -> bool:
    return any(re.fullmatch(r"sxm\d?", word) for word in words)
