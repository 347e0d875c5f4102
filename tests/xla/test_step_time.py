"""The prediction of a step's time, against times that are computed by hand from the text of a module."""

import pytest

from keras_mp.precision.chips import CHIPS
from keras_mp.xla.efficiency import EFFICIENCIES, generation_of, product_seconds, transfer_seconds
from keras_mp.xla.hlo import parse
from keras_mp.xla.matmuls import Matmul
from keras_mp.xla.step_time import step_time

pytestmark = pytest.mark.once

H100 = CHIPS["h100"]
HOPPER = EFFICIENCIES["9"]

TEXT = """\
HloModule jit_step, is_scheduled=true

%body (state: (s32[], f32[1024,1024])) -> (s32[], f32[1024,1024]) {
  %state = (s32[], f32[1024,1024]{1,0}) parameter(0)
  %gte = f32[1024,1024]{1,0} get-tuple-element(%state), index=1
  %twice = f32[1024,1024]{1,0} add(%gte, %gte)
  ROOT %next = (s32[], f32[1024,1024]{1,0}) tuple(%gte, %twice)
}

%condition (state.1: (s32[], f32[1024,1024])) -> pred[] {
  %state.1 = (s32[], f32[1024,1024]{1,0}) parameter(0)
  ROOT %less = pred[] constant(true)
}

%skipped (a: f32[1024,1024]) -> f32[1024,1024] {
  ROOT %a = f32[1024,1024]{1,0} parameter(0)
}

%updated (b: f32[1024,1024]) -> f32[1024,1024] {
  %b = f32[1024,1024]{1,0} parameter(0)
  ROOT %new = f32[1024,1024]{1,0} add(%b, %b)
}

ENTRY %main (x: bf16[4096,4096], y: bf16[512,4096], z: f32[1024,1024], p: pred[]) -> bf16[4096,4096] {
  %x = bf16[4096,4096]{1,0} parameter(0)
  %y = bf16[512,4096]{1,0} parameter(1)
  %z = f32[1024,1024]{1,0} parameter(2)
  %p = pred[] parameter(3)
  %gather-start = (bf16[512,4096]{1,0}, bf16[4096,4096]{1,0}) all-gather-start(%y), \
replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}
  %product = bf16[4096,4096]{1,0} custom-call(%x, %x), custom_call_target="__cublas$lt$matmul"
  %gather-done = bf16[4096,4096]{1,0} all-gather-done(%gather-start)
  %loop = (s32[], f32[1024,1024]{1,0}) while(%z), condition=%condition, body=%body, \
backend_config={"known_trip_count":{"n":"12"}}
  %choice = f32[1024,1024]{1,0} conditional(%p, %z, %z), branch_computations={%skipped, %updated}
  ROOT %sum = bf16[4096,4096]{1,0} all-reduce(%product), replica_groups={{0,1,2,3,4,5,6,7}}
}
"""


def product(flops=2 * 4096**3, runs="product"):
    dtypes = ("bfloat16", "bfloat16")
    sizes = (4096, 4096, 4096)
    return Matmul(
        "dense", 1, "forward", "dot", sizes, dtypes, dtypes, "bfloat16", "float32", flops, 1, "", 0, runs=runs
    )


def test_kernels_loops_and_collectives():
    time = step_time([product()], parse(TEXT), H100, devices=8)
    computing = 2 * 4096**3 / (H100.peak["bfloat16"] * HOPPER.products[16])
    moving = 2 * 2 * 4096**2 / (H100.bandwidth * HOPPER.product_stream)  # x times x reads one array
    products = HOPPER.product_start + (computing**2 + moving**2) ** 0.5
    add = HOPPER.start + 2 * 4 * 1024**2 / (H100.bandwidth * HOPPER.stream)
    gathered = 7 / 8 * 2 * 4096**2 / H100.link.bandwidth
    reduced = 2 * gathered
    assert time.products == pytest.approx(products, rel=1e-9)
    assert time.other == pytest.approx(13 * add, rel=1e-9)
    assert gathered < products  # the product covers it
    assert time.uncovered == pytest.approx(reduced, rel=1e-6)
    assert time.kernels == 14
    assert time.seconds == time.products + time.other + time.uncovered


def test_what_no_kernel_covers_of_a_collective():
    short = TEXT.replace("bf16[4096,4096]{1,0} custom-call(%x, %x)", "bf16[4096,4096]{1,0} custom-call(%y, %y)")
    time = step_time([product(flops=1e6)], parse(short), H100, devices=8)
    gathered = 7 / 8 * 2 * 4096**2 / H100.link.bandwidth
    assert gathered > time.products
    assert time.uncovered == pytest.approx(3 * gathered - time.products, rel=1e-6)


def test_a_kernel_without_products_takes_what_its_bytes_take():
    time = step_time([], parse(TEXT), H100, devices=8)
    assert time.products == 0
    moved = transfer_seconds(3 * 2 * 4096**2, H100, HOPPER) - transfer_seconds(2 * 2 * 4096**2, H100, HOPPER)
    assert moved == pytest.approx(2 * 4096**2 / (H100.bandwidth * HOPPER.stream))


@pytest.mark.parametrize("chip", CHIPS.values(), ids=list(CHIPS))
def test_every_chip_has_constants_that_leave_it_below_its_peak(chip):
    constants = EFFICIENCIES[generation_of(chip)]
    peak = max(chip.peak.values())
    flops, moved = 2e15, 1e6
    seconds = product_seconds(flops, moved, peak, 16, chip, constants)
    assert seconds > flops / (peak / chip.devices)
    assert transfer_seconds(1e12, chip, constants) > 1e12 / (chip.bandwidth / chip.devices)
