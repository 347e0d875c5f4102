"""A few batches of data, from a file or random."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np

from keras_mp import backend
from keras_mp.backend.common.keras_private import data_adapter_utils
from keras_mp.conversion.model_file import input_names
from keras_mp.lean.chunked_head import ChunkedHead
from keras_mp.lean.chunked_loss import is_sparse_crossentropy
from keras_mp.rebuild.walk import check_is_model, inputs_of, original_class
from keras_mp.system.argument_checks import whole_number


def batches_of(data: Any, steps: int, name: str = "data") -> list[tuple]:
    """Reads the first batches of some data.

    Args:
        data: an iterable of batches `(x, y)` or `(x, y, sample_weight)`: a tf.data.Dataset, a keras.utils.PyDataset, a
            generator, a list; or one such tuple of arrays, which is one batch.
        steps: the number of batches to read; fewer are fine, but one there must be.
        name: the name of the argument, for messages.

    Returns:
        A list of tuples `(x, y, sample_weight)` of numpy arrays; what is sparse or ragged is a tensor of the backend.
    """
    steps = whole_number("steps", steps, unit="batches")
    batches = [_batch(part, f"batch {place} of {name}") for place, part in enumerate(_taken(data, steps, name))]
    if not batches:
        raise ValueError(f"{name} is empty: at least one batch (x, y) is needed")
    return batches


def _taken(data: Any, steps: int, name: str) -> Iterator[Any]:
    if isinstance(data, keras.utils.PyDataset):
        return (data[index] for index in range(min(steps, data.num_batches or steps)))
    if isinstance(data, tuple) and len(data) in (1, 2, 3):
        first = data[0]
        if not isinstance(first, tuple) or len(first) not in (2, 3):  # no tuple of batches
            return iter([data])
    if isinstance(data, (str, bytes, dict, np.ndarray)) or not isinstance(data, Iterable):
        raise TypeError(f"{name} is a {type(data).__name__}: pass batches (x, y), or one tuple (x, y) of arrays")
    return itertools.islice(iter(data), steps)


def _batch(batch: Any, name: str) -> tuple:
    if isinstance(batch, list) and len(batch) in (2, 3):
        batch = tuple(batch)
    if not isinstance(batch, tuple) or len(batch) not in (1, 2, 3):
        given = f"a tuple of {len(batch)}" if isinstance(batch, tuple) else f"a {type(batch).__name__}"
        raise TypeError(f"{name} is {given}: (x, y) or (x, y, sample_weight) is needed")
    # A list of strings is one array of them.
    is_text = [isinstance(x, (list, tuple)) and x and all(isinstance(text, (str, bytes)) for text in x) for x in batch]
    batch = tuple(np.asarray(x) if text else x for x, text in zip(batch, is_text, strict=True))
    batch = keras.tree.map_structure(_array, batch)
    x, y, sample_weight = (*batch, None, None)[:3]
    arrays = [leaf for leaf in keras.tree.flatten(batch) if leaf is not None]
    lengths = {array.shape[0] for array in arrays if len(array.shape)}
    if len(lengths) > 1:
        shapes = ", ".join(str(array.shape) for array in arrays)
        raise ValueError(f"{name} holds arrays of different lengths: {shapes}")
    if 0 in lengths or not arrays:
        raise ValueError(f"{name} is empty: it has no record")
    return x, y, sample_weight


def _array(leaf: Any) -> Any:
    if leaf is None:
        return None
    sparse = _sparse_or_ragged(leaf)
    if sparse is not None:
        wide = backend.values_of(sparse).dtype == "float64"
        return backend.map_values(lambda x: keras.ops.cast(x, keras.config.floatx()), sparse) if wide else sparse
    array = np.asarray(leaf)
    if array.dtype == np.float64:
        return array.astype(keras.config.floatx())
    return array


def _sparse_or_ragged(leaf: Any) -> Any:
    """A tensor for what `fit` takes as sparse or ragged."""
    on_jax = keras.backend.backend() == "jax"
    if data_adapter_utils.is_scipy_sparse(leaf):
        convert = (
            data_adapter_utils.scipy_sparse_to_jax_sparse if on_jax else data_adapter_utils.scipy_sparse_to_tf_sparse
        )
        return convert(leaf)
    if data_adapter_utils.is_tensorflow_sparse(leaf):
        return data_adapter_utils.tf_sparse_to_jax_sparse(leaf) if on_jax else leaf
    if data_adapter_utils.is_jax_sparse(leaf):
        return leaf if on_jax else data_adapter_utils.jax_sparse_to_tf_sparse(leaf)
    return leaf if data_adapter_utils.is_tensorflow_ragged(leaf) and not on_jax else None


def dense_array(leaf: Any) -> np.ndarray:
    """Makes a dense numpy array of an array or tensor."""
    return leaf if isinstance(leaf, np.ndarray) else keras.ops.convert_to_numpy(leaf)


# Batches in an .npz file: each array under its path in the batch, as "x", "x/height", "y/0" or "sample_weight".


def named_arrays(batch: tuple) -> dict[str, Any]:
    """Arrays of a batch `(x, y, sample_weight)` by path."""
    parts = dict(zip(("x", "y", "sample_weight"), batch, strict=False))
    leaves = keras.tree.flatten_with_path(parts)
    return {"/".join(map(str, path)): array for path, array in leaves if array is not None}


def batches_of_file(path: str | os.PathLike[str], model: keras.Model, batch_size: int) -> list[tuple]:
    """Reads the batches of a file.

    Args:
        path: an `.npz` file of arrays named as `named_arrays` does; those of a model's inputs and outputs may have
            their names instead, `y/NAME`. `sample_weight` may be left out, or be given for some outputs.
        batch_size: the records of a batch; the last may have fewer.
    """
    whole_number("batch_size", batch_size)
    arrays = read_arrays(path)
    several = len(getattr(model, "outputs", None) or []) > 1
    names = _names_for(path, arrays, "y", model.output, model.output_names) if several else _nested(arrays, "y")
    labels = [name for name in keras.tree.flatten(names) if name is not None]
    weights = [name for name in arrays if name.startswith("sample_weight/")]
    if lost := [name for name in weights if f"y{name.removeprefix('sample_weight')}" not in labels]:
        raise ValueError(
            f"{str(path)!r} must hold labels for {', '.join(lost)}, and holds {', '.join(labels) or 'none'}"
        )
    whole = (
        inputs_among(path, arrays, model),
        keras.tree.map_structure(arrays.get, names),
        keras.tree.map_structure(lambda name: arrays.get(f"sample_weight{name[1:]}"), names)
        if weights
        else arrays.get("sample_weight"),
    )
    used = [array for array in keras.tree.flatten(whole) if array is not None]
    lengths = {len(array) if array.ndim else None for array in used}
    if len(lengths) != 1 or not lengths - {0, None}:
        shapes = ", ".join(f"{name} {array.shape}" for name, array in arrays.items())
        raise ValueError(f"the arrays of {str(path)!r} must have as many records each, 1 or more: {shapes}")
    return [
        keras.tree.map_structure(lambda x, start=start: None if x is None else x[start : start + batch_size], whole)
        for start in range(0, len(used[0]), batch_size)
    ]


def inputs_among(path: str | os.PathLike[str], arrays: dict[str, np.ndarray], model: keras.Model) -> Any:
    """The inputs of a model among a file's arrays."""
    structure = inputs_of(model)
    if structure is None:  # a subclassed model takes what its call() is given
        names = _nested(arrays, "x")
        if names is None:
            raise ValueError(f"{str(path)!r} must hold x, and holds {', '.join(arrays) or 'none'}")
        return keras.tree.map_structure(arrays.get, names)
    titles = input_names(structure)
    names = _names_for(path, arrays, "x", structure, titles)
    for name, title, tensor in zip(keras.tree.flatten(names), titles, keras.tree.flatten(structure), strict=True):
        if (arrays[name].dtype.kind in "US") != (tensor.dtype == "string"):
            raise ValueError(
                f"array {name!r} in {str(path)!r} is of dtype {arrays[name].dtype}, and input {title!r} of model "
                f"{model.name!r} takes {tensor.dtype}"
            )
    return keras.tree.map_structure(arrays.get, names)


def _names_for(path: Any, arrays: dict[str, np.ndarray], part: str, structure: Any, titles: list[str]) -> Any:
    """Finds the array's name for each tensor of a structure."""
    leaves = keras.tree.flatten_with_path(structure)
    orders = [
        ["/".join(map(str, (part, *keys))) for keys, _ in leaves],
        *([f"{part}/{key}" for key in keys] for keys in (titles, [tensor.name for _, tensor in leaves])),
        [f"{part}/{place}" for place in range(len(leaves))] if len(leaves) > 1 else [part],
    ]
    for order in orders:
        if arrays.keys() >= {*order}:
            return keras.tree.pack_sequence_as(structure, order)
    wanted = " or ".join(", ".join(order) for order in (orders[1], orders[-1])) if len(leaves) > 1 else part
    raise ValueError(f"{str(path)!r} must hold {wanted}, and holds {', '.join(arrays) or 'none'}")


def _nested(names: Iterable[str], part: str) -> Any:
    """Makes lists and dicts of a part's paths."""
    if part in names:
        return part
    below = [name.removeprefix(f"{part}/").partition("/")[0] for name in names if name.startswith(f"{part}/")]
    nested = {key: _nested(names, f"{part}/{key}") for key in below}
    places = [str(place) for place in range(len(nested))]
    return ([nested[place] for place in places] if nested.keys() == {*places} else nested) or None


def read_arrays(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """Arrays of a file by name, of an `.npy` x."""
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"there is no file {str(path)!r}")
    if path.is_dir():
        raise ValueError(f"{str(path)!r} is a folder, not an .npz or .npy file")
    if not path.is_file():  # to open a pipe would wait for ever
        raise ValueError(f"{str(path)!r} is a pipe or a device, not an .npz or .npy file")
    name = ""
    try:
        loaded = np.load(path, allow_pickle=False)
        if isinstance(loaded, np.ndarray):
            return {"x": loaded}
        arrays = {}
        with loaded:
            for name in loaded.files:
                arrays[name] = loaded[name]
    except OSError:
        raise
    except Exception as error:  # zipfile, zlib, NumPy and Python's tokenizer raise a dozen kinds for damaged files
        if "Object arrays" in str(error):
            array = f"array {name!r} in" if name else "the array in"
            raise ValueError(
                f"{array} {str(path)!r} holds Python objects, which are not read because they can run any "
                "code: save numbers, and text as numpy.array(texts, dtype=str)"
            ) from error
        if name:
            raise ValueError(f"array {name!r} in {str(path)!r} is damaged: {error}") from error
        raise ValueError(
            f"{str(path)!r} is not an .npz or .npy file: write one with numpy.savez('data.npz', x=x, y=y)"
        ) from error
    if unknown := [name for name in arrays if name.partition("/")[0] not in ("x", "y", "sample_weight")]:
        raise ValueError(
            f"array {unknown[0]!r} in {str(path)!r} must be named x, y or sample_weight, or for one of several x/NAME, "
            "y/NAME or sample_weight/NAME"
        )
    return arrays


# Random batches of given shapes, for a model whose data is not at hand.


def random_batches(model: keras.Model, shapes: Any, steps: int) -> list[tuple]:
    """Makes batches of random numbers: normal floats, and valid integers.

    Ranges seen on them are those of the weights and the architecture, not of real data.

    Args:
        shapes: a batch `(x, y)` of `keras.KerasTensor`.
    """
    random = np.random.default_rng()
    outputs = keras.tree.flatten(getattr(model, "outputs", None) or [])
    classes = min([int(output.shape[-1]) for output in outputs if output.shape and output.shape[-1]], default=2)
    embeddings = [layer.input_dim for layer in model._flatten_layers() if hasattr(layer, "input_dim")]
    tokens = min([int(size) for size in embeddings if size], default=2)

    def drawn(tensor: Any, below: int) -> Any:
        if tensor.dtype == "string":
            raise ValueError(
                f"an input of model {model.name!r} takes strings, and no random ones are made up: give data"
            )
        if keras.backend.is_float_dtype(tensor.dtype):
            return random.normal(size=tensor.shape).astype("float32")
        return random.integers(0, below, tensor.shape).astype("int32")

    x, y = shapes[:2]
    return [
        (
            keras.tree.map_structure(lambda tensor: drawn(tensor, tokens), x),
            keras.tree.map_structure(lambda tensor: drawn(tensor, classes), y),
        )
        for _ in range(steps)
    ]


# Checks of a model and of a batch that every function of this package makes.


def check_model(model: Any) -> None:
    """Refuses what no step can be run on."""
    check_is_model(model)
    if not model.built:
        raise ValueError(f"model {model.name!r} is not built: call it once on a batch, or give it an Input")
    if not model.trainable_variables:
        raise ValueError(f"model {model.name!r} has no trainable weights, so there is no backward pass to look at")
    compiled = getattr(model, "compiled", False) and getattr(model, "_compile_loss", None) is not None
    if not compiled and not _has_own_loss(model):
        custom = (
            " Its own train_step is not run: what is differentiated is compute_loss." if trains_itself(model) else ""
        )
        raise ValueError(
            f"model {model.name!r} has no loss: call compile(loss=...), or define compute_loss(x, y, y_pred, "
            f"sample_weight).{custom}"
        )


def _has_own_loss(model: keras.Model) -> bool:
    return type(model).compute_loss not in (keras.Model.compute_loss, ChunkedHead.compute_loss)


def trains_itself(model: keras.Model) -> bool:
    """Whether the class of a model has its own `train_step`."""
    return original_class(model).train_step is not keras.Model.train_step


def check_labels(model: keras.Model, batch: tuple) -> None:
    """Refuses missing labels, and classes that a loss has not."""
    _, y, _ = batch
    if _has_own_loss(model):
        return
    if y is None:
        raise ValueError(f"data has no labels: the loss of model {model.name!r} needs batches (x, y)")
    loss = getattr(model, "loss", None)
    outputs = keras.tree.flatten(getattr(model, "outputs", None) or [])
    if not is_sparse_crossentropy(loss) or len(outputs) != 1 or len(keras.tree.flatten(y)) != 1:
        return
    classes, labels = outputs[0].shape[-1], np.asarray(keras.tree.flatten(y)[0])
    if (ignored := getattr(loss, "ignore_class", None)) is not None:
        labels = labels[labels != ignored]
    if classes and not ((labels >= 0) & (labels < classes)).all():
        raise ValueError(
            f"labels from {labels.min():g} to {labels.max():g} do not fit the loss {loss!r}: model {model.name!r} puts "
            f"out {classes} classes, so labels are 0 to {classes - 1}"
        )
