"""Which entries dropout keeps: a hash of a seed and of the entry's place, which can be drawn again and is never kept.

```
first, second = keys_of(seed, (..., rows))          uint32, a pair of keys a row
there         = kept(first, second, columns, rate)  booleans, shape (..., rows, columns)
```
"""

from __future__ import annotations

from typing import Any

import keras

from keras_mp import backend
from keras_mp.loss_scaling.stochastic_rounding import mixed

_GOLDEN = 0x9E3779B1  # 2**32 over the golden ratio, made odd


def keys_of(seed: Any, shape: tuple[Any, ...]) -> list[Any]:
    """The keys of the rows of an array: the same ones on any number of devices.

    Args:
        seed: two integers, as `keras.random.SeedGenerator.next` returns them.
        shape: the shape of the array without its last axis. On TensorFlow sizes may be int32 tensors.

    Returns:
        Two uint32 tensors of shape `(*shape, 1)`.
    """
    low, high = (keras.ops.cast(seed[place], "uint32") for place in range(2))
    first = mixed(mixed(low) ^ high)
    second = mixed(first ^ keras.ops.convert_to_tensor(_GOLDEN, "uint32"))
    rows = backend.places((*shape, 1))
    return [mixed(rows ^ first), mixed(rows ^ second)]


@backend.fused
def kept(first: Any, second: Any, columns: Any, rate: float) -> Any:
    """Draws which entries of rows are kept.

    Args:
        first, second: the keys of the rows, shape `(..., 1)`.
        columns: the number of entries of a row.
        rate: the share that is dropped, to within 2**-32.

    Returns:
        Booleans, shape `(..., columns)`.
    """
    words = mixed(backend.places((columns,)) + first, second)
    return words >= keras.ops.convert_to_tensor(round(rate * 2**32), "uint32")
