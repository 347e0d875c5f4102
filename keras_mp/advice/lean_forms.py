"""The lean form of a model, and whether it has one."""

from __future__ import annotations

import warnings

import keras

from keras_mp.lean.blocks import find_blocks
from keras_mp.lean.make_lean import lean_report, make_lean


def lean_model(model: keras.Model, *, remat: bool) -> keras.Model:
    """Makes a model lean, in place, with its blocks recomputed where `remat`."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"make_lean\(", UserWarning)  # of what cannot be lean
        return make_lean(model, remat=remat)


def lean_forms(model: keras.Model) -> tuple[bool, bool]:
    """Whether a layer of the model has a lean form, and whether it has blocks to recompute."""
    rows = lean_report(model).rows
    rematted = any(row.kind == "block" for row in rows)
    return any(not row.lean and not row.reason for row in rows), not rematted and bool(find_blocks(model))
