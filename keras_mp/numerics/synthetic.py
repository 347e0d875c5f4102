"""Random batches of given shapes, for a model whose data is not at hand."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np


def random_batches(model: keras.Model, shapes: Any, steps: int) -> list[tuple]:
    """Makes batches of random numbers: normal floats, and whole numbers that the model has a place for.

    Ranges seen on them are those of the weights and the architecture, not of real data.

    Args:
        model: the model they are for.
        shapes: a batch `(x, y)` of `keras.KerasTensor`.
        steps: how many.

    Raises:
        ValueError: an input takes strings.
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
