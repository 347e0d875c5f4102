"""Prepares a model and a batch for lowering: checks them, and finds the shapes that a step sees."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import keras

from keras_mp import backend
from keras_mp.backend.common.device import TracedChip
from keras_mp.backend.common.lowered import Lowered
from keras_mp.parallel.plan import FLOAT16_ON_TPU, Plan
from keras_mp.parallel.split_rules import with_rules_of
from keras_mp.rebuild import has_no_value, layers_by_path, operations_of
from keras_mp.rebuild.merged import packed_weights
from keras_mp.rebuild.walk import compute_dtypes


def lower_step(
    model: keras.Model, batch: Any, *, training: bool, chip: TracedChip, plan: Plan | None = None
) -> Lowered:
    """Lowers one step of a model as `fit` or `predict` would run it; nothing is executed.

    What `fit` creates before its first step, the optimizer's variables and the metrics', is created here too.

    Args:
        model: a built model, compiled if `training`.
        batch: a batch as `fit` takes it, (x, y) or (x, y, sample_weight); without `training`, x. Its parts are arrays,
            or anything that has a shape and a dtype.
        training: whether it is a training step, otherwise inference.
        chip: the chip that the step is for, such as `keras_mp.planner.chips.targets.find_target("h100").traced`.
        plan: a plan for a step on several devices; its `batch` is that of all.

    Raises:
        ValueError: If the model is not built or not compiled, or the batch does not fit it or the devices.
    """
    _check_model(model, training)
    shapes = _shapes(batch)
    x = _inputs(model, shapes, training)
    _check_inputs(model, x)
    if plan is not None:
        plan.check_rows(keras.tree.flatten(x)[0].shape[0])
        if chip.platform == "tpu" and "float16" in compute_dtypes(model):
            raise ValueError(FLOAT16_ON_TPU)
        plan = with_rules_of(plan, model)
    if training:
        with backend.no_allocation() if _has_no_values(model) else nullcontext():
            _build_for(model, shapes)
    operations = {operation.name: operation for operation in operations_of(model)}
    parts = {**operations, **layers_by_path(model), "": model}
    lowered = backend.lower(model, shapes, parts, training=training, chip=chip, plan=plan)
    packed = {variable.path for layer in layers_by_path(model).values() for variable in packed_weights(layer)}
    arguments = tuple(
        replace(argument, holds="int4") if argument.path in packed else argument for argument in lowered.arguments
    )
    return replace(lowered, arguments=arguments)


def _build_for(model: keras.Model, batch: Any) -> None:
    """Makes what `fit` makes before its first step: it computes the loss and the metrics of shapes."""
    try:
        model._symbolic_build(data_batch=batch)
    except (TypeError, ValueError) as error:
        given = ", ".join(
            f"{leaf.dtype}{list(leaf.shape)}" for leaf in keras.tree.flatten(batch[1:]) if leaf is not None
        )
        raise ValueError(
            f"model {model.name!r}, its loss or a metric fails on the batch, whose targets are {given}: {error}"
        ) from error


def build_without_values(build: Callable[[], Any]) -> Any:
    """Calls a function that builds and compiles a model; on JAX no variable of the model gets a value."""
    with backend.no_allocation():
        model = build()
    if not isinstance(model, keras.Model):
        raise TypeError(f"build() must return a keras.Model, got {type(model).__name__}")
    return model


def _check_model(model: keras.Model, training: bool) -> None:
    if not isinstance(model, keras.Model):
        raise TypeError(
            f"model must be a keras.Model, or a function without arguments that builds one; got {type(model).__name__}"
        )
    if not model.built:
        raise ValueError(f"model {model.name!r} is not built: call it once on a batch, or give it an Input")
    if training and (not model.compiled or model.optimizer is None):
        raise ValueError(
            f"model {model.name!r} is not compiled with an optimizer: call compile(), or pass training=False to look "
            "at inference"
        )


def _shapes(batch: Any) -> Any:
    def one(leaf: Any) -> Any:
        if leaf is None:
            return None
        if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
            raise ValueError(
                f"batch holds {leaf!r} of type {type(leaf).__name__}, which has no shape and dtype: pass arrays, or "
                "keras.KerasTensor(shape, dtype)"
            )
        if any(size is None for size in leaf.shape):
            raise ValueError(f"batch holds the shape {tuple(leaf.shape)}: a compiled step has fixed sizes, give all")
        return keras.KerasTensor(tuple(leaf.shape), _as_fed(keras.backend.standardize_dtype(leaf.dtype)))

    return keras.tree.map_structure(one, tuple(batch) if isinstance(batch, list) else batch)


def _as_fed(dtype: str) -> str:
    """The dtype in which Keras feeds an array to a step."""
    if dtype == "float64":
        return str(keras.backend.floatx())
    if keras.backend.backend() == "jax":
        return {"int64": "int32", "uint64": "uint32"}.get(dtype, dtype)
    return dtype


def _inputs(model: keras.Model, batch: Any, training: bool) -> Any:
    if not training:
        return batch
    if not isinstance(batch, tuple) or len(batch) not in (2, 3):
        raise ValueError(
            f"batch must be (x, y) or (x, y, sample_weight) to train model {model.name!r}, got {_outline(batch)}"
        )
    return batch[0]


def _check_inputs(model: keras.Model, x: Any) -> None:
    expected = getattr(model, "inputs", None)
    if not expected:
        return
    given = keras.tree.flatten(x)
    if len(given) != len(expected):
        raise ValueError(f"batch gives model {model.name!r} {len(given)} inputs, and it takes {len(expected)}")
    for tensor, spec in zip(given, expected, strict=True):
        same = len(tensor.shape) == len(spec.shape) and all(
            want is None or want == have for want, have in zip(spec.shape, tensor.shape, strict=True)
        )
        # Keras adds a last dimension of 1 where it is left out.
        if not same and (*tensor.shape, 1) != (tensor.shape[0], *spec.shape[1:]):
            raise ValueError(
                f"batch gives the shape {tuple(tensor.shape)} for input {spec.name!r} of model {model.name!r}, which "
                f"takes {tuple(spec.shape)}"
            )


def _outline(batch: Any) -> str:
    if isinstance(batch, tuple):
        return f"a tuple of {len(batch)}"
    return f"one array of shape {tuple(batch.shape)}" if hasattr(batch, "shape") else f"a {type(batch).__name__}"


def _has_no_values(model: keras.Model) -> bool:
    return any(map(has_no_value, model.variables))
