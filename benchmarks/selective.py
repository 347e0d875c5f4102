"""Recomputation as torchtitan's "per-op" selection has it, which Keras cannot say: on JAX, by a policy of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any
from unittest.mock import patch

import jax
from jax.ad_checkpoint import checkpoint_name

from keras_mp import backend

engine = backend.engine_of("keras_mp.fp8")

# Of a block of the kit's Llama: queries, keys and values are one; the last is not needed backward.
PRODUCTS = 5


# The name of the result of a product of operands in 8 bits: its own operation makes sums in float32, not yet scaled.
NAME = "product in 8 bits"


@contextmanager
def every_second_product() -> Iterator[None]:
    """Within it, a recomputed block keeps the result of attention and of every second product, from the first."""
    checkpoint, scaled_dot = jax.checkpoint, engine.scaled_dot

    def named(*operands: Any, name: str, **options: Any) -> Any:
        result = scaled_dot(*operands, name=name, **options)
        return checkpoint_name(result, NAME) if name.endswith("forward") else result

    def kept(function: Any) -> Any:
        dense, attention = count(), count()

        def keeps(primitive: Any, *operands: Any, **parameters: Any) -> bool:
            if primitive.name == "name":
                return parameters["name"] == NAME and next(dense) % PRODUCTS % 2 == 0
            if primitive.name != "dot_general" or operands[0].dtype.itemsize == 1:
                return False
            _, (batch, _) = parameters["dimension_numbers"]
            if batch:  # of attention: scores, then the result
                return next(attention) % 2 == 1
            return next(dense) % PRODUCTS % 2 == 0

        return checkpoint(function, policy=keeps)

    with patch.object(jax, "checkpoint", kept), patch.object(backend, "scaled_dot", named):
        yield
