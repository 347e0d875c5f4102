"""`convert`: a model whose products run in FP8, and back."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras

from keras_mp.fp8.layers import Float8Layer, build_history, set_history
from keras_mp.fp8.scaling import Scaling, Scalings, get_scalings, problem
from keras_mp.fp8.selection import Decision, Select, Target, decide
from keras_mp.precision.hardware import MXFP8, current_device, support
from keras_mp.rebuild.walk import FLOAT8, QAT, Walk, layers_by_path, original_class, precision_of_layer, treatments_of
from keras_mp.system.argument_checks import whole_number
from keras_mp.treatment.change import ChangePlan, Planned
from keras_mp.treatment.treated import Treatment, rebase, register_treatments, treat
from keras_mp.treatment.waiting import call, register_calls, waits

# FP8 as a treatment of a layer.

register_treatments(
    {
        FLOAT8: Treatment(
            lambda original, names: Float8Layer,
            undo=lambda layer: set_history(layer, None),
            built=build_history,
            order=1,
            write=keras.saving.serialize_keras_object,
            read=get_scalings,
        )
    }
)


def Float8Dense(*args: Any, scaling: str | Scaling | Scalings | None = None, **kwargs: Any) -> keras.layers.Dense:  # noqa: N802
    """`keras.layers.Dense` with products in FP8.

    It is what `convert` makes of a Dense layer, for a model that is written with it: saved, reverted and exported as
    that, with everything but the products as in Dense.

    Args:
        *args: the arguments of `keras.layers.Dense`.
        scaling: the scalings of the products, as for `convert`.
        **kwargs: further arguments of `keras.layers.Dense`.

    Raises:
        ValueError: If there is no such scaling.

    Examples:
        >>> import keras, keras_mp
        >>> model = keras.Sequential([keras.Input((16,)), keras_mp.layers.Float8Dense(16, "relu", scaling="delayed")])
        >>> isinstance(model.layers[0], keras.layers.Dense)
        True
    """
    return treat(keras.layers.Dense(*args, **kwargs), {FLOAT8: get_scalings(scaling)})


def Float8EinsumDense(  # noqa: N802
    *args: Any, scaling: str | Scaling | Scalings | None = None, **kwargs: Any
) -> keras.layers.EinsumDense:
    """`keras.layers.EinsumDense` with products in FP8.

    It is what `convert` makes of an EinsumDense layer, for a model that is written with it.

    Args:
        *args: the arguments of `keras.layers.EinsumDense`.
        scaling: the scalings of the products, as for `convert`.
        **kwargs: further arguments of `keras.layers.EinsumDense`.

    Raises:
        ValueError: If there is no such scaling, or the equation is none of a product of inputs and a kernel.
    """
    layer = keras.layers.EinsumDense(*args, **kwargs)
    if why := problem(layer.equation):
        raise ValueError(f"{why}: an FP8 product multiplies inputs by a kernel")
    return treat(layer, {FLOAT8: get_scalings(scaling)})


@contextmanager
def without_float8(model: keras.Model) -> Iterator[None]:
    """Lets FP8 layers be plain for a while, amaxes kept."""
    before = []
    for layer in layers_by_path(model).values():
        if isinstance(layer, Float8Layer):
            history = layer.amax_history
            set_history(layer, None)
            before.append((layer, type(layer), dict(treatments_of(layer)), history))
            treatments_of(layer).pop(FLOAT8, None)
            rebase(layer, original_class(layer))
    try:
        yield
    finally:
        for layer, cls, treatments, history in before:
            treatments_of(layer).update(treatments)
            layer.__class__ = cls
            set_history(layer, history)


# A model whose matrix products run in FP8, and back.


def convert(
    model: keras.Model,
    scaling: Scalings | Scaling | str | None = None,
    select: Select | None = None,
    *,
    target: str | None = None,
    batch_size: int = 8,
) -> keras.Model:
    """Lets Dense and EinsumDense layers compute in few bits.

    Their products are in 8 or 4 bits (`keras_mp.fp8.matmul`), and the model is changed in place. That includes layers
    inside others, such as the projections of MultiHeadAttention and GroupQueryAttention. The weights are the model's
    own, and their values stay. A compiled model stays compiled: the step that it has traced is dropped, and where
    amaxes are kept its optimizer is a new one with the state of the old. The model is saved and loaded as usual,
    wherever `keras_mp` is imported after Keras, and exported by `keras_mp.export_float32` as plain layers. `revert`
    undoes it.

    Layers that compute in 8 bits already take the scaling that is given, where select chooses them, and a warning says
    so and what is kept of their amaxes; without one they stay as they are, so converting twice changes nothing. So a
    training can go on otherwise: `convert(model, Scalings.named("nvfp4", forward=False))` for its last part.

    Args:
        model: a Keras model: functional, sequential, subclassed, nested; before or after training. One that is not
            built is converted once it is: by `fit` or another call on its first batch.
        scaling: the name of one of the kit's scalings, such as "delayed", "int8" or "nvfp4"; a `Scalings`, such as
            `Scalings.named("delayed", history=1024)`; or a `Scaling` for all operands. "current" by default. With
            "qat_int8", "qat_int4" or one of Keras's quantization configs, Dense, EinsumDense, Embedding and
            ReversibleEmbedding layers train as they will be once `keras_mp.quantize` was called.
        select: `select(path, layer) -> bool` is asked about every layer that can be converted. By default all Dense and
            EinsumDense layers are chosen but those that read the model's input or compute its output, whose errors
            nothing behind or before them evens out (torchao's examples leave the last layer out as well); those whose
            product is not of multiples of 16, which FP8 hardware asks for (cuBLAS documentation, cublasLtMatmul); and
            those that are too small to gain: the smaller side of the product at most 1024 and the larger at most 4096
            (torchao's automatic filter for tensorwise scaling, measured on an H100).
        target: a chip's name in `keras_mp.chips.CHIPS`, such as "h100": whether a product gains is then predicted from
            the chip's rates, by `keras_mp.fp8.selection.step_cost`, and not from its sizes alone. For INT8 the chip
            says from which size on: "v5e", "v6e" or "v7x", see `keras_mp.fp8.selection`.
        batch_size: the batch size for that prediction, where the model's inputs do not say it; 8 by default.

    Returns:
        The model. Each layer that was converted is still an instance of its class.

    Raises:
        ValueError: If the scaling is unknown; if target is no chip with FP8, or with MXFP8,
            or none that INT8 is known of, or comes with a select; if batch_size is below 1.
        TypeError: If select is no function.

    Warns:
        UserWarning: If layers had another scaling; if layers compute in float32, where FP8 products save less than
            under "mixed_bfloat16"; if no layer was converted, with the reason; if scales are static under
            "mixed_float16", whose loss scale grows; if blocks are asked for on a GPU without such products. The message
            names the layers.

    Examples:
        >>> import keras, keras_mp
        >>> choice = keras_mp.set_global_policy("mixed_bfloat16")
        >>> layers = [keras.layers.Dense(32, name=name) for name in ("first", "inner", "head")]
        >>> model = keras.Sequential([keras.Input((32,)), *layers])
        >>> model = keras_mp.convert(model, "delayed", select=lambda path, layer: layer.name == "inner")
        >>> model.get_layer("inner").scaling
        Scalings.named('delayed')
    """
    arguments = checked_arguments(scaling, select, target, batch_size)
    if not waits(model, "convert", **arguments):
        plan_products(plan := ChangePlan(model), **arguments)
        plan.apply()
    return model


def checked_arguments(
    scaling: Any = None, select: Select | None = None, target: str | None = None, batch_size: int = 8
) -> dict[str, Any]:
    """Checks arguments of `convert`; returns them with the scaling itself."""
    if select is not None and not callable(select):
        raise TypeError(f"select={select!r} must be a function select(path, layer) that returns a bool")
    if trains_quantized(scaling):
        if target is not None:
            raise ValueError(f"target={target!r} chooses layers for FP8 products: leave it out with {scaling!r}")
    elif select is not None and target is not None:
        raise ValueError(f"target={target!r} chooses the layers, and so does select: give one of the two")
    elif scaling is not None:
        scaling = get_scalings(scaling)
    return {
        "scaling": scaling,
        "select": select,
        "target": target,
        "batch_size": whole_number("batch_size", batch_size),
    }


def plan_products(plan: ChangePlan, scaling: Any, select: Select | None, target: str | None, batch_size: int) -> None:
    """Plans what `convert` does, given its checked arguments."""
    if trains_quantized(scaling):
        call(plan, QAT, mode=scaling, select=select)
        return
    scalings = get_scalings(scaling)
    decisions = decide(plan, select, None if target is None else Target(target, batch_size, scalings))
    chosen = [decision for decision in decisions if decision.float8]
    changed = [
        decision
        for decision in chosen
        if isinstance(decision.layer, Float8Layer)
        and scaling not in (None, decision.layer.scaling)
        and (select is None or select(decision.path, decision.layer))
    ]
    rescaled = _told(changed, scalings) if changed else ""
    wanted = [decision for decision in chosen if decision in changed or not isinstance(decision.layer, Float8Layer)]
    plan.rows += [Planned(decision.path, decision.layer, {FLOAT8: scalings}, decision.reason) for decision in wanted]
    told = [] if chosen else [_why_none(decisions, select, scalings)]
    half = [decision.path for decision in chosen if plan.compute_dtype(decision.layer) == "float16"]
    if half and scalings.is_static:
        told.append(
            f"{', '.join(half)} compute in float16, whose loss scale grows after the static scales are calibrated: "
            "gradients would saturate. Use delayed scales"
        )
    if chosen and scalings.all[0].in_blocks and current_device().kind == "gpu":
        ok, reason = support(MXFP8)
        if not ok:  # XLA emulates it there in loops, without tensor cores
            told.append(f"{reason} It will be slower than bfloat16: use 'delayed'")
    if rescaled:
        told.append(rescaled)
    # What `stabilize` lets return float32 was not built so.
    wide = [decision.path for decision in chosen if precision_of_layer(decision.layer) == "float32"]
    if wide:
        told.append(
            f"{', '.join(wide)} compute in float32. Their products are in {scalings.title} now, but all else stays in "
            "float32: build the model under 'mixed_bfloat16' to gain more"
        )
    for words in told:
        warnings.warn(f"convert({plan.model.name!r}): {words}", stacklevel=3)


register_calls({"convert": convert})


def trains_quantized(scaling: Any) -> bool:
    """Whether a scaling asks for quantization-aware training."""
    # Also by a wrong name: `quantize` knows the right ones.
    named = isinstance(scaling, str) and scaling.lower().startswith(("qat", "int4", "litert"))
    return named or isinstance(scaling, keras.quantizers.QuantizationConfig)


def _why_none(decisions: list[Decision], select: Select | None, scalings: Scalings) -> str:
    if not decisions:
        return f"the model has no Dense or EinsumDense layer, so nothing is in {scalings.title}"
    reasons = Counter(decision.reason.partition(": ")[0] for decision in decisions)
    listed = "; ".join(f"{count} of them: {reason}" for reason, count in reasons.most_common(4))
    anyway = "; select=lambda path, layer: True converts every layer that can be converted" if select is None else ""
    layers = f"{len(decisions)} Dense and EinsumDense layers"
    return f"none of the {layers} is in {scalings.title}. {listed}. keras_mp.report(model) lists them{anyway}"


def decisions(
    model: keras.Model,
    select: Select | None = None,
    target: str | None = None,
    batch_size: int = 8,
    scaling: Scalings | Scaling | str | None = None,
) -> list[Decision]:
    """Says which products are in 8 bits, and why.

    It says of each Dense and EinsumDense layer whether it computes so, or would after `convert` with these arguments.

    Raises:
        ValueError: As for `convert`; also if the model does not say how many rows a layer's inputs have.
    """
    whole_number("batch_size", batch_size)
    scalings = get_scalings(scaling)
    return decide(Walk(model), select, None if target is None else Target(target, batch_size, scalings))


def _told(changed: list[Decision], scalings: Scalings) -> str:
    """Says which layers change, and which amaxes are kept."""
    before = dict.fromkeys(decision.layer.scaling for decision in changed)
    had, has = max(old.kept for old in before), scalings.kept
    if had and has:
        kept = f"the newest {min(had, has)} of their amaxes of {had} steps are kept"
    elif had:
        kept = f"their amaxes of {had} steps are dropped, as {scalings} needs none"
    else:
        kept = "their first step computes the amaxes that it needs" if has else "neither keeps amaxes"
    paths = ", ".join(decision.path for decision in changed)
    return f"{paths} change from {' and '.join(map(str, before))} to {scalings}; weights are kept, and {kept}"
