"""Which losses take the numbers of classes as targets, and not a row for each."""

from __future__ import annotations

from typing import Any

import keras

from keras_mp.lean.chunked_loss import ChunkedCrossEntropy


def is_sparse_crossentropy(loss: Any) -> bool:
    """Whether a loss is a cross-entropy of integer targets: Keras's, the kit's, or one that is named like them.

    Args:
        loss: as `compile` takes it for one output: an instance, a function or a name.
    """
    if isinstance(loss, (keras.losses.SparseCategoricalCrossentropy, ChunkedCrossEntropy)):
        return True
    name = getattr(loss, "name", None) or getattr(loss, "__name__", loss)
    return str(name).lower().replace("_", "").startswith("sparsecategorical")
