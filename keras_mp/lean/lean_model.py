"""Models whose parts keep less for the backward pass."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import keras

from keras_mp.lean.chunked_head import (
    CALLED_HEAD,
    NOTED_HEAD,
    ChunkedHead,
    forget_calls,
    prepare_head,
    why_not_called_head,
    why_not_head,
)
from keras_mp.lean.expert_blocks import EXPERTS, experts_mixin, experts_of
from keras_mp.lean.frozen import FROZEN
from keras_mp.lean.lean_layers import (
    LeanAttention,
    LeanGelu,
    LeanInt4,
    attends,
    is_int4,
    lean_gelu,
    why_not_attention,
    why_not_int4,
)
from keras_mp.lean.recompute import BLOCK
from keras_mp.lean.remat_blocks import SEGMENTS, choose_blocks, plan_blocks, recomputed_blocks
from keras_mp.lean.training_step import STEP, LeanStep
from keras_mp.rebuild.walk import LIBRARIES, LOW_PRECISION, Walk, original_class, package_of, treatments_of
from keras_mp.stability.attention import AttentionAsAsked
from keras_mp.stability.float32_layers import Float32Inside
from keras_mp.stability.sensitive import attending, is_router, logits_of_routers, names_in
from keras_mp.stability.stabilized import result_mixin
from keras_mp.treatment.change import ChangePlan, Planned, undo
from keras_mp.treatment.treated import Treatment, register_treatments
from keras_mp.treatment.waiting import register_calls, waits

# Which parts of a model can be lean, and why the others cannot.

ATTENTION, GELU, HEAD, INT4 = "lean attention", "lean gelu", "lean head", "lean int4"


# Others only hand their activation to layers that they create.
_APPLY_THEIR_ACTIVATION = (
    *(keras.layers.Activation, keras.layers.Dense, keras.layers.EinsumDense),
    *(keras.layers.Conv1D, keras.layers.Conv2D, keras.layers.Conv3D),
)


def lean_parts(walk: Walk) -> list[Planned]:
    """Lists layers, head and blocks, lean or not.

    Each is of a kind: "attention", "gelu", "int4" (a product of int4 weights), "experts" (of which each token chooses
    some), "head" (a layer that makes logits over a vocabulary, whose treatment is the model's) or "block" (recomputed).
    """
    parts = [part for path, layer in walk.layers.items() for part in _of_layer(path, layer)]
    blocks = [Planned(block.path, block.layers[0], {}, "", "block", True) for block in recomputed_blocks(walk.model)]
    return [*parts, *_head(walk), *blocks]


def _of_layer(path: str, layer: Any) -> Iterator[Planned]:
    treatments, cls = treatments_of(layer), original_class(layer)
    if attends(layer):
        reason = why_not_attention(layer, cls)
        yield _part(path, layer, "attention", ATTENTION, reason, ATTENTION in treatments)
    if GELU in treatments:
        yield _part(path, layer, "gelu", GELU, "", True)
    elif lean_gelu(vars(layer).get("activation")) is not None and issubclass(cls, _APPLY_THEIR_ACTIVATION):
        yield _part(path, layer, "gelu", GELU, "", False)
    elif package_of(cls) not in LIBRARIES and "gelu" in names_in(inspect.unwrap(cls.call).__code__):
        yield _part(path, layer, "gelu", GELU, f"{cls.__name__} has its GELU in its own code", False)
    if is_int4(layer):
        reason = why_not_int4(layer, treatments)
        yield _part(path, layer, "int4", INT4, reason, INT4 in treatments and not reason)
    experts, reason, options = experts_of(layer)
    if experts is not None:
        path = path if experts is layer else f"{path}/{experts.name}"
        yield _part(path, experts, "experts", EXPERTS, reason, EXPERTS in treatments_of(experts), options)


def _head(walk: Walk) -> list[Planned]:
    (head, reason), treatment = why_not_head(walk.model), HEAD
    if head is None:
        (head, reason), treatment = why_not_called_head(walk.model), CALLED_HEAD
    if head is None:
        return []
    path = next((path for path, layer in walk.layers.items() if layer is head), head.name)
    return [_part(path, head, "head", treatment, reason, treatment in treatments_of(walk.model))]


def _part(path: str, layer: Any, kind: str, treatment: str, reason: str, lean: bool, options: Any = None) -> Planned:
    return Planned(path, layer, {} if reason else {treatment: options}, reason, kind, lean)


REMATS = (BLOCK, SEGMENTS)
# Lean or not, attention is as asked; `stabilize` has treatments of the same classes, and each is undone alone.
AS_ASKED, ROUTER = "lean model's attention", "lean model's router"
LEAN = (ATTENTION, AS_ASKED, GELU, INT4, EXPERTS, ROUTER, HEAD, CALLED_HEAD, NOTED_HEAD, STEP, FROZEN, *REMATS)


def make_lean(model: keras.Model, remat: bool | Sequence[str] = False) -> keras.Model:
    """Lets a model keep less for the backward pass.

    Parts of it are changed in place.

    - Attention layers of Keras and KerasHub keep no scores; see `keras_mp.lean.attention`.
    - GELU as the activation of a layer keeps only its input.
    - Dense and EinsumDense layers of int4 weights keep these, and dequantize them again in the backward pass.
    - KerasHub's blocks of experts compute the chosen experts of each token alone, where they are few; their routers'
      logits, softmax and choice are in float32. See `keras_mp.lean.experts.chosen_experts`.
    - A model that ends in a vocabulary computes its loss, accuracy and perplexity a chunk of rows at a time, where it
      is compiled with `SparseCategoricalCrossentropy(from_logits=True)`.
    - With `remat`, blocks keep only what enters them and are recomputed in the backward pass, as by the function
      `remat`, under their own names: layers that repeat, such as those of a transformer, and stretches of a functional
      graph that repeat, such as the residual blocks of a ResNet. It takes the place of an earlier choice of blocks.

    Layers are lean in a training step of the model (`fit`, `train_on_batch`), and in any call with `training=True`.
    Losses and gradients stay the same, but for attention's dropout: from the same seeds it draws other masks than
    Keras, a new one each step, and none is kept. Inference, such as `generate`, runs the layers' own code. Where Keras
    has a kernel on the device that keeps no scores, such as flash attention, that is used.

    The weights are the model's own. A compiled model stays compiled, with its optimizer; the step that it has traced is
    dropped. The model is saved and loaded as usual, wherever `keras_mp` is imported after Keras; files of weights fit
    it and the plain model. `keras_mp.revert` undoes it.

    Args:
        model: a Keras model, before or after training, `stabilize`, `convert` or `enable_lora`. One that is not built
            is changed once it is: by `fit` or another call on its first batch.
        remat: whether blocks are recomputed; or patterns, as of file names, for the names or paths of the blocks to
            recompute: `remat=("transformer_layer_*",)`. A pattern that matches no block names layers.

    Returns:
        The model. Each layer that was changed is still an instance of its class. `keras_mp.report` lists them.

    Raises:
        TypeError, ValueError: If the model is no Keras model; if `remat` is neither a truth value nor patterns; if
            nothing matches one of them.

    Warns:
        UserWarning: If the model has nothing that can become lean, or no blocks.

    Examples:
        >>> import keras, keras_mp
        >>> x = inputs = keras.Input((16, 32))
        >>> x = keras.layers.MultiHeadAttention(2, 16)(x, x, use_causal_mask=True)
        >>> model = keras.Model(inputs, keras.layers.Dense(32, "gelu")(x))
        >>> print(keras_mp.report(keras_mp.lean.make_lean(model)))
        functional...; 2 of 2 parts are lean...
    """
    if waits(model, "make_lean", remat=remat):
        return model
    blocks = plan_blocks(choose_blocks(model, remat))
    if remat:
        undo(model, REMATS)
    plan = ChangePlan(model)
    parts = lean_parts(plan)
    for part in parts:
        if part.done:
            continue
        if CALLED_HEAD in part.treatments:
            plan.rows.append(part._replace(treatments={NOTED_HEAD: None}))  # first, as the model looks for it
        plan.rows.append(part._replace(layer=model) if part.kind == "head" else part)
    if any(EXPERTS in part.treatments for part in parts):
        routing = [*filter(is_router, plan.every), *logits_of_routers(plan)]
        plan.rows += [Planned("", one, {ROUTER: None}) for one in routing if one.compute_dtype in LOW_PRECISION]
    plan.rows += blocks
    wanted = any(row.treatments for row in plan.rows)
    if wanted:
        plan.rows.append(Planned("", model, {STEP: None}))
    plan.rows += [Planned("", part, {AS_ASKED: None}) for part in attending(plan)]
    plan.apply()
    if not wanted and not remat and not any(part.done for part in parts):
        reasons = dict.fromkeys(f"{part.path!r}: {part.reason}" for part in parts if part.reason)
        none = "It has no attention layer, no GELU, no int4 weights, no experts, and no large vocabulary"
        why = "; ".join(reasons) if parts else none
        warnings.warn(f"make_lean({model.name!r}): nothing in the model can become lean. {why}", stacklevel=2)
    return model


register_treatments(
    {
        ATTENTION: Treatment(lambda original, names: LeanAttention, order=-1),
        AS_ASKED: Treatment(lambda original, names: AttentionAsAsked),
        EXPERTS: Treatment(lambda original, names: experts_mixin(original), order=-1),
        ROUTER: Treatment(
            lambda original, names: (
                result_mixin(original, names) if issubclass(original, keras.layers.Dense) else Float32Inside
            )
        ),
        GELU: Treatment(lambda original, names: LeanGelu, order=-1),
        INT4: Treatment(lambda original, names: LeanInt4, order=-1),
        HEAD: Treatment(lambda original, names: ChunkedHead, prepare_head, forget_calls, order=-1),
        STEP: Treatment(lambda original, names: LeanStep, order=-1),
    }
)
register_calls({"make_lean": make_lean})
