"""The prediction of a step's time, against times that are computed by hand from the text of a module."""

from dataclasses import replace

import numpy as np
import pytest

from keras_mp.planner.read.hlo import parse
from keras_mp.planner.read.matmuls import Matmul
from keras_mp.planner.time.estimate import estimate
from keras_mp.planner.time.step_time import (
    EFFICIENCIES,
    LINKS,
    StepTime,
    between_steps,
    computing_seconds,
    generation_of,
    link_seconds,
    padded,
    product_seconds,
    score,
    step_time,
    transfer_seconds,
)
from keras_mp.precision.chips import CHIPS

H100 = CHIPS["h100"]
HOPPER = EFFICIENCIES["9"]
NVLINK = LINKS["nvidia"]
SENT = 7 / 8 * 2 * 4096**2  # by each of 8 devices, of a matrix of TEXT, in an all-gather

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
    add = transfer_seconds(2 * 4 * 1024**2, H100, HOPPER, 1024**2 / (H100.peak["float32"] / 2))
    gathered, reduced = (NVLINK.start + times * SENT / (450e9 * NVLINK.share) for times in (1, 2))
    assert time.products == pytest.approx(products, rel=1e-9)
    assert time.other == pytest.approx(13 * add, rel=1e-9)
    assert gathered < products  # the product covers it
    assert time.uncovered == pytest.approx(reduced, rel=1e-6)
    assert time.kernels == 14
    assert time.seconds == time.products + time.other + time.uncovered


def test_what_no_kernel_covers_of_a_collective():
    short = TEXT.replace("bf16[4096,4096]{1,0} custom-call(%x, %x)", "bf16[4096,4096]{1,0} custom-call(%y, %y)")
    time = step_time([product(flops=1e6)], parse(short), H100, devices=8)
    gathered, reduced = (link_seconds(times * SENT, H100, NVLINK) for times in (1, 2))
    assert gathered > time.products
    assert time.uncovered == pytest.approx(gathered + reduced - time.products, rel=1e-6)


@pytest.mark.parametrize(("labels", "share"), [("bf01_oi01->bf01", HOPPER.convolution), ("b01f_o01i->b01f", 1)])
def test_a_convolution_with_channels_first_takes_longer_than_a_product_of_as_many_operations(labels, share):
    target = 'custom_call_target="__cublas$lt$matmul"'
    assert target in TEXT
    text = TEXT.replace(target, f'dim_labels={labels}, custom_call_target="__cudnn$convForward"')
    convolution = replace(product(flops=1e15), kind="convolution")
    multiplied = step_time([product(flops=1e15)], parse(TEXT), H100).products
    assert multiplied / step_time([convolution], parse(text), H100).products == pytest.approx(share, rel=1e-3)


def test_a_kernel_without_products_takes_what_its_bytes_take():
    time = step_time([], parse(TEXT), H100, devices=8)
    assert time.products == 0
    moved = transfer_seconds(3 * 2 * 4096**2, H100, HOPPER) - transfer_seconds(2 * 2 * 4096**2, H100, HOPPER)
    assert moved == pytest.approx(2 * 4096**2 / (H100.bandwidth * HOPPER.stream))


FUSED = """\
HloModule jit_step, is_scheduled=true

%active (a: bf16[4096,4096]) -> bf16[4096,4096] {
  %a = bf16[4096,4096]{1,0} parameter(0)
  %wide = f32[4096,4096]{1,0} convert(%a)
  %tanh = f32[4096,4096]{1,0} tanh(%wide)
  ROOT %narrow = bf16[4096,4096]{1,0} convert(%tanh)
}

ENTRY %main (x: bf16[4096,4096]) -> bf16[4096,4096] {
  %x = bf16[4096,4096]{1,0} parameter(0)
  ROOT %fusion = bf16[4096,4096]{1,0} fusion(%x), kind=kLoop, calls=%active
}
"""


def test_arithmetic_that_is_fused_takes_as_many_additions_as_xlas_cycles():
    """A tanh is 140 cycles, an addition 8; an H100 has 132 x 128 lanes at 1.98 GHz. A TPU's is not modelled."""
    additions = 4096**2 * (140 / 8 + 2)
    computing = additions / (132 * 128 * 1.98e9)
    expected = HOPPER.start + np.hypot(computing, 2 * 2 * 4096**2 / (H100.bandwidth * HOPPER.stream))
    assert step_time([], parse(FUSED), H100).seconds == pytest.approx(expected, rel=0.01)
    bytes_alone = transfer_seconds(2 * 2 * 4096**2, CHIPS["v5e"], EFFICIENCIES["v6e"])
    assert step_time([], parse(FUSED), CHIPS["v5e"]).seconds == pytest.approx(bytes_alone, rel=1e-9)


@pytest.mark.parametrize(
    ("chip", "sizes", "times"),
    [
        ("v5e", (4096, 64, 4096), 2),
        ("v5e", (4096, 4096, 64), 2),
        ("v5p", (4096, 192, 4096), 4 / 3),
        ("v4", (4096, 128, 11008), 1),
        ("v6e", (4096, 128, 4096), 2),
        ("v7x", (512, 8192, 128), 2),
        ("v6e", (1, 64, 1), 1),
        ("h100", (4096, 64, 4096), 1),
    ],
)
def test_a_tpu_multiplies_the_padding_of_a_product_too(chip, sizes, times):
    assert padded(replace(product(), sizes=sizes), CHIPS[chip]) == pytest.approx(times)
    assert padded(replace(product(), sizes=sizes, kind="convolution"), CHIPS[chip]) == 1


@pytest.mark.parametrize("chip", CHIPS.values(), ids=list(CHIPS))
def test_every_chip_has_constants_that_leave_it_below_its_peak(chip):
    constants = EFFICIENCIES[generation_of(chip)]
    peak = max(chip.peak.values())
    flops, moved = 2e15, 1e6
    for kind in ("dot", "convolution"):
        seconds = product_seconds(computing_seconds(flops, peak, 16, chip, constants, kind), moved, chip, constants)
        assert seconds > flops / (peak / chip.devices)
    assert transfer_seconds(1e12, chip, constants) > 1e12 / (chip.bandwidth / chip.devices)


# Lines of what libtpu makes: weights that are brought to the core's own memory ahead, a gather in steps, each of which
# is beside a product, and the compiler's cycles.
ON_A_TPU = """\
HloModule jit_step, is_scheduled=true, num_partitions=4

%start (p.1: bf16[512,2048]) -> (bf16[512,2048], bf16[2048,2048]) {
  %p.1 = bf16[512,2048]{1,0} parameter(0)
  %gather.1 = bf16[2048,2048]{1,0} all-gather(%p.1), replica_groups={{0,1,2,3}}, dimensions={0}, \
frontend_attributes={chain_id="0"}
  ROOT %started = (bf16[512,2048]{1,0}, bf16[2048,2048]{1,0}) tuple(%p.1, %gather.1)
}

%step (p.2: bf16[512,2048], g.2: bf16[2048,2048], x.2: bf16[4096,2048], w.2: bf16[2048,2048]) -> (bf16[4096,2048], \
bf16[512,2048], bf16[2048,2048]) {
  %p.2 = bf16[512,2048]{1,0} parameter(0)
  %g.2 = bf16[2048,2048]{1,0} parameter(1)
  %x.2 = bf16[4096,2048]{1,0} parameter(2)
  %w.2 = bf16[2048,2048]{1,0} parameter(3)
  %gather.2 = bf16[2048,2048]{1,0} all-gather(%p.2), replica_groups={{0,1,2,3}}, dimensions={0}, \
frontend_attributes={chain_id="0"}
  %dot = bf16[4096,2048]{1,0} convolution(%x.2, %w.2), dim_labels=bf_io->bf
  ROOT %both = (bf16[4096,2048]{1,0}, bf16[512,2048]{1,0}, bf16[2048,2048]{1,0}) tuple(%dot, %p.2, %gather.2)
}

%end (p.3: bf16[512,2048]) -> bf16[2048,2048] {
  %p.3 = bf16[512,2048]{1,0} parameter(0)
  ROOT %gather.3 = bf16[2048,2048]{1,0} all-gather(%p.3), replica_groups={{0,1,2,3}}, dimensions={0}, \
frontend_attributes={chain_id="0"}
}

ENTRY %main (p: bf16[512,2048], x: bf16[4096,2048], w: bf16[2048,2048]) -> bf16[2048,2048] {
  %p = bf16[512,2048]{1,0} parameter(0)
  %x = bf16[4096,2048]{1,0} parameter(1)
  %w = bf16[2048,2048]{1,0} parameter(2)
  %copy-start = (bf16[2048,2048]{1,0:T(8,128)(2,1)S(1)}, bf16[2048,2048]{1,0}, u32[]{:S(2)}) copy-start(%w)
  %first = (bf16[512,2048]{1,0}, bf16[2048,2048]{1,0}) fusion(%p), kind=kCustom, calls=%start
  %shard = bf16[512,2048]{1,0} get-tuple-element(%first), index=0
  %whole = bf16[2048,2048]{1,0} get-tuple-element(%first), index=1
  %copy-done = bf16[2048,2048]{1,0:T(8,128)(2,1)S(1)} copy-done(%copy-start)
  %product = (bf16[4096,2048]{1,0:T(8,128)(2,1)S(1)}, bf16[512,2048]{1,0}, bf16[2048,2048]{1,0}) \
fusion(%shard, %whole, %x, %copy-done), kind=kOutput, output_to_operand_aliasing={{1}: (0, {}), {2}: (1, {})}, \
calls=%step, backend_config={"estimated_cycles":"1000000"}
  %handed = bf16[512,2048]{1,0} get-tuple-element(%product), index=1
  %made = bf16[4096,2048]{1,0:T(8,128)(2,1)S(1)} get-tuple-element(%product), index=0
  %last = bf16[2048,2048]{1,0} fusion(%handed), kind=kCustom, calls=%end
  ROOT %twice = bf16[2048,2048]{1,0} add(%last, %last)
}
"""
V5E = CHIPS["v5e"]


def test_a_gather_in_steps_runs_beside_its_steps():
    multiplied = product(flops=2 * 4096 * 2048 * 2048)
    alone = step_time([multiplied], parse(ON_A_TPU), V5E, devices=4)
    gathered = 3 / 4 * 2 * 2048**2 / (V5E.link.bandwidth / V5E.devices)
    assert alone.uncovered == pytest.approx(max(0.0, gathered - alone.products), abs=1e-12)
    assert alone.uncovered < gathered
    assert alone.kernels == 2  # the product and the addition: the first and the last step only send


GROUPED = """\
HloModule jit_step, is_scheduled=true

ENTRY %main (x: f32[32,56,56,128], k: f32[3,3,4,128]) -> f32[32,56,56,128] {
  %x = f32[32,56,56,128]{3,2,1,0} parameter(0)
  %k = f32[3,3,4,128]{3,2,1,0} parameter(1)
  ROOT %product = f32[32,56,56,128]{3,2,1,0} convolution(%x, %k), window={size=3x3 pad=1_1x1_1}, \
dim_labels=b01f_01io->b01f, feature_group_count=32
}
"""


@pytest.mark.parametrize(
    ("text", "kind", "dtype", "chip", "words"),
    [
        (GROUPED, "convolution", "float32", "a100", "1 kernels of grouped convolutions"),
        (GROUPED, "convolution", "float32", "v5e", "1 kernels of grouped convolutions"),
        (GROUPED.replace("group_count=32", "group_count=1"), "convolution", "float32", "a100", ""),
        (TEXT, "dot", "int8", "l4", "INT8"),
        (TEXT, "dot", "int8", "v5e", ""),
        (TEXT, "dot", "bfloat16", "l4", ""),
    ],
)
def test_what_no_published_run_scores_has_no_time(text, kind, dtype, chip, words):
    kernel = replace(product(), kind=kind, asked=(dtype, dtype), compiled=(dtype, dtype))
    time = step_time([kernel], parse(text), CHIPS[chip])
    assert words in time.unscored and bool(words) == bool(time.unscored) and time.seconds > 0
    assert time.unscored in score(CHIPS[chip], time)


@pytest.mark.parametrize(
    ("chip", "chips", "seconds", "timed"),
    [("v5e", 8, 0.05, True), ("v5e", 16, 0.05, False), ("v5e", 16, 0.2, True), ("v4", 8, 0.05, False),
     ("v4", 4, 0.05, True), ("h100", 8, 0.05, True)],
)  # fmt: skip
def test_a_small_step_on_several_hosts_has_no_time(chip, chips, seconds, timed):
    assert (between_steps(CHIPS[chip], chips, seconds) == "") is timed


def test_what_takes_the_most_time_dominates():
    assert StepTime(3.0, 2.0, 1.0, 5).dominant == "products"
    assert StepTime(2.0, 3.0, 1.0, 5).dominant == "other kernels"
    assert StepTime(1.0, 2.0, 3.0, 5).dominant == "collectives"


@pytest.mark.parametrize("chip", ["v5e", "v6e", "v7x", "h100", "a100", "b200", "t4"])
@pytest.mark.parametrize("text", [TEXT, ON_A_TPU], ids=["gpu", "tpu"])
def test_a_time_is_never_below_its_bound(chip, text):
    rng = np.random.default_rng()
    for flops in 10 ** rng.uniform(3, 16, 20):
        matmuls = [product(flops=flops), product(flops=flops / 3, runs="not in the step")]
        module, devices = parse(text), 8
        time, bound = step_time(matmuls, module, CHIPS[chip], devices), estimate(matmuls, module, CHIPS[chip])
        assert time.seconds >= bound.seconds
