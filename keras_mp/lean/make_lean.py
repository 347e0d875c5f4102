"""A model whose attention, GELUs, int4 weights and vocabulary keep less for the backward pass, and the way back."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import keras

from keras_mp.lean import remat_blocks
from keras_mp.lean.attention_layers import attention_mixin
from keras_mp.lean.called_head import CALLED_HEAD, NOTED_HEAD
from keras_mp.lean.candidates import ATTENTION, GELU, HEAD, INT4, candidates, parts_below
from keras_mp.lean.choose_blocks import choose_blocks, treatments_for
from keras_mp.lean.chunked_head import ChunkedHead, prepare_head
from keras_mp.lean.gelu_layers import LeanGelu
from keras_mp.lean.int4_layers import LeanInt4
from keras_mp.lean.phase import STEP, LeanStep
from keras_mp.lean.remat_blocks import children_name, places_below
from keras_mp.rebuild import Config, is_built, rebuild
from keras_mp.rebuild.treated import (
    Reached,
    Treatment,
    register_treatments,
    treat,
    treated_node,
    untreated_node,
)

CHILDREN = "lean children"
REMATS = (remat_blocks.BLOCK, remat_blocks.SEGMENTS, remat_blocks.CHILDREN)


def make_lean(model: keras.Model, remat: bool | Sequence[str] = False) -> keras.Model:
    """Returns a new model whose attention, GELUs, int4 weights and vocabulary head keep less for the backward pass.

    - Attention layers of Keras and KerasHub keep no scores; see `keras_mp.lean.attention.attention`.
    - GELU as the activation of a layer keeps only its input.
    - Dense and EinsumDense layers of int4 weights keep these, and dequantize them again in the backward pass.
    - A model that ends in a vocabulary computes its loss, accuracy and perplexity a chunk of rows at a time, where it
      is compiled with `SparseCategoricalCrossentropy(from_logits=True)`.
    - With `remat`, blocks keep only what enters them and are recomputed in the backward pass, as by `keras_mp.remat`,
      under their own names: layers that repeat, such as those of a transformer, and stretches of a functional graph
      that repeat, such as the residual blocks of a ResNet.

    Layers are lean in a training step of the new model (`fit`, `train_on_batch`), and in any call with `training=True`.
    Losses and gradients stay the same. Inference, such as `generate`, runs the layers' own code. Where Keras has a
    kernel on the device that keeps no scores, such as flash attention, that is used.

    Weights, names, shared layers, compile arguments and optimizer state are carried over; the original is not changed.
    The result is saved and loaded as usual, wherever `keras_mp` is imported; files of weights fit both models.

    Args:
        model: a built Keras model, before or after training, `stabilize`, `fp8.convert` or `enable_lora`.
        remat: whether blocks are recomputed; or patterns, as of file names, for the names or paths of the blocks that
            are: `remat=("transformer_layer_*",)`. A pattern that matches no block names layers.

    Returns:
        The new model. Each layer that was changed is still an instance of its class. `lean_report` lists them.

    Raises:
        RebuildError: the model is not built, or has a layer that cannot be rebuilt; the message names it.
        TypeError, ValueError: `remat` is neither a truth value nor patterns; nothing matches one of them.

    Warns:
        UserWarning: names what could not be carried over; or says that the model has nothing that can become lean, or
            no blocks.
    """
    blocks = treatments_for(choose_blocks(model, remat)) if is_built(model) else {}
    parts = candidates(model)
    needed: dict[int, list[str]] = {}
    for part in parts:
        if part.treatment and not part.lean:
            owner = model if part.kind == "head" else part.layer
            needed.setdefault(id(owner), []).append(part.treatment)
    reached, blocks_reached = Reached(), Reached()

    def rule(node: Config, layer: Any) -> Config:
        if layer is None:
            return node
        if remat:
            node = untreated_node(node, REMATS)
        hidden = reached.hidden_below(layer, needed)
        treatments = [*needed.get(id(layer), ()), *([CHILDREN] if hidden else [])]
        if layer is model and (needed or blocks):
            treatments.append(STEP)
        hidden = blocks_reached.hidden_below(layer, blocks)
        if hidden:
            places = places_below(layer)
            treatments.append(children_name({places[key]: blocks[key] for key in hidden}))
        if id(layer) in blocks:
            treatments.append(blocks[id(layer)])
        return treated_node(node, layer, treatments, _precision(layer))

    new, unreached, _ = rebuild(model, rule)
    if unreached:
        warnings.warn(f"make_lean({model.name!r}) could not reach everything: {'; '.join(unreached)}", stacklevel=2)
    if not needed and not remat and not any(part.lean for part in parts):
        warnings.warn(
            f"make_lean({model.name!r}): nothing in the model can become lean. {_why_none(parts)}", stacklevel=2
        )
    return new


def undo_lean(model: keras.Model) -> keras.Model:
    """Returns a new model with the plain layers that `make_lean` made lean.

    Args:
        model: a built Keras model.

    Returns:
        The new model: weights, compile arguments and optimizer state are carried over.

    Raises:
        RebuildError: as for `make_lean`.

    Warns:
        UserWarning: names what could not be carried over.
    """
    new, unreached, _ = rebuild(model, lambda node, layer: plain_node(node))
    if unreached:
        warnings.warn(f"undo_lean({model.name!r}) could not reach everything: {'; '.join(unreached)}", stacklevel=2)
    return new


def plain_node(node: Config) -> Config:
    """Rewrites the config of a lean layer to that of the plain one; any other dict is returned as it is."""
    return untreated_node(node, (ATTENTION, GELU, INT4, HEAD, CALLED_HEAD, NOTED_HEAD, STEP, CHILDREN, *REMATS))


def _precision(layer: Any) -> str:
    return layer.compute_dtype if isinstance(layer, keras.layers.Layer) else "float32"


def _why_none(parts: list[Any]) -> str:
    if not parts:
        return "It has no attention layer, no GELU, no int4 weights, and no large vocabulary"
    return "; ".join(dict.fromkeys(f"{part.path!r}: {part.reason}" for part in parts if part.reason))


def _make_children_lean(layer: Any) -> None:
    for part in parts_below(layer):
        if part.treatment and not part.lean:
            precision = getattr(part.layer, "_precision", part.layer.compute_dtype)
            treat(part.layer, [part.treatment], precision)


register_treatments(
    {
        ATTENTION: Treatment(attention_mixin, outermost=True),
        GELU: Treatment(lambda original: LeanGelu, outermost=True),
        INT4: Treatment(lambda original: LeanInt4, outermost=True),
        HEAD: Treatment(lambda original: ChunkedHead, prepare_head, outermost=True),
        STEP: Treatment(lambda original: LeanStep, outermost=True),
        # Sublayers that no config shows.
        CHILDREN: Treatment(children=_make_children_lean),
    }
)
