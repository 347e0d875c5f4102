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
from keras_mp.lean.chunked_head import ChunkedHead, forget_calls, prepare_head
from keras_mp.lean.frozen import FROZEN
from keras_mp.lean.gelu_layers import LeanGelu
from keras_mp.lean.int4_layers import LeanInt4
from keras_mp.lean.phase import STEP, LeanStep
from keras_mp.rebuild import Config
from keras_mp.treatment.change import change, check_built, undo
from keras_mp.treatment.treated import Treatment, register_treatments, treat, untreated_node

# Of files of version 0.1.0: something inside, which no config shows, is lean.
CHILDREN = "lean children"
REMATS = (remat_blocks.BLOCK, remat_blocks.SEGMENTS, remat_blocks.CHILDREN)
LEAN = (ATTENTION, GELU, INT4, HEAD, CALLED_HEAD, NOTED_HEAD, STEP, CHILDREN, FROZEN, *REMATS)


def make_lean(model: keras.Model, remat: bool | Sequence[str] = False) -> keras.Model:
    """Lets attention, GELUs, int4 weights and the vocabulary of a model keep less for the backward pass, in place.

    - Attention layers of Keras and KerasHub keep no scores; see `keras_mp.lean.attention.attention`.
    - GELU as the activation of a layer keeps only its input.
    - Dense and EinsumDense layers of int4 weights keep these, and dequantize them again in the backward pass.
    - A model that ends in a vocabulary computes its loss, accuracy and perplexity a chunk of rows at a time, where it
      is compiled with `SparseCategoricalCrossentropy(from_logits=True)`.
    - With `remat`, blocks keep only what enters them and are recomputed in the backward pass, as by `keras_mp.remat`,
      under their own names: layers that repeat, such as those of a transformer, and stretches of a functional graph
      that repeat, such as the residual blocks of a ResNet. It takes the place of an earlier choice of blocks.

    Layers are lean in a training step of the model (`fit`, `train_on_batch`), and in any call with `training=True`.
    Losses and gradients stay the same. Inference, such as `generate`, runs the layers' own code. Where Keras has a
    kernel on the device that keeps no scores, such as flash attention, that is used.

    The weights are the model's own. A compiled model stays compiled, with its optimizer; the step that it has traced is
    dropped. The model is saved and loaded as usual, wherever `keras_mp` is imported; files of weights fit it and the
    plain model. `undo_lean` undoes it.

    Args:
        model: a built Keras model, before or after training, `stabilize`, `fp8.convert` or `enable_lora`.
        remat: whether blocks are recomputed; or patterns, as of file names, for the names or paths of the blocks that
            are: `remat=("transformer_layer_*",)`. A pattern that matches no block names layers.

    Returns:
        The model. Each layer that was changed is still an instance of its class. `lean_report` lists them.

    Raises:
        TypeError, ValueError: the model is not built; `remat` is neither a truth value nor patterns; nothing matches
            one of them.

    Warns:
        UserWarning: says that the model has nothing that can become lean, or no blocks.
    """
    check_built(model)
    blocks = treatments_for(choose_blocks(model, remat))
    if remat:
        undo(model, REMATS)
    parts = candidates(model)
    wanted: list[tuple[Any, dict[str, Any]]] = []
    for part in parts:
        if part.treatment and not part.lean:
            if part.treatment == CALLED_HEAD:
                wanted.append((part.layer, {NOTED_HEAD: None}))  # first, as the model looks for it
            wanted.append((model if part.kind == "head" else part.layer, {part.treatment: None}))
    wanted += [(layer, {name: options}) for layer, name, options in blocks]
    if wanted:
        wanted.append((model, {STEP: None}))
    change(model, wanted)
    if not wanted and not remat and not any(part.lean for part in parts):
        warnings.warn(
            f"make_lean({model.name!r}): nothing in the model can become lean. {_why_none(parts)}", stacklevel=2
        )
    return model


def undo_lean(model: keras.Model) -> keras.Model:
    """Undoes `make_lean` and `narrow_frozen`, in place.

    Args:
        model: a Keras model.

    Returns:
        The model.
    """
    undo(model, LEAN)
    return model


def plain_node(node: Config) -> Config:
    """Rewrites the config of a lean layer to that of the plain one; any other dict is returned as it is."""
    return untreated_node(node, LEAN)


def _why_none(parts: list[Any]) -> str:
    if not parts:
        return "It has no attention layer, no GELU, no int4 weights, and no large vocabulary"
    return "; ".join(dict.fromkeys(f"{part.path!r}: {part.reason}" for part in parts if part.reason))


def _make_lean_inside(layer: Any) -> None:
    for part in parts_below(layer):
        if part.treatment and not part.lean:
            treat(part.layer, {part.treatment: None})


register_treatments(
    {
        ATTENTION: Treatment(lambda original, names: attention_mixin(original), order=-1),
        GELU: Treatment(lambda original, names: LeanGelu, order=-1),
        INT4: Treatment(lambda original, names: LeanInt4, order=-1),
        HEAD: Treatment(lambda original, names: ChunkedHead, prepare_head, forget_calls, order=-1),
        STEP: Treatment(lambda original, names: LeanStep, order=-1),
        CHILDREN: Treatment(before_call=_make_lean_inside),
    }
)
