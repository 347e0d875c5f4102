"""Packages: their versions, and the commands that install what is missing."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable
from pathlib import Path

_HERE = Path(__file__).resolve().parents[2]


def install_command(extra: str, *packages: str) -> str:
    """The command that installs an extra of keras-mp.

    Args:
        extra: the name of the extra, such as "jax", or several, "jax,data".
        packages: packages to install with it, such as "jax[cuda13]".

    Returns:
        `pip install -e ".[jax]"` in a clone, whose path stands for the point in another folder; else
        `pip install "keras-mp[jax]"`.
    """
    clone = clone_folder()
    if clone is None:
        kit = f'"keras-mp[{extra}]"'
    else:
        kit = f'-e "{"." if clone == Path.cwd() else clone}[{extra}]"'
    return " ".join(["pip install", kit, *(f'"{package}"' for package in packages)])


def clone_folder() -> Path | None:
    """Returns the clone's folder; None of a wheel."""
    project = _HERE / "pyproject.toml"
    try:
        return _HERE if 'name = "keras-mp"' in project.read_text() else None
    except OSError:
        return None


def installed(packages: Iterable[str]) -> dict[str, str]:
    """Looks up the versions of installed packages by pip's names."""
    versions = {}
    for package in packages:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions
