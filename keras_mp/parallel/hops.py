"""Over how many devices at once gradients are summed.

Over some slices libtpu makes a sum of the whole array, on every device, of a `psum_scatter` over all of them. If the
sum goes over one dimension of the slice after the other, it stays a scatter: over the first dimension each device gets
a part of the array, summed over that dimension, and over the next a part of that part.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from keras_mp.precision.chip import TpuSlices
from keras_mp.precision.chips import identify_chip

Place = tuple[int, ...]

HOPS: dict[str, tuple[int, ...]] = {
    "v5e:4x4": (4, 4),
    "v5e:8x8": (8, 8),
    "v5e:16x16": (16, 16),
    "v6e:4x4": (4, 4),
    "v6e:8x8": (8, 8),
    "v6e:16x16": (16, 16),
    "v5p:2x2x2": (2, 2, 2),
    "v5p:2x2x4": (4, 4),
    "v5p:2x4x4": (8, 4),
    "v5p:4x4x4": (4, 4, 4),
    "v5p:4x4x8": (8, 4, 4),
    "v5p:4x8x8": (8, 8, 4),
}
"""The slices that need it, as libtpu names them: `python benchmarks/scatter_hops.py` compiles them."""

# Where libtpu makes a whole sum of a large array split along another axis than the first, also in these hops.
_OF_OTHER_AXES = {"v5e:16x16": (4, 4, 4, 4)}


class Hops(NamedTuple):
    """Numbers of devices summed over one by one, or none."""

    first: tuple[int, ...] = ()  # of arrays that are split along their first axis
    other: tuple[int, ...] = ()  # of arrays that are split along another


def hops_of(topology: str) -> Hops:
    """Looks up the hops of a slice by libtpu's name."""
    first = HOPS.get(topology, ())
    return Hops(first, _OF_OTHER_AXES.get(topology, first))


def in_hops(names: Sequence[str], kind: str, places: Sequence[Place]) -> tuple[tuple[str, ...], Hops]:
    """Puts devices of a slice in the order of hops.

    The first coordinate counts least. Where devices of this kind, such as "TPU v5 lite", need no hops or are no whole
    slice, there are none, and the names stay as they are.
    """
    chip = identify_chip(kind)
    extents = [1 + max(along) for along in zip(*places, strict=True)]
    whole = sorted(places) == list(itertools.product(*map(range, extents)))
    hops = Hops()
    if whole and chip is not None and isinstance(chip.compiler, TpuSlices):
        hops = hops_of(f"{chip.compiler.family}:{'x'.join(map(str, extents[: chip.compiler.dimensions]))}")
    if not hops.first:
        return tuple(names), hops
    place_of = dict(zip(names, places, strict=True))
    return tuple(sorted(names, key=lambda name: place_of[name][::-1])), hops


def groups_of(hops: Sequence[int]) -> list[list[list[int]]]:
    """Groups devices for each sum, by their numbers.

    Device `i * hops[1] + j` of two hops gets part `j` of part `i`, as of a sum over all at once.
    """
    devices = np.arange(math.prod(hops)).reshape(hops)
    return [np.moveaxis(devices, place, -1).reshape(-1, size).tolist() for place, size in enumerate(hops)]
