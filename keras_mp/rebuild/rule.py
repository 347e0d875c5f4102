"""What a rebuild is told, and how it fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Config = dict[str, Any]
Rule = Callable[[Config, Any], Config]


class RebuildError(ValueError):
    """A model cannot be rebuilt; the message names the layer and a remedy."""
