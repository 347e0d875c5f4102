"""Compiles a training step of a GPT of 1.3B parameters for the GPUs of one host, and prints what one of them holds.

    python benchmarks/several_gpus.py                    # 8 H100, fully sharded, all 24 blocks: 10 minutes on 2 cores
    python benchmarks/several_gpus.py --from-blocks 2 4  # the same, extrapolated from steps with 2 and with 4 blocks
    python benchmarks/several_gpus.py --blocks 2 --target rtx4090x4

The model is GPT-3 XL in table 2.1 of Brown et al. 2020, 24 blocks of width 2048, with 16 heads of 128 (the 24 heads of
that table do not divide 2048). It is built from shapes: no weight gets a value.
"""

from __future__ import annotations

import argparse
import functools
import math
import os
import sys
from pathlib import Path

os.environ["KERAS_BACKEND"] = "jax"
os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import keras

import keras_mp
from benchmarks.planner.by_blocks import inspect_by_blocks
from keras_mp.planner.compile.lower import build_without_values
from keras_mp.precision.chips import parse_target
from models.gpt import gpt
from models.transformer import Size

WIDTH, HEADS, VOCABULARY, LENGTH = 2048, 16, 50257, 2048


def build(blocks: int) -> keras.Model:
    """The model with this many blocks, compiled to train."""
    model = gpt(Size(blocks, WIDTH, HEADS), VOCABULARY, LENGTH, remat=True)
    model.compile(keras.optimizers.AdamW(1e-4, global_clipnorm=1.0), keras_mp.lean.ChunkedCrossEntropy())
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="h100x8", help="a GPU and how many of it")
    parser.add_argument("--strategy", default="fully_sharded", help="data, fully_sharded or tensor")
    parser.add_argument("--precision", default="mixed_bfloat16")
    parser.add_argument("--blocks", type=int, default=24)
    parser.add_argument("--rows", type=int, default=4, help="sequences of 2048 tokens a GPU")
    parser.add_argument("--from-blocks", type=int, nargs=2, help="extrapolate from steps with so many blocks")
    arguments = parser.parse_args()
    _, gpus = parse_target(arguments.target)
    tokens = keras.KerasTensor((arguments.rows * gpus, LENGTH), "int32")
    with keras_mp.set_global_policy(arguments.precision):
        model = build_without_values(lambda: build(arguments.blocks))
        inspected = keras_mp.inspect
        if arguments.from_blocks:
            inspected = functools.partial(inspect_by_blocks, blocks=tuple(arguments.from_blocks))
        report = inspected(
            lambda blocks=arguments.blocks: build(blocks),
            (tokens, tokens),
            arguments.target,
            strategy=arguments.strategy,
        )
    parameters = sum(math.prod(variable.shape) for variable in model.trainable_variables)
    memory = report.memory
    print(f"parameters                     {parameters:,}")
    print(f"weights, moments and counters  {memory.parameters + memory.optimizer:,} bytes a GPU")
    print(f"an equal share of the former   {12 * parameters / gpus:,.0f}")
    print(f"temporary                      {memory.temporary:,} ({memory.temporary / 2**30:.2f} GiB)")
    print(f"peak                           {memory.peak:,} of {memory.capacity:,}")
    print(f"compiled in {report.seconds:.0f} s")
    if arguments.from_blocks:
        return
    for collective in report.collectives:
        print(
            f"{collective.kind} {collective.dtype} of {collective.layer}: {collective.count} arrays, "
            f"{collective.bytes:,} bytes of the whole, {collective.wire:,} on the wire"
        )
    print(*report.asked_and_compiled, sep="\n")


if __name__ == "__main__":
    main()
