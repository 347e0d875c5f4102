"""Writes tables into pages: `python benchmarks/results.py`. docs/tables/results.md gets those of
docs/results/*.json, docs/tables/chip-rates.md the chips of keras_mp.precision.chips,
docs/tables/narrow-products.md what keras_mp.fp8.selection predicts.

Each JSON file is one measurement: `title`, `command`, `date`, `machine`, `versions` (a package's name to its version),
`columns` and `rows`, and `note` where something must be said about it.
"""

import datetime
import json
import os
import platform
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- made by benchmarks/results.py -->", "<!-- end -->"
KEYS = {"title", "command", "date", "machine", "versions", "columns", "rows"}


def read(path: Path) -> dict:
    """Reads one measurement.

    Raises:
        ValueError: a key is missing or unknown, or a row has not as many cells as there are columns.
    """
    result = json.loads(path.read_text())
    missing, unknown = KEYS - result.keys(), result.keys() - KEYS - {"note"}
    if missing or unknown:
        raise ValueError(f"{path.name}: missing {sorted(missing)}, unknown {sorted(unknown)}; it needs {sorted(KEYS)}")
    wrong = [row for row in result["rows"] if len(row) != len(result["columns"])]
    if wrong:
        raise ValueError(f"{path.name}: {len(result['columns'])} columns, and the row {wrong[0]}")
    return result


def machine(processor: str = "") -> str:
    """This machine, as a result names it."""
    from keras_mp.system.host import cpu_name

    return f"{os.cpu_count()} cores of {processor or cpu_name()}"


def write(
    path: Path,
    title: str,
    command: str,
    columns: list[str],
    rows: list[list],
    versions: dict[str, str],
    note: str = "",
    on: str = "",
) -> None:
    """Writes one measurement of today, on this machine, or on one that is named."""
    from keras_mp.system.atomic_write import write_text

    result = {
        "title": title,
        "command": command,
        "date": datetime.date.today().isoformat(),
        "machine": on or machine(),
        "versions": {"python": platform.python_version(), **versions},
        "columns": columns,
        "rows": rows,
        **({"note": note} if note else {}),
    }
    write_text(json.dumps(result, indent=1) + "\n", path)
    read(path)


def section(name: str, result: dict) -> str:
    """A measurement as Markdown."""
    numbers = [
        all(isinstance(row[place], int | float) for row in result["rows"]) for place in range(len(result["rows"][0]))
    ]
    lines = [f"## {result['title']}", ""]
    lines.append("| " + " | ".join(map(str, result["columns"])) + " |")
    lines.append("|" + "|".join(" ---: " if number else " --- " for number in numbers) + "|")
    lines += ["| " + " | ".join(map(str, row)) + " |" for row in result["rows"]]
    versions = ", ".join(f"{package} {version}" for package, version in result["versions"].items())
    lines += ["", *([result["note"], ""] if result.get("note") else [])]
    lines += [f"{result['date']}, {result['machine']}; {versions}. `docs/results/{name}`:", ""]
    return "\n".join([*lines, "```", *result["command"].splitlines(), "```"])


def measurements() -> str:
    """All measurements, as Markdown."""
    files = sorted((ROOT / "docs" / "results").glob("*.json"))
    return "\n\n".join(section(path.name, read(path)) for path in files)


def chips() -> str:
    """The table of chips, as Markdown."""
    from keras_mp.precision.chip import TERA
    from keras_mp.precision.chips import CHIPS
    from keras_mp.precision.hardware import Device
    from keras_mp.precision.policy import choose_policy

    dtypes = ("float32", "tfloat32", "float16", "bfloat16", "fp8")
    lines = ["| chip | `auto` | " + " | ".join(dtypes) + " | memory |"]
    lines.append("| --- | --- |" + " ---: |" * (len(dtypes) + 1))
    for chip in CHIPS.values():
        device = Device("tpu" if chip.vendor == "google" else "gpu", chip.title, chip.architecture, chip)
        rates = [_four_digits(chip.peak[dtype] / TERA) if dtype in chip.peak else "" for dtype in dtypes]
        cells = [
            f"{chip.title} (`{chip.name}`)",
            choose_policy(device).policy,
            *rates,
            f"{chip.memory_bytes / 2**30:.0f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _four_digits(rate: float) -> str:
    return f"{rate:,.4g}" if rate < 9999.5 else f"{rate:,.0f}"


def gains() -> str:
    """How many times as fast as bfloat16 the kit predicts a square layer in FP8 to be on an H100, as Markdown."""
    from keras_mp.fp8 import Scalings
    from keras_mp.fp8.selection import step_cost
    from keras_mp.precision.chips import find_chip

    widths = (256, 512, 1024, 2048, 4096, 8192)
    lines = ["| rows | scaling | " + " | ".join(f"{width} x {width}" for width in widths) + " |"]
    lines.append("| ---: | --- |" + " ---: |" * len(widths))
    for rows in (512, 4096, 32768):
        for name in ("current", "delayed", "rowwise"):
            gains = [step_cost(rows, width, width, find_chip("h100"), Scalings.named(name)).gain for width in widths]
            lines.append(f"| {rows} | {name} | " + " | ".join(f"{gain:.2f}" for gain in gains) + " |")
    return "\n".join(lines)


def make_table(columns: Sequence[str], words: int, rows: Iterable[str], script: str, path: Path | None) -> None:
    """Prints the rows of a script's table as they are made, and writes it to a page where one is given.

    Args:
        words: the number of columns that hold words; the others hold numbers.
    """
    lines = ["| " + " | ".join(columns) + " |", "|" + " --- |" * words + " ---: |" * (len(columns) - words)]
    for row in rows:
        lines.append(row)
        print(row, flush=True)
    if path:
        put_table(path, script, lines)


def put_table(path: Path, script: str, lines: list[str]) -> None:
    """Replaces the table of a script on a page, between two marks."""
    before, rest = path.read_text().split(f"<!-- table of benchmarks/{script} -->")
    after = rest.partition("<!-- end of table -->")[2]
    path.write_text(
        "\n".join([f"{before}<!-- table of benchmarks/{script} -->", "", *lines, "", f"<!-- end of table -->{after}"])
    )


TABLES = {"tables/results.md": measurements, "tables/chip-rates.md": chips, "tables/narrow-products.md": gains}


def page(name: str) -> str:
    """A page with its tables made anew."""
    before, rest = (ROOT / "docs" / name).read_text().split(BEGIN)
    made = TABLES[name]()
    return "\n\n".join([before + BEGIN, *([made] if made else []), END + rest.split(END)[1]])


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    from keras_mp.system.quiet_import import import_keras

    import_keras()
    for name in TABLES:
        (ROOT / "docs" / name).write_text(page(name))
