"""Text made to fit: names lose their middle, lists their names."""

from collections.abc import Sequence


def shorten_middle(text: str, width: int) -> str:
    """The text, or its beginning and its end around "..." where it is longer than `width` characters.

    Of a path the end is the layer's own name, the beginning the block that it is in.
    """
    if len(text) <= width:
        return text
    if width <= 4:
        return text[:width]
    end = (width - 2) // 2
    return f"{text[: width - 3 - end]}...{text[-end:]}"


def listed(names: Sequence[str], width: int, noun: str) -> str:
    """Names in words, "a, b and c"; where that is too long, "12 layers, a to c" with a noun such as "layers"."""
    text = f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else "".join(names)
    if len(text) <= width or len(names) < 2:
        return shorten_middle(text, width)
    count = f"{len(names)} {noun}"
    half = (width - len(f"{count},  to ")) // 2
    return f"{count}, {shorten_middle(names[0], half)} to {shorten_middle(names[-1], half)}"
