"""A number of bytes as people read it."""

_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


def byte_size(count: int) -> str:
    """A number of bytes in the largest unit of which it is at least one: "10 bytes", "12.3 KiB", "1.5 GiB"."""
    size, unit = float(count), 0
    # 1023.95 would be printed as 1024.0 of the smaller unit.
    while round(size, 1) >= 1024 and unit < len(_UNITS) - 1:
        size, unit = size / 1024, unit + 1
    return f"{count:,} bytes" if unit == 0 else f"{size:,.1f} {_UNITS[unit]}"
