"""Compares a rebuilt model with the original on a batch."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np

from keras_mp.backend.common.keras_patches import wrapped_methods
from keras_mp.rebuild.walk import (
    RebuildError,
    children_of,
    compute_dtypes,
    has_no_call,
    has_no_value,
    inputs_of,
    layers_by_path,
    map_shapes,
)

# Both run the same operations on the same numbers; what threads make of sums is below this many units of the last
# place of the largest output.
_UNITS = 8
_ROWS = 2
_MODES = {False: "in inference", True: "in training"}
# For axes whose size a model leaves open: some models take short ones only, some long ones only.
_SIZES = (8, 64, 224)


def check_same(old: keras.Model, new: keras.Model, sample: Any = None, modes: Sequence[bool] = (False, True)) -> None:
    """Compares a model with one rebuilt in the same precision.

    Both run on a batch, in inference and as in training, with the same random numbers; outputs and the losses that
    layers add must be the same. A model without `call()`, such as a GAN, is compared part by part.

    Args:
        sample: a batch of inputs; made up from the shapes and dtypes of the inputs where None.
        modes: the modes to compare in: False for inference, True for training. Files do not hold the states of seeds,
            so that one that was loaded draws other numbers in training.

    Raises:
        RebuildError: they differ; the message names the first layer at which they part, and what its config lacks.

    Warns:
        UserWarning: the model could not be run, so nothing is known.
    """
    if any(map(has_no_value, old.weights)):
        return  # built from shapes alone: there is nothing to compute with
    if has_no_call(old):
        for part, other in zip(children_of(old), children_of(new), strict=True):
            if isinstance(part, keras.Model) and part.built and not has_no_call(part):
                check_same(part, other, modes=modes)  # type: ignore[arg-type]
        return
    error: Exception | None = None
    for batch in made_up_batches(old) if sample is None else [keras.tree.map_structure(lambda x: x[:_ROWS], sample)]:
        try:
            expected = {training: _run(old, batch, training) for training in modes}
        except Exception as raised:  # whatever a stranger's call raises on what it was not made for
            error = error or raised
            continue
        for training in modes:
            _compare(old, new, batch, training, expected[training])
        return
    cause = "the shapes of its inputs are not known" if error is None else str(error).strip().partition("\n")[0][:300]
    warnings.warn(
        f"model {old.name!r} was rebuilt from its config, and could not be compared with the original: {cause}",
        stacklevel=4,
    )


def _compare(old: Any, new: Any, batch: Any, training: bool, expected: list[np.ndarray]) -> None:
    if relative_difference(_run(old, batch, training), expected, 0.0) > _tolerance(old):
        return  # it draws random numbers of its own each time
    try:
        distance = relative_difference(_run(new, batch, training), expected, 0.0)
    except Exception as error:
        raise RebuildError(
            f"model {old.name!r} cannot be rebuilt from its config: the new model fails where the old one does not: "
            f"{str(error).strip()[:500]}"
        ) from error
    if distance > _tolerance(old):
        off = f"its outputs and added losses are off by {distance:.1%} of their size {_MODES[training]}"
        where = _where_they_part(old, new, batch, training)
        raise RebuildError(
            f"model {old.name!r} cannot be rebuilt from its config: {off}. {where} "
            "A config must hold every argument of __init__: give the class a get_config() that returns them, or keep "
            "each as an attribute of its name"
        )


def _run(model: Any, batch: Any, training: bool) -> list[np.ndarray]:
    """Outputs, and losses that layers add; nothing is assigned."""
    values = ([v.value for v in variables] for variables in (model.trainable_variables, model.non_trainable_variables))
    inputs = keras.tree.map_structure(keras.ops.convert_to_tensor, batch)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # Private, as Keras has no public way to ask; one that does not take it fails on it.
        told = {"training": training} if model._call_has_training_arg else {}
        outputs, _, losses = model.stateless_call(*values, inputs, return_losses=True, **told)
    return arrays_of([outputs, losses])


def relative_difference(actual: Any, expected: Any, least: float = 1.0) -> float:
    """Largest relative difference of two structures of arrays.

    Each is divided by max(least, the largest magnitude of `expected`). Returns inf where shapes differ, one is NaN
    or infinite and the other is not the same, or where what is no number, such as text, differs.
    """
    actual, expected = arrays_of(actual), arrays_of(expected)
    if [x.shape for x in actual] != [x.shape for x in expected]:
        return float("inf")
    worst = 0.0
    for a, e in zip(actual, expected, strict=True):
        if "O" in (a.dtype.kind, e.dtype.kind):
            if not np.array_equal(a, e):
                return float("inf")
            continue
        finite = np.isfinite(e)
        if not np.array_equal(a[~finite], e[~finite], equal_nan=True) or not np.isfinite(a[finite]).all():
            return float("inf")
        difference = np.abs(a[finite] - e[finite]).max(initial=0.0)
        if difference:
            size = max(least, np.abs(e[finite]).max())
            worst = max(worst, float(difference / size) if size else float("inf"))
    return worst


def arrays_of(structure: Any) -> list[np.ndarray]:
    """Arrays of float64; complex as pairs, text as objects."""
    arrays = []
    for leaf in keras.tree.flatten(structure):
        if leaf is None:
            continue
        # NumPy takes no bfloat16 scalar of TensorFlow's.
        narrow = keras.ops.is_tensor(leaf) and keras.backend.standardize_dtype(leaf.dtype) == "bfloat16"
        x = np.asarray(keras.ops.convert_to_numpy(keras.ops.cast(leaf, "float32") if narrow else leaf))
        x = np.stack([x.real, x.imag], -1) if x.dtype.kind == "c" else x
        arrays.append(x.astype(object if x.dtype.kind in "OSU" else "float64"))
    return arrays


def _tolerance(model: Any) -> float:
    dtypes = compute_dtypes(model)
    bits = 7 if "bfloat16" in dtypes else 10 if "float16" in dtypes else 23
    return float(_UNITS * 2.0**-bits)


def made_up_batches(model: Any) -> Iterator[Any]:
    """Batches that the model may take."""
    for size in _SIZES:
        for dtype in ("", "float32", "int32"):  # Keras does not record that of a subclassed model's inputs
            inputs = _inputs(model, dtype)
            if inputs is None:
                continue
            yield keras.tree.map_structure(lambda x, size=size: _made_up(x, size), inputs)
            if not any(None in tuple(x.shape)[1:] for x in keras.tree.flatten(inputs)) and dtype == "":
                return


def _inputs(model: Any, dtype: str) -> Any:
    if getattr(model, "inputs", None):
        return None if dtype else inputs_of(model)
    shapes = model.get_build_config() or {}
    if not dtype or not shapes:
        return None
    several = list(shapes.get("shapes_dict", {}).values())
    shape = shapes["input_shape"] if "input_shape" in shapes else several[0] if len(several) == 1 else None
    return None if shape is None else map_shapes(lambda sizes: keras.KerasTensor(tuple(sizes), dtype), shape)


def _made_up(tensor: Any, size: int) -> Any:
    shape = [_ROWS, *(size if n is None else n for n in tuple(tensor.shape)[1:])]
    if tensor.shape and tensor.shape[0] is not None:
        shape[0] = tensor.shape[0]
    dtype = keras.backend.standardize_dtype(tensor.dtype)
    random = np.random.default_rng(len(shape))
    if dtype == "string":
        return np.full(shape, "a word", dtype=object)
    if dtype == "bool":
        return random.integers(0, 2, shape).astype(bool)
    if "int" in dtype:
        return random.integers(0, 2, shape).astype(dtype)
    return random.normal(size=shape).astype("float32")


def _where_they_part(old: Any, new: Any, batch: Any, training: bool) -> str:
    """Names the first layer with another result, innermost first."""
    twins = dict(zip(layers_by_path(old).values(), layers_by_path(new).values(), strict=False))
    calls = [_calls(model, batch, training) for model in (old, new)]
    for (path, layer, mine), (_, _, theirs) in zip(*calls, strict=False):
        if relative_difference(theirs, mine, 0.0) > _tolerance(old):
            told = f"{path!r} ({type(layer).__name__}){_lacks(layer, twins.get(layer))}"
            return f"The first layer with another result is {told}."
    cause = f"{type(old).__name__} itself computes otherwise, or a regularizer or add_loss in it adds another loss"
    return f"Its layers return the same, so {cause}{_lacks(old, new)}."


def _calls(model: Any, batch: Any, training: bool) -> list[tuple[str, Any, list[np.ndarray]]]:
    calls: list[tuple[str, Any, list[np.ndarray]]] = []

    def noting(path: str, layer: Any, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            outputs = function(*args, **kwargs)
            leaves = [leaf for leaf in keras.tree.flatten(outputs) if keras.ops.is_tensor(leaf)]
            calls.append((path, layer, arrays_of(leaves)))
            return outputs

        return call

    with wrapped_methods(layers_by_path(model).items(), ["call"], noting):
        _run(model, batch, training)
    return calls


def _lacks(old: Any, new: Any) -> str:
    """Names plain attributes that differ in the new model."""
    theirs = {} if new is None else vars(new)
    pairs = [(name, _plain(value), _plain(theirs[name])) for name, value in vars(old).items() if name in theirs]
    other = [
        f"{name} is {mine}, and {its} in the new one"
        for name, mine, its in pairs
        if mine and its and mine != its and not name.startswith("_") and name not in ("name", "compiled", "loss")
    ]
    return f", whose {'; '.join(other[:3])}" if other else ""


def _plain(value: Any) -> str:
    if isinstance(value, (bool, int, float, str, type(None))):
        return repr(value)
    return getattr(value, "__name__", "") if callable(value) else ""
