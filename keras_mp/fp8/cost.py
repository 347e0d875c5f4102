"""When 8 bits pay, by chip and size."""

from __future__ import annotations

import math
from typing import NamedTuple

import keras

from keras_mp.fp8.scaling import Scalings
from keras_mp.precision.chips import CHIPS, Chip, find_chip

# When FP8 pays: what a layer's three products and its quantization take at a chip's peak rates.

# Bytes of an element: of inputs and gradients, of the float32 master weights, of FP8.
_HALF, _MASTER, _FP8 = 2, 4, 1
_FP4 = 9 / 16  # with the scale of its block


class Cost(NamedTuple):
    """Seconds of one layer in one training step: an estimate."""

    bfloat16: float  # the seconds in bfloat16, the cast of the kernel included
    fp8: float  # the seconds in FP8, quantization included

    @property
    def gain(self) -> float:
        """How many times as fast FP8 is."""
        return self.bfloat16 / self.fp8


def step_cost(rows: int, inputs: int, outputs: int, chip: Chip, scalings: Scalings) -> Cost:
    """Estimates a layer's three products from the chip's peak rates.

        product      = max(2 rows inputs outputs / rate, bytes of operands and result / bandwidth),  three of them
        bfloat16     = products + (read 4, write 2) of the kernel
        FP8          = products + quantization
        quantization = for x, w and g: read it for the amax, read it again, write 1
                       delayed scaling reads it once; rowwise scaling makes all of it twice, for different products;
                       MXFP8 reads it for two amaxes, and once more to write 1 for each of the two
                       NVFP4 reads it once more, for the tensor's own amax, and writes 9/16 for each of the two
                       where matrix units want the summed axis innermost: write 1 once more, transposed

    No kernel reaches a peak; what is left out of both sides leaves their ratio much as it is. For (8192, 4096, 16384)
    on an H200 it predicts 1.69 for current and 1.81 for delayed scaling, where Transformer Engine's documentation
    measured 1.58 and 1.69.

    Args:
        rows: the rows of the inputs: batch times positions.
        chip: a chip with FP8.

    Returns:
        Seconds for one of the chip's devices.
    """
    bandwidth = chip.bandwidth / chip.devices
    x, w, g = rows * inputs, inputs * outputs, rows * outputs

    def products(dtype: str, size: float) -> float:
        rate = chip.peak[dtype] / chip.devices
        forward, to_inputs = size * (x + w) + _HALF * g, size * (g + w) + _HALF * x
        to_kernel = size * (x + g) + _MASTER * w
        moved = (forward, to_inputs, to_kernel)
        return sum(max(2 * rows * inputs * outputs / rate, bytes_moved / bandwidth) for bytes_moved in moved)

    four_bits = scalings.title == "NVFP4"
    # On Ada and Hopper FP8 operands must have the summed axis innermost, so that each is needed in two layouts (NVIDIA,
    # cuBLAS documentation, cublasLtMatmul, "the TN format"); not on Blackwell, nor on TPUs.
    layouts = 2 if chip.vendor == "nvidia" and chip.architecture in ("8.9", "9.0") else 1

    def quantized(elements: int, size: int) -> float:
        reads = 1 if scalings.kept else 2
        if four_bits:
            return elements * (4 * size + 2 * _FP4)
        if scalings.all[0].in_blocks:
            return elements * (3 * size + 2 * _FP8)
        if scalings.all[0].granularity == "row":
            return elements * 2 * (reads * size + _FP8)  # the second copy is the transposed one
        return elements * (reads * size + _FP8 * layouts)

    quantization = quantized(x, _HALF) + quantized(w, _MASTER) + quantized(g, _HALF)
    cast = w * (_MASTER + _HALF)
    own = products("fp4", _FP4) if four_bits else products("fp8", _FP8)
    return Cost(products("bfloat16", _HALF) + cast / bandwidth, own + quantization / bandwidth)


def chip_for(target: str, scalings: Scalings) -> Chip:
    """Looks up a chip that multiplies FP8, or blocks.

    Raises:
        ValueError: there is no such chip, or it has no such units, names those that have; or the backend has no such
            product.
    """
    chip = find_chip(target)
    if scalings.all[0].in_blocks:
        title, dtype = scalings.title, "fp4" if scalings.title == "NVFP4" else "fp8"
        having = ", ".join(name for name, chip in CHIPS.items() if _multiplies_blocks(chip, dtype))
        if not _multiplies_blocks(chip, dtype):
            raise ValueError(
                f"target={target!r}: {chip.title} has no {title} units, so {title} never pays there. With: {having}"
            )
        if keras.backend.backend() != "jax":
            raise ValueError(
                f"target={target!r}: Keras runs on TensorFlow, which has no {title} product, so {title} never pays. "
                "Set the environment variable KERAS_BACKEND to 'jax' before Keras is first imported"
            )
    if "fp8" not in chip.peak:
        having = ", ".join(name for name, chip in CHIPS.items() if "fp8" in chip.peak)
        raise ValueError(f"target={target!r}: {chip.title} has no FP8 units, so FP8 never pays there. With: {having}")
    return chip


def _multiplies_blocks(chip: Chip, dtype: str) -> bool:
    """Whether a chip multiplies blocks: NVIDIA's GPUs from Blackwell on."""
    return chip.vendor == "nvidia" and dtype in chip.peak and int(chip.architecture.split(".")[0]) >= 10


def rows_of(layer: keras.layers.Layer, inputs: int, batch_size: int) -> int | None:
    """Counts rows of a layer's inputs, or None.

    Args:
        batch_size: the size of the first axis, where it is not known.
    """
    shape = list(layer.get_build_config()["input_shape"])
    if shape and shape[0] is None:
        shape[0] = batch_size
    return None if None in shape else math.prod(shape) // inputs


# When INT8 pays: from which size of a layer on.

# Rows, inputs and outputs from which on a layer gains; None where no layer does. By what libtpu 0.0.42.1 estimates of a
# layer compiled by itself, forward and backward, quantization included. On a v5e (8192, 4096, 16384) takes 0.72 of
# bfloat16's cycles with delayed and static scales, 0.85 with current ones, and 0.61 with the kernel gradient in INT8;
# (2048, 2048, 8192) takes 0.92 at the least. What saves less than a tenth says nothing about a layer in a step. The
# larger of the two takes 0.95 at the least on a v6e, and 1.06 on a v7x.
GAINS_FROM: dict[str, tuple[int, int, int] | None] = {"v5e": (8192, 4096, 16384), "v6e": None, "v7x": None}


def gains_from(target: str) -> tuple[int, int, int] | None:
    """Looks up `GAINS_FROM` for a chip.

    Raises:
        ValueError: nothing is known of INT8 on the chip.
    """
    chip = find_chip(target)
    if chip.name not in GAINS_FROM:
        raise ValueError(
            f"target={target!r}: there are no compiled cycles of INT8 for {chip.title}, so that its gain is not "
            f"predicted. With: {', '.join(GAINS_FROM)}. Without a target, or with select, convert does not need them"
        )
    return GAINS_FROM[chip.name]
