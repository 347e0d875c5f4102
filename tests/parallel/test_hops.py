"""The order of devices and the groups of sums in hops; the tests on 16 devices start in a process of their own."""

import itertools
import math
from pathlib import Path

import keras
import pytest
from in_own_process import run

from keras_mp.parallel.hops import HOPS, Hops, groups_of, hops_of, in_hops
from keras_mp.parallel.plan import plan_of

NAMES = [f"tpu:{index}" for index in range(16)]
FOUR = Hops((4, 4), (4, 4))
SQUARE = [(x, y, 0) for y in range(4) for x in range(4)]


def test_every_device_is_in_one_group_of_each_hop():
    assert groups_of(()) == []
    assert groups_of((2, 3)) == [[[0, 3], [1, 4], [2, 5]], [[0, 1, 2], [3, 4, 5]]]
    for hops in [(4, 4), (2, 2, 4)]:
        for size, groups in zip(hops, groups_of(hops), strict=True):
            assert sorted(itertools.chain(*groups)) == list(range(16))
            assert {len(group) for group in groups} == {size}


def test_the_slices_of_the_table_have_as_many_devices_as_their_hops():
    for topology, hops in HOPS.items():
        sides = [int(side) for side in topology.partition(":")[2].split("x")]
        assert math.prod(hops) == math.prod(sides)
        assert all(math.prod(hops) == math.prod(sides) for hops in hops_of(topology))
    assert hops_of("v5e:2x4") == hops_of("1x1x8") == hops_of("") == Hops()


def test_devices_are_put_in_the_order_of_their_coordinates():
    assert in_hops(NAMES, "TPU v5 lite", SQUARE) == (tuple(NAMES), FOUR)
    names, hops = in_hops(NAMES, "TPU v5 lite", [(x, y, 0) for x, y, _ in (place[1::-1] + (0,) for place in SQUARE)])
    assert names[:5] == ("tpu:0", "tpu:4", "tpu:8", "tpu:12", "tpu:1") and hops == FOUR


@pytest.mark.parametrize(
    "kind, places",
    [
        ("TPU v5 lite", SQUARE[:8]),  # a slice that needs none
        ("TPU v5 lite", [*SQUARE[:15], (4, 0, 0)]),  # no whole slice
        ("TPU7x", SQUARE),
        ("NVIDIA H100 80GB HBM3", SQUARE),
        ("a TPU of the future", SQUARE),
    ],
)
def test_other_devices_stay_as_they_are(kind, places):
    names = NAMES[: len(places)]
    assert in_hops(names, kind, places) == (tuple(names), Hops())


def test_a_plan_for_a_slice_has_its_hops():
    assert plan_of("fully_sharded", 16, "v5e:4x4").hops == FOUR
    assert plan_of("data", 16, "v5e:4x4").hops == plan_of("fully_sharded", 8, "v5e:2x4").hops == Hops()
    square = plan_of("fully_sharded", 256, "v5e:16x16")
    assert (len(square.groups(0)), len(square.groups(1)), square.groups(0)[1][0]) == (2, 4, list(range(16)))


@pytest.mark.skipif(keras.backend.backend() != "jax", reason="TensorFlow has data parallelism only")
@pytest.mark.slow
@pytest.mark.jax
@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", ["not rare", pytest.param("rare", marks=pytest.mark.rare)])
def test_sums_in_hops_on_16_devices(part):
    run(Path(__file__).with_name("hops_on_devices.py"), part, devices=16)
