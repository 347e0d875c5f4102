"""The tables of the docs, from the JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def tables(path: Path) -> str:
    """One Markdown table a part, with how it ended."""
    content = json.loads(path.read_text())
    versions = ", ".join(f"{name} {text}" for name, text in content["versions"].items())
    parts = [_part(name, entry) for name, entry in content["parts"].items()]
    return "\n".join([f"`{content['command']}`: {versions}.\n", *parts])


def _part(name: str, entry: dict[str, Any]) -> str:
    ended = f"{entry['status']} after {entry['seconds']} s of at most {entry['limit_s']:g} s"
    lines = [f"**{name}**: {ended}" + (f" ({_cell(entry['error'])})" if entry["error"] else "") + "\n"]
    columns = list(dict.fromkeys(column for row in entry["rows"] for column in row))
    if columns:
        lines.append("| " + " | ".join(columns) + " |\n" + "| --- " * len(columns) + "|")
        lines += ["| " + " | ".join(_cell(row.get(column)) for column in columns) + " |" for row in entry["rows"]]
        lines.append("")
    return "\n".join(lines)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return "; ".join(f"{name}: {_cell(part)}" for name, part in value.items())
    return str(value).replace("|", "\\|").replace("\n", " ")
