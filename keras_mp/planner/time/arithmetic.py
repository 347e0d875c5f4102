"""How much arithmetic a kernel of an NVIDIA GPU does that is no product: GELUs, softmax, random numbers, optimizers.

XLA's table of clock cycles (`xla/service/gpu/model/hlo_op_profiles_data.h` of openxla/xla, sm_103, its newest; `power`,
which is not there, from sm_100) says how long each operation takes on an element, in float32. Only the ratio to an
addition is used: an operation counts as so many additions. An addition takes one cycle of one of the lanes whose number
and clock make the peak rate of float32, at two operations a cycle.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from keras_mp.planner.read.hlo import Instruction, Module
from keras_mp.precision.chips import Chip

_ADDITION = 8
_CYCLES: Mapping[str, float] = {
    "atan2": 438, "cbrt": 173, "cosine": 347, "divide": 24, "erf": 190, "exponential": 86,
    "exponential-minus-one": 144, "log": 186, "log-plus-one": 211, "logistic": 202, "power": 463 * 8 / 7,
    "round-nearest-afz": 57, "round-nearest-even": 33, "rsqrt": 78, "sine": 376, "sqrt": 78, "tan": 405, "tanh": 140,
}  # fmt: skip
# Not in the table, or as long as an addition there; shorter ones take a cycle of a lane, too.
_SIMPLE = {
    "abs", "add", "and", "ceil", "clamp", "compare", "convert", "floor", "is-finite", "maximum", "minimum", "multiply",
    "negate", "not", "or", "reduce-precision", "remainder", "select", "shift-left", "shift-right-arithmetic",
    "shift-right-logical", "sign", "subtract", "xor",
}  # fmt: skip


def arithmetic_seconds(kernel: Instruction, module: Module, chip: Chip) -> float:
    """What a kernel's arithmetic takes; 0 on others than NVIDIA's.

    Args:
        kernel: a kernel that is no product.
        module: the compiled step.
        chip: the chip that runs it.
    """
    if chip.vendor != "nvidia":
        return 0.0
    return sum(_additions(inner) for inner in module.inside(kernel)) / (chip.peak["float32"] / 2)


def _additions(instruction: Instruction) -> float:
    cycles = _CYCLES.get(instruction.opcode, _ADDITION if instruction.opcode in _SIMPLE else 0)
    return cycles / _ADDITION * math.prod(instruction.shapes[0].dimensions) if cycles else 0.0
