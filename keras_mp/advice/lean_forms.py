"""The lean form of a model, and whether it has one."""

from __future__ import annotations

import keras


def lean_model(model: keras.Model, *, remat: bool) -> keras.Model:
    """The lean form of a model, with its blocks recomputed where `remat`."""
    raise NotImplementedError


def lean_forms(model: keras.Model) -> tuple[bool, bool]:
    """Whether a layer of the model has a lean form, and whether it has blocks to recompute."""
    return False, False
