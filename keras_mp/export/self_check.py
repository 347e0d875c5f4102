"""Compares an export with the model on made-up inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np

from keras_mp.export.verification import ExportError, computed, inputs_of, relative_difference
from keras_mp.rebuild.compared import arrays_of
from keras_mp.rebuild.walk import layers_by_path
from keras_mp.reporting.text import error_line

# One record, and as many as no other axis is likely to have.
BATCH_SIZES = (1, 3)
# Pairs of sizes for axes that are open beside the batch, by how many axes of an input are: the next pair is taken where
# the model cannot take the one before it, because it pools it away or halves it more often than it can be halved.
OPEN_SIZES = {
    0: ((0, 0),),
    1: ((6, 9), (32, 64), (128, 160), (2048, 3072)),
    2: ((32, 64), (96, 128), (224, 256)),
    3: ((16, 32), (64, 96)),
}
# How much further than two runs of the same model are from each other a right export may be from one of them.
SPREAD = 10
# Two runs of one model that differ by more are not of a function of its inputs, or one that blows rounding up.
DETERMINISTIC = 1e-3


def self_check(serve: Callable[[Any], Any], model: keras.Model, signature: Any, tolerance: float) -> list[str]:
    """Runs a SavedModel on random inputs of several sizes.

    They are two batch sizes, and two sizes of each open axis. Values are normal; whole numbers and texts are such as
    the model's embeddings and lookups know. The model runs eagerly, with every size known, so that what goes wrong only
    in a graph of unknown sizes shows; and as a graph of known sizes where that gives other results, since a deep
    network is rounded otherwise there.

    Args:
        tolerance: the largest difference allowed, as `relative_difference` has it; more where two runs of the model
            itself, in float32, differ by more.

    Returns:
        Sentences on what could not be run or compared.

    Raises:
        ExportError: the SavedModel fails where the model does not, or gives other results.
    """
    fixed = {tensor.shape[0] for tensor in keras.tree.flatten(inputs_of(model)) if tensor is not None} - {None}
    is_open = any(None in tuple(spec.shape)[1:] for spec in keras.tree.flatten(signature))
    batches = BATCH_SIZES if not fixed else tuple(fixed)[:1] * (2 if is_open else 1)
    notes = [_tried(serve, model, signature, batch, place, tolerance) for place, batch in enumerate(batches)]
    return list(dict.fromkeys(note for note in notes if note))


def _tried(
    serve: Callable[[Any], Any], model: keras.Model, signature: Any, batch: int, place: int, tolerance: float
) -> str | None:
    """Compares on the first inputs that the model takes."""
    failed: tuple[Any, str] | None = None
    for inputs in _candidates(model, signature, batch, place):
        try:
            expected = arrays_of(model(inputs, training=False))
        except Exception as error:  # whatever a layer that these inputs do not suit raises
            failed = failed or (inputs, error_line(error))
            continue
        if all(x.size for x in expected):
            return _compared(serve, model, inputs, expected, tolerance)
        failed = failed or (inputs, "its outputs are empty")
    assert failed is not None, "there is at least one candidate"
    inputs, why = failed
    try:
        serve(inputs)
    except Exception:
        return f"the SavedModel could not be run on synthetic inputs {_shapes(inputs)}: plain Keras fails, too: {why}"
    return f"the SavedModel has nothing to compare with on synthetic inputs {_shapes(inputs)}: plain Keras fails: {why}"


def _compared(
    serve: Callable[[Any], Any], model: keras.Model, inputs: Any, expected: list[np.ndarray], tolerance: float
) -> str | None:
    name = f"the SavedModel of model {model.name!r}"
    where = f"synthetic inputs {_shapes(inputs)}"
    try:
        served = arrays_of(serve(inputs))
    except Exception as error:
        raise ExportError(
            f"{name} was not kept: it fails on {where}, which the model in float32 takes: {error_line(error)}"
        ) from error
    if not any(x.dtype.kind not in "fc" or np.isfinite(x).any() for x in expected):
        return f"the model gives no finite value on {where}, so that nothing could be compared there"
    difference = relative_difference(served, expected)
    if difference <= tolerance:
        return None
    graphs = [arrays_of(computed(model, inputs)) for _ in range(2)]
    difference = min(difference, relative_difference(served, graphs[0]))
    spread = max(relative_difference(graphs[0], expected), relative_difference(graphs[1], graphs[0]))
    if difference > max(tolerance, SPREAD * spread):
        raise ExportError(
            f"{name} was not kept: it differs from the model run in float32 by {difference:.2e} on {where}, more than "
            f"{max(tolerance, SPREAD * spread):.0e}. The usual cause is a layer that confuses two sizes where the "
            "graph leaves one open: give its Input every size that is known, or replace the layer by one that uses "
            "keras.ops.shape"
        )
    if spread <= DETERMINISTIC:
        return None
    return f"two runs of the model itself differ by {spread:.0e} on {where}, the SavedModel by {difference:.0e}"


def _shapes(inputs: Any) -> str:
    shapes = [tuple(x.shape) for x in keras.tree.flatten(inputs)]
    return f"of the shape{'s' * (len(shapes) > 1)} {', '.join(map(str, shapes[:4]))}{', ...' * (len(shapes) > 4)}"


def _candidates(model: keras.Model, signature: Any, batch: int, place: int) -> Iterator[Any]:
    """Inputs of so many records, the likeliest first."""
    import tensorflow as tf

    specs = keras.tree.flatten(signature)
    below, words = _domain(model)
    sizes = OPEN_SIZES[min(3, max(tuple(spec.shape)[1:].count(None) for spec in specs))]
    # An Input without a dtype is one of floats, also where an Embedding takes it.
    whole = (False, True) if below > 2 and any(spec.dtype.is_floating for spec in specs) else (False,)
    random = np.random.default_rng(0)  # so that a model is exported each time or never
    for floats_are_whole in whole:
        for pair in sizes:

            def drawn(spec: Any, size: int = pair[place], floats_are_whole: bool = floats_are_whole) -> Any:
                shape = [batch, *(size if n is None else n for n in tuple(spec.shape)[1:])]
                return tf.convert_to_tensor(_drawn(random, spec.dtype, shape, below, words, floats_are_whole))

            yield keras.tree.map_structure(drawn, signature)


def _drawn(
    random: np.random.Generator, dtype: Any, shape: list[int], below: int, words: list[str], whole: bool
) -> np.ndarray:
    if dtype.name == "string":
        return random.choice(np.array(words, object), shape)
    if dtype.is_floating and not whole:
        return random.normal(size=shape).astype(dtype.as_numpy_dtype)
    return random.integers(0, below, shape).astype(dtype.as_numpy_dtype)


def _domain(model: keras.Model) -> tuple[int, list[str]]:
    """The whole numbers and texts that a model takes."""
    sizes, words = [], ["a", "the cat sat", "7"]
    for layer in layers_by_path(model).values():
        sizes += [getattr(layer, name, None) for name in ("input_dim", "num_tokens")]
        if isinstance(layer, keras.layers.StringLookup) and not layer.num_oov_indices and not layer.invert:
            words = layer.get_vocabulary(include_special_tokens=False) or words
    below = min((int(size) for size in sizes if isinstance(size, int) and size > 0), default=2)
    return below, words
