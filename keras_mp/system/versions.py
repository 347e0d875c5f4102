"""The versions of installed packages."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable


def installed(packages: Iterable[str]) -> dict[str, str]:
    """Looks up versions.

    Args:
        packages: names, as pip knows them.

    Returns:
        The version of each package that is installed, by its name.
    """
    versions = {}
    for package in packages:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions
