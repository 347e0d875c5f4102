"""Which parts of a model can be lean, and why the others cannot."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any, NamedTuple

import keras

from keras_mp.lean.attention_layers import attends, why_not_attention
from keras_mp.lean.called_head import CALLED_HEAD, why_not_called_head
from keras_mp.lean.choose_blocks import recomputed_blocks
from keras_mp.lean.chunked_head import why_not_head
from keras_mp.lean.gelu_layers import lean_gelu
from keras_mp.lean.int4_layers import is_int4, why_not_int4
from keras_mp.lean.remat import Remat
from keras_mp.rebuild import layers_by_path
from keras_mp.rebuild.notes import original_class, treatments_of
from keras_mp.stability.sensitive import names_in

ATTENTION, GELU, HEAD, INT4 = "lean attention", "lean gelu", "lean head", "lean int4"


class Candidate(NamedTuple):
    """A part of a model that keeps much for the backward pass.

    Attributes:
        path: the names that lead to the layer, joined with `/`.
        layer: the live layer.
        kind: "attention", "gelu", "int4", "head" or "block".
        treatment: what makes it lean, by the names in `keras_mp.lean.make_lean`; empty where nothing does.
        lean: whether it is.
        reason: why it cannot be; empty where it can.
    """

    path: str
    layer: keras.layers.Layer
    kind: str
    treatment: str
    lean: bool
    reason: str


def candidates(model: keras.Model) -> list[Candidate]:
    """The parts of a model that are lean or could be, in the model's order; its head behind them, then its blocks."""
    blocks = [Candidate(block.path, block.layers[0], "block", "", True, "") for block in recomputed_blocks(model)]
    return [*parts_below(model), *_head(model), *blocks]


def parts_below(layer: keras.layers.Layer) -> list[Candidate]:
    """The attention layers, GELUs and int4 products below a layer that are lean or could be."""
    return [part for path, inner in layers_by_path(layer).items() for part in _of_layer(path, inner)]


def _of_layer(path: str, layer: Any) -> Iterator[Candidate]:
    treatments, cls = treatments_of(layer), original_class(layer)
    if isinstance(layer, Remat):
        yield Candidate(path, layer, "block", "", True, "")
    elif attends(layer):
        reason = why_not_attention(layer, cls)
        yield Candidate(path, layer, "attention", "" if reason else ATTENTION, ATTENTION in treatments, reason)
    if GELU in treatments:
        yield Candidate(path, layer, "gelu", GELU, True, "")
    elif lean_gelu(vars(layer).get("activation")) is not None and _applies_its_activation(cls):
        yield Candidate(path, layer, "gelu", GELU, False, "")
    elif _calls_gelu(cls):
        yield Candidate(path, layer, "gelu", "", False, f"{cls.__name__} computes it in code of its own")
    if is_int4(layer):
        reason = why_not_int4(layer, treatments)
        yield Candidate(path, layer, "int4", "" if reason else INT4, INT4 in treatments and not reason, reason)


def _applies_its_activation(cls: Any) -> bool:
    """Whether a layer computes with its activation, and does not only hand it to the layers that it creates."""
    keras_own = (keras.layers.Activation, keras.layers.Dense, keras.layers.EinsumDense, keras.layers.Conv1D)
    return issubclass(cls, (*keras_own, keras.layers.Conv2D, keras.layers.Conv3D))


def _calls_gelu(cls: Any) -> bool:
    own = not cls.__module__.startswith(("keras.", "keras_mp."))
    return own and "gelu" in names_in(inspect.unwrap(cls.call).__code__)


def _head(model: keras.Model) -> list[Candidate]:
    (head, reason), treatment = why_not_head(model), HEAD
    if head is None:
        head, reason = why_not_called_head(model)
        treatment = CALLED_HEAD
    if head is None:
        return []
    path = next((path for path, layer in layers_by_path(model).items() if layer is head), head.name)
    lean = treatment in treatments_of(model)
    return [Candidate(path, head, "head", "" if reason else treatment, lean, reason)]
