"""The operators of a LiteRT file that integers would break, and that stay in float32."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from keras_mp.export.litert_file import LiteRTFile, Operator

# XNNPACK, which LiteRT runs on CPUs by default, takes the zero point of the second operand of an int8 product of two
# activations for 0: with TensorFlow 2.21 a product is off by a fifth and more (tests/export/test_int8.py).
STAYS_FLOAT = ("BATCH_MATMUL",)
# A step of int8 is a 255th of the range, so that beside the -1e9 of an attention mask every score is 0.
HUGE = 1e6
# Operators whose inputs and outputs have one scale, so that a huge range reaches what is before them, too.
# Source: LiteRT's 8-bit quantization specification, the operators with a restriction on their scales.
ONE_SCALE = frozenset(
    "AVERAGE_POOL_2D BROADCAST_TO CONCATENATION EXPAND_DIMS GATHER MAXIMUM MAX_POOL_2D MINIMUM PACK PAD PADV2 "
    "REDUCE_MAX REDUCE_MIN RESHAPE REVERSE_V2 SELECT SELECT_V2 SLICE SPLIT SPLIT_V SQUEEZE STRIDED_SLICE TILE "
    "TRANSPOSE UNPACK".split()
)


def stays_float(file: LiteRTFile, feed: Mapping[str, np.ndarray], bits: int = 8) -> list[str]:
    """Names outputs of operators that integers would break."""
    floats = {place: x for place, x in file.values(feed).items() if x.dtype == np.float32 and x.size}
    huge = {place for place, x in floats.items() if np.abs(x).max() >= HUGE}
    tensors, operators = file.graphs[0]
    makers = {place: operator for operator in operators for place in operator.outputs}
    kept: list[Operator] = []

    def keep(operator: Operator) -> None:
        if operator in kept:
            return
        kept.append(operator)
        if operator.kind in ONE_SCALE:
            for place in operator.inputs:
                if place in floats and place in makers:
                    keep(makers[place])

    for operator in operators:
        if huge & {*operator.inputs, *operator.outputs}:
            keep(operator)
        elif operator.kind in STAYS_FLOAT and bits == 8:  # XNNPACK has no kernels of int16
            kept.append(operator)
    return [tensors[place].name for operator in kept for place in operator.outputs]
