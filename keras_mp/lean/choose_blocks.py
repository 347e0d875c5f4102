"""Which parts of a model are to be recomputed, and the treatments that make them so."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any

import keras

from keras_mp.lean.blocks import Block, find_blocks, layer_block, segment_block
from keras_mp.lean.remat import Remat
from keras_mp.lean.remat_blocks import BLOCK, SEGMENTS
from keras_mp.rebuild import layers_below, layers_by_path
from keras_mp.rebuild.notes import treatments_of
from keras_mp.rebuild.walk import calls_of, graph_of

Remats = bool | Sequence[str]


def choose_blocks(model: keras.Model, remat: Remats) -> list[Block]:
    """The blocks of a model that are to be recomputed.

    Args:
        model: a built Keras model.
        remat: True for all that `find_blocks` finds; or patterns such as "transformer_layer_*" for paths or names of
            blocks, and where no block has such a name, of layers.

    Raises:
        TypeError: `remat` is neither.
        ValueError: nothing matches a pattern; the message has the nearest names.

    Warns:
        UserWarning: the model has no blocks.
    """
    if isinstance(remat, bool):
        blocks = [block for group in find_blocks(model) for block in group] if remat else []
        if remat and not blocks and not any(isinstance(layer, Remat) for layer in layers_below(model)):
            warnings.warn(
                f"make_lean({model.name!r}, remat=True): nothing is recomputed, because no part of the model repeats; "
                "name the layers that are to be recomputed, as in remat=('encoder_*',)",
                stacklevel=3,
            )
        return blocks
    patterns = isinstance(remat, Iterable) and not isinstance(remat, str)
    if not patterns or not all(isinstance(pattern, str) for pattern in remat):
        raise TypeError(f"remat takes True, False, or patterns such as ('transformer_layer_*',); got {remat!r}")
    chosen: dict[str, Block] = {}
    for pattern in remat:
        chosen |= {block.path: block for block in _matching(model, pattern)}
    return _outermost(list(chosen.values()))


def _matching(model: keras.Model, pattern: str) -> list[Block]:
    blocks = [block for group in find_blocks(model) for block in group]
    layers = [layer_block(layer, path) for path, layer in layers_by_path(model).items() if layer.weights]
    for known in (blocks, layers):
        matching = [block for block in known if fnmatchcase(block.path, pattern) or fnmatchcase(block.name, pattern)]
        if matching:
            return matching
    names = list(dict.fromkeys(name for block in [*blocks, *layers] for name in (block.name, block.path)))
    near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.3) or names[:3]
    raise ValueError(
        f"remat: no block or layer of {model.name!r} matches {pattern!r}; nearest: {', '.join(map(repr, near))}"
    )


def _outermost(blocks: list[Block]) -> list[Block]:
    inside = {id(inner) for block in blocks for layer in block.layers for inner in _below(layer)}
    return [block for block in blocks if id(block.layers[0]) not in inside]


def _below(layer: keras.Operation) -> Sequence[keras.Layer]:
    return list(layers_below(layer)) if isinstance(layer, keras.layers.Layer) else []


def treatments_for(blocks: Sequence[Block]) -> list[tuple[Any, str, Any]]:
    """The layers and models to treat so that blocks recompute, each with the treatment and its options."""
    wanted: list[tuple[Any, str, Any]] = [(block.layers[0], BLOCK, None) for block in blocks if block.kind == "layer"]
    stretches: dict[int, tuple[Any, list[list[int]]]] = {}
    for block in blocks:
        if block.kind == "segment":
            order = [id(node) for node in calls_of(graph_of(block.graph))]  # type: ignore[arg-type]
            start = order.index(id(block.nodes[0]))
            _, places = stretches.setdefault(id(block.graph), (block.graph, []))
            places.append([start, start + len(block.nodes)])
    return wanted + [(graph, SEGMENTS, sorted(places)) for graph, places in stretches.values()]


def recomputed_blocks(model: keras.Model) -> list[Block]:
    """The layers and segments of a model that are recomputed, in the model's order."""
    blocks = []
    for path, layer in {"": model, **layers_by_path(model)}.items():
        names = treatments_of(layer)
        if BLOCK in names:
            blocks.append(layer_block(layer, path))
        segments = names.get(SEGMENTS) or []
        nodes: list[Any] = calls_of(graph_of(layer)) if segments and graph_of(layer) is not None else []
        blocks += [segment_block(layer, path, nodes[start:stop]) for start, stop in segments if nodes]
    return blocks
