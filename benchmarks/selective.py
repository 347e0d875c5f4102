"""Recomputation as torchtitan's "per-op" selection has it, which Keras cannot say: on JAX, by a policy of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any
from unittest.mock import patch

import jax

# Of a block of the kit's Llama: queries, keys and values are one; the last is not needed backward.
PRODUCTS = 5


@contextmanager
def every_second_product() -> Iterator[None]:
    """Within it, a recomputed block keeps the result of attention and of every second product, from the first."""
    checkpoint = jax.checkpoint

    def kept(function: Any) -> Any:
        dense, attention = count(), count()

        def keeps(primitive: Any, *_: Any, **parameters: Any) -> bool:
            if primitive.name != "dot_general":
                return False
            _, (batch, _) = parameters["dimension_numbers"]
            if batch:  # of attention: scores, then the result
                return next(attention) % 2 == 1
            return next(dense) % PRODUCTS % 2 == 0

        return checkpoint(function, policy=keeps)

    with patch.object(jax, "checkpoint", kept):
        yield
