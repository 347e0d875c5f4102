"""A model that trains as it will be once it is quantized."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

from keras_mp.system.one_of import one_of

Select = Callable[[str, Any], bool]

# Each name of a way to train, and the function that changes a built model in place, given the model and a `select`.
WAYS: dict[str, Callable[[keras.Model, Select | None], keras.Model]] = {}


def trains_quantized(scaling: Any) -> bool:
    """Whether what `keras_mp.convert` is given asks for quantization-aware training."""
    named = isinstance(scaling, str) and scaling.startswith("qat_")
    return named or isinstance(scaling, keras.quantizers.QuantizationConfig)


def convert(model: keras.Model, mode: Any, select: Select | None = None) -> keras.Model:
    """Lets a built model train as it will be once it is quantized, in place.

    Args:
        mode: a name of `WAYS`, or Keras's config for int8 or int4.
        select: a function `select(path, layer) -> bool`; by default all layers that can be quantized so.

    Raises:
        ValueError: The name is none of `WAYS`.
    """
    return WAYS[one_of("scaling", mode, WAYS)](model, select)
