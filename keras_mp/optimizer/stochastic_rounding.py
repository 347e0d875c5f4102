"""Stochastic rounding of float32 to bfloat16 and to E4M3: up or down with the odds that make the mean the value itself.

```
bits = random_bits(shape, seed, step, variable_index)     uint32, of the shape; one word for each value to be rounded
w    = round_to_bfloat16(x, bits)                         takes the 16 low bits of each word
m    = round_to_float8(x / scale, bits)                   takes the 20 low bits; |x / scale| <= 448
```

A value rounded to nearest never leaves its place when it moves by less than half a unit in the last place at each step.
Two tensors rounded in one step need words of their own: another `variable_index`.
"""

from __future__ import annotations

from typing import Any

from keras import ops

from keras_mp import backend

_WORD = 0xFFFFFFFF
_GOLDEN = 0x9E3779B1  # 2**32 over the golden ratio, made odd

_SIGN, _MAGNITUDE, _INFINITY = 0x80000000, 0x7FFFFFFF, 0x7F800000  # IEEE 754 binary32
_LARGEST_BFLOAT16 = 0x7F7F0000
_QUIET = 0x00400000  # with this bit set, a NaN is one without its low half too

_DROPPED_BY_E4M3 = 20  # of float32's 23 bits of mantissa E4M3 has 3
_BELOW_E4M3 = (1 << _DROPPED_BY_E4M3) - 1
_NORMAL_E4M3 = 0x3C800000  # 2**-6, the smallest normal E4M3
_LARGEST_E4M3 = 448.0  # Micikevicius et al. 2022, table 1


def random_bits(shape: tuple[Any, ...], seed: int, step: Any, variable_index: int) -> Any:
    """Hashes words that replicas, shards and resumed runs share.

    Each word is a hash of the arguments and of its element's place in the whole array. A sharded array has on each
    device the words of its part.

    Args:
        shape: the shape of the whole array; it may be (). On TensorFlow sizes may be int32 tensors.
        seed: an int of any size.
        step: an int, or an integer tensor of shape (): the count of updates.
        variable_index: an int of any size; every tensor rounded in a step has another.

    Returns:
        A uint32 tensor of that shape, all of its bits usable.
    """
    # Two keys: with one, the words of two steps would be the same ones in another order.
    first = _mix(_mix(_mix(seed & _WORD) ^ ((seed >> 32) & _WORD)) ^ _mix((variable_index + _GOLDEN) & _WORD))
    step = ops.cast(step, "uint32")
    keys = [mixed(step ^ _word(key)) for key in (first, _mix(first ^ _GOLDEN))]
    return mixed(backend.places(tuple(shape), keys[0]), keys[1])


def mixed(word: Any, key: Any = None) -> Any:
    """Wellons's `lowbias32`, of each word of a uint32 tensor.

    A key, which broadcasts with it, is mixed in half way: words that follow one another then give with two keys two
    sequences that share no stretch.
    """
    word = (word ^ _shifted(word, 16)) * _word(0x7FEB352D)
    word = word if key is None else word ^ key
    word = (word ^ _shifted(word, 15)) * _word(0x846CA68B)
    return word ^ _shifted(word, 16)


def round_to_bfloat16(x: Any, bits: Any) -> Any:
    """Rounds to a neighbour in bfloat16, right in the mean.

    The mean over the 16 low bits is the value itself. Zeros with their sign, infinities, NaNs and what bfloat16 holds
    exactly stay. A finite value stays finite: beyond the largest bfloat16, 3.3895e38, it becomes that one, where half
    of the odds of the rest would make it infinite.

    Args:
        x: a float32 tensor.
        bits: a uint32 tensor of its shape; the 16 low bits of each word are used.

    Returns:
        A bfloat16 tensor of the shape.
    """
    word = backend.bitcast(x, "uint32")
    magnitude = word & _word(_MAGNITUDE)
    rounded = ops.where(magnitude < _word(_LARGEST_BFLOAT16), word + (bits & _word(0xFFFF)), word)
    rounded = ops.where(magnitude > _word(_INFINITY), word | _word(_QUIET), rounded)
    # Not a cast of floats, which flushes subnormals on some processors.
    return backend.bitcast(ops.cast(_shifted(rounded, 16), "uint16"), "bfloat16")


def round_to_float8(x: Any, bits: Any) -> Any:
    """Rounds to a neighbour in E4M3, right in the mean.

    The mean over the 20 low bits is the value itself: exactly so from 2**-6 on; below, where E4M3 has steps of 2**-9,
    within 2**-29. Zeros with their sign, NaNs and what E4M3 holds exactly stay. Finite values beyond 448 become 448;
    infinities, which E4M3 lacks, NaN.

    Args:
        x: a float32 tensor, scaled so that its values lie within 448.
        bits: a uint32 tensor of its shape; the 20 low bits of each word are used.

    Returns:
        A float8_e4m3fn tensor of the shape.
    """
    word = backend.bitcast(x, "uint32")
    magnitude, sign = word & _word(_MAGNITUDE), word & _word(_SIGN)
    bits = bits & _word(_BELOW_E4M3)
    normal = backend.bitcast((magnitude + bits) & _word(_WORD ^ _BELOW_E4M3), "float32")
    # In fixed point, with as many bits below the step as a normal value has below its last bit.
    is_subnormal = magnitude < _word(_NORMAL_E4M3)
    fixed = ops.cast(ops.where(is_subnormal, ops.abs(x) * 2.0 ** (9 + _DROPPED_BY_E4M3), 0.0), "int32")
    steps = _shifted(ops.cast(fixed, "uint32") + bits, _DROPPED_BY_E4M3)
    subnormal = ops.cast(ops.cast(steps, "int32"), "float32") * 2.0**-9
    rounded = ops.minimum(ops.where(is_subnormal, subnormal, normal), _LARGEST_E4M3)
    rounded = ops.where(magnitude < _word(_INFINITY), rounded, float("nan"))
    # The sign as a bit: a product would lose that of zero to an optimizing compiler.
    return ops.cast(backend.bitcast(backend.bitcast(rounded, "uint32") | sign, "float32"), "float8_e4m3fn")


def _mix(word: int) -> int:
    """Murmur3's finalizer, in Python."""
    word = ((word ^ (word >> 16)) * 0x85EBCA6B) & _WORD
    word = ((word ^ (word >> 13)) * 0xC2B2AE35) & _WORD
    return word ^ (word >> 16)


def _shifted(word: Any, places: int) -> Any:
    return ops.right_shift(word, _word(places))


def _word(value: int) -> Any:
    return ops.convert_to_tensor(value, "uint32")
