"""The step of a deep model, from steps of the same model with few of its equal blocks and with more."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import keras

import keras_mp
from keras_mp.lowering import default_blocks
from keras_mp.planner.fit.figures import BLOCKS, extrapolated, on_line


def inspect_by_blocks(
    build: Callable[..., keras.Model],
    batch: Any,
    target: str,
    *,
    blocks: tuple[int, int] = BLOCKS,
    look: Callable[..., Any] = keras_mp.inspect,
    **options: Any,
) -> Any:
    """Inspects the step with few blocks and with more, and takes each figure from the line through both.

    Args:
        build: `build(blocks)` builds and compiles the model; the default of `blocks` is how many it has.
        batch, target, options: the arguments of `keras_mp.inspect`.
        blocks: the two numbers of blocks that are compiled, the second larger.
        look: inspects a step.

    Returns:
        Of `keras_mp.inspect`'s report what a table needs; the arrays listed are those of the step with more blocks.
        `extrapolated` says from how many.
    """
    depth = default_blocks(build)
    few, many = (look(lambda count=count: build(count), batch, target, **options) for count in blocks)
    times = Fraction(depth - blocks[0], blocks[1] - blocks[0])
    whole = extrapolated(few, many, blocks, depth)
    kept = ("memory", "time", "roofline", "seconds", "refused", "backend", "extrapolated")
    return SimpleNamespace(
        flops=on_line(few.flops, many.flops, times),
        **{name: getattr(whole, name) for name in kept},
    )
