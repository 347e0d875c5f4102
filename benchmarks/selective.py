"""Recomputation that Keras cannot say, as torchtitan and MaxText have it: on JAX, by policies of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any
from unittest.mock import patch

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash

from keras_mp import backend

engine = backend.engine_of("keras_mp.fp8")

# Of a block of the kit's Llama: queries, keys and values are one; the last is not needed backward.
PRODUCTS = 5


# The name of the result of a product of operands in 8 bits: its own operation makes sums in float32, not yet scaled.
NAME = "product in 8 bits"
# The name of the result of Splash.
CONTEXT = "context"


@contextmanager
def kept_products(kept_of_block: Collection[int], fused: bool = True) -> Iterator[None]:
    """Within it, a recomputed block keeps the result of attention and of some products.

    Args:
        kept_of_block: the numbers of these products in the block, from 0.
        fused: whether Splash, where it is taken, computes its three gradients in one kernel.
    """
    checkpoint, scaled_dot, make_splash = jax.checkpoint, engine.scaled_dot, splash.make_splash_mha

    def named(*operands: Any, name: str, **options: Any) -> Any:
        result = scaled_dot(*operands, name=name, **options)
        return checkpoint_name(result, NAME) if name.endswith("forward") else result

    def kept(function: Any) -> Any:
        dense, attention = count(), count()

        def keeps(primitive: Any, *operands: Any, **parameters: Any) -> bool:
            if primitive.name == "name":
                name = parameters["name"]
                return name == CONTEXT or (name == NAME and next(dense) % PRODUCTS in kept_of_block)
            if primitive.name != "dot_general" or operands[0].dtype.itemsize == 1:
                return False
            _, (batch, _) = parameters["dimension_numbers"]
            if batch:  # of attention: scores, then the result
                return next(attention) % 2 == 1
            return next(dense) % PRODUCTS in kept_of_block

        return checkpoint(function, policy=keeps)

    def kernel(block_sizes: Any, **options: Any) -> Any:
        if fused:
            one = {"use_fused_bwd_kernel": True, "block_q_dq": None, "block_kv_dq": None}
            block_sizes = dataclasses.replace(block_sizes, **one)
        return make_splash(block_sizes=block_sizes, residual_checkpoint_name=CONTEXT, **options)

    with (
        patch.object(jax, "checkpoint", kept),
        patch.object(engine, "scaled_dot", named),
        patch.object(splash, "make_splash_mha", kernel),
    ):
        yield
