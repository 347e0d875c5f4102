"""Collectives in text that compilers wrote, against counts made by hand."""

import pytest

from keras_mp.planner.read.collectives import Collective, collectives, group_size
from keras_mp.planner.read.hlo import parse

# What libtpu 0.0.42.1 made of psum_scatter of f32[2048, 2048] over a v5e 2x2, without its estimates.
SCATTERED = """\
HloModule jit__lambda, is_scheduled=true, num_partitions=4

%all-reduce-scatter (input: f32[2048,2048]) -> f32[528,2048] {
  %input = f32[2048,2048]{1,0:T(8,128)} parameter(0)
  %constant.3 = f32[] constant(0)
  %pad = f32[2112,2048]{1,0:T(8,128)} pad(%input, %constant.3), padding=0_64x0_0
  %all-reduce.1 = f32[2112,2048]{1,0:T(8,128)} all-reduce(%pad), channel_id=2, replica_groups={{0,1,2,3}}, \
use_global_device_ids=true, to_apply=%region_0.0.clone, frontend_attributes={from-cross-replica-sharding="true"}
  %partition-id.3 = u32[] partition-id()
  %constant.4 = u32[] constant(528)
  %multiply.2 = u32[]{:T(128)} multiply(%partition-id.3, %constant.4)
  %constant.5 = u32[] constant(0)
  ROOT %dynamic-slice.1 = f32[528,2048]{1,0:T(8,128)S(1)} dynamic-slice(%all-reduce.1, %multiply.2, %constant.5), \
dynamic_slice_sizes={528,2048}
}

%fused_computation (param_0: f32[576,2048], param_1: u32[]) -> f32[512,2048] {
  %param_0 = f32[576,2048]{1,0:T(8,128)S(1)} parameter(0)
  %param_1 = u32[]{:S(6)} parameter(1)
  %constant.9 = u32[] constant(0)
  ROOT %dynamic-slice.3 = f32[512,2048]{1,0:T(8,128)} dynamic-slice(%param_0, %param_1, %constant.9), \
dynamic_slice_sizes={512,2048}
}

ENTRY %main.0_spmd (param.1: f32[2048,2048]) -> f32[512,2048] {
  %constant.7 = u32[] constant(16)
  %constant.8 = u32[] constant(48)
  %param.1 = f32[2048,2048]{1,0:T(8,128)} parameter(0), sharding={replicated}, metadata={op_name="g"}
  %fusion = f32[528,2048]{1,0:T(8,128)S(1)} fusion(%param.1), kind=kCustom, calls=%all-reduce-scatter, \
backend_config={"collective_algorithm_config":{"emitter":"SingleInputAllReduceScatterFusion"}}
  %slice = f32[48,2048]{1,0:T(8,128)S(1)} slice(%fusion), slice={[480:528], [0:2048]}
  %collective-permute-start = (f32[48,2048]{1,0:T(8,128)S(1)}, f32[48,2048]{1,0:T(8,128)S(1)}, u32[]{:S(2)}, \
u32[]{:S(2)}) collective-permute-start(%slice), channel_id=1, source_target_pairs={{0,1},{1,2},{2,3}}
  %partition-id.2 = u32[]{:S(6)} partition-id()
  %multiply.3 = u32[]{:S(6)} multiply(%constant.7, %partition-id.2)
  %subtract = u32[]{:S(6)} subtract(%constant.8, %multiply.3)
  %collective-permute-done = f32[48,2048]{1,0:T(8,128)S(1)} collective-permute-done(%collective-permute-start)
  %concatenate = f32[576,2048]{1,0:T(8,128)S(1)} concatenate(%collective-permute-done, %fusion), dimensions={0}
  ROOT %constant_dynamic-slice_fusion = f32[512,2048]{1,0:T(8,128)} fusion(%concatenate, %subtract), kind=kLoop, \
calls=%fused_computation
}
"""

# The same over a v5e 4x4: an all-reduce of the whole, and its reader slices.
REDUCED = """\
HloModule jit__lambda, is_scheduled=true, num_partitions=16

%fused_computation (param_0: f32[2048,2048], param_1: u32[]) -> f32[128,2048] {
  %param_0 = f32[2048,2048]{1,0:T(8,128)S(1)} parameter(0)
  %param_1 = u32[]{:T(128)S(6)} parameter(1)
  %constant.3 = u32[]{:T(128)} constant(0)
  ROOT %dynamic-slice.1 = f32[128,2048]{1,0:T(8,128)} dynamic-slice(%param_0, %param_1, %constant.3), \
dynamic_slice_sizes={128,2048}
}

ENTRY %main.0_spmd (param.1: f32[2048,2048]) -> f32[128,2048] {
  %constant.2 = u32[] constant(128)
  %param.1 = f32[2048,2048]{1,0:T(8,128)} parameter(0), sharding={replicated}, metadata={op_name="g"}
  %partition-id.2 = u32[]{:S(6)} partition-id()
  %multiply.1 = u32[]{:T(128)S(6)} multiply(%partition-id.2, %constant.2)
  %all-reduce = f32[2048,2048]{1,0:T(8,128)S(1)} all-reduce(%param.1), channel_id=2, \
replica_groups={{0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15}}, use_global_device_ids=true, to_apply=%region_0.0.clone, \
backend_config={"collective_algorithm_config":{"emitter":"RotatedPincerEmitter"}}
  ROOT %constant_dynamic-slice_fusion = f32[128,2048]{1,0:T(8,128)} fusion(%all-reduce, %multiply.1), kind=kLoop, \
calls=%fused_computation
}
"""

# Lines of what XLA makes for NVIDIA's GPUs: collectives that start and end apart, of one array and of two.
ON_GPUS = """\
HloModule jit_step, num_partitions=8

ENTRY %main (p: bf16[128,1024], g: f32[1024,512], h: f32[512]) -> f32[128,512] {
  %p = bf16[128,1024]{1,0} parameter(0)
  %g = f32[1024,512]{1,0} parameter(1)
  %h = f32[512]{0} parameter(2)
  %all-gather-start = (bf16[128,1024]{1,0}, bf16[1024,1024]{1,0}) all-gather-start(%p), \
replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}
  %all-gather-done = bf16[1024,1024]{1,0} all-gather-done(%all-gather-start)
  %reduce-scatter-start = ((f32[1024,512]{1,0}), f32[128,512]{1,0}) reduce-scatter-start(%g), \
replica_groups=[1,8]<=[8], dimensions={0}, to_apply=%add
  %all-reduce-start = (f32[1024,512]{1,0}, f32[512]{0}) all-reduce-start(%g, %h), replica_groups={}, to_apply=%add
  %all-reduce-done = (f32[1024,512]{1,0}, f32[512]{0}) all-reduce-done(%all-reduce-start)
  %all-to-all-start = ((f32[1024,512]{1,0}), f32[1024,512]{1,0}) all-to-all-start(%g), \
replica_groups={{0,1},{2,3},{4,5},{6,7}}, dimensions={1}
  %all-to-all-done = f32[1024,512]{1,0} all-to-all-done(%all-to-all-start)
  ROOT %reduce-scatter-done = f32[128,512]{1,0} reduce-scatter-done(%reduce-scatter-start)
}
"""

# Lines of what libtpu makes of a gather in steps, and what XLA makes of one for GPUs, each beside a product; and of a
# gather that nothing runs beside.
IN_STEPS = """\
HloModule jit_step, is_scheduled=true, num_partitions=4

%start (p.1: bf16[512,2048]) -> bf16[2048,2048] {
  %p.1 = bf16[512,2048]{1,0} parameter(0)
  ROOT %all-gather.1 = bf16[2048,2048]{1,0} all-gather(%p.1), replica_groups={{0,1,2,3}}, dimensions={0}, \
frontend_attributes={chain_id="0"}
}

%step (p.2: bf16[512,2048], x.2: bf16[2048,2048]) -> bf16[2048,2048] {
  %p.2 = bf16[512,2048]{1,0} parameter(0)
  %x.2 = bf16[2048,2048]{1,0} parameter(1)
  %all-gather.2 = bf16[2048,2048]{1,0} all-gather(%p.2), replica_groups={{0,1,2,3}}, dimensions={0}, \
frontend_attributes={chain_id="0"}
  ROOT %product = bf16[2048,2048]{1,0} WORK
}

%end (p.3: bf16[512,2048]) -> bf16[2048,2048] {
  %p.3 = bf16[512,2048]{1,0} parameter(0)
  ROOT %all-gather.3 = bf16[2048,2048]{1,0} all-gather(%p.3), replica_groups={{0,1,2,3}}, dimensions={0}, \
frontend_attributes={chain_id="0"}
}

ENTRY %main (p: bf16[512,2048], x: bf16[2048,2048]) -> bf16[2048,2048] {
  %p = bf16[512,2048]{1,0} parameter(0)
  %x = bf16[2048,2048]{1,0} parameter(1)
  %async-collective-start = bf16[2048,2048]{1,0} fusion(%p), kind=kCustom, calls=%start
  %fusion.1 = bf16[2048,2048]{1,0} fusion(%p, %x), kind=kCustom, calls=%step
  %async-collective-done = bf16[2048,2048]{1,0} fusion(%p), kind=kCustom, calls=%end
  %all-gather.4 = bf16[2048,2048]{1,0} all-gather(%p), replica_groups={{0,1,2,3}}, dimensions={0}
  %convolution.2 = bf16[2048,2048]{1,0} convolution(%all-gather.4, %x), dim_labels=bf_io->bf
  %all-gather-start.1 = (bf16[512,2048]{1,0}, bf16[2048,2048]{1,0}) all-gather-start(%p), \
replica_groups={{0,1,2,3}}, dimensions={0}
  %between = bf16[2048,2048]{1,0} WORK
  ROOT %all-gather-done.1 = bf16[2048,2048]{1,0} all-gather-done(%all-gather-start.1)
}
"""


@pytest.mark.parametrize(
    "work, products, beside",
    [
        ("convolution(%x, %x), dim_labels=bf_io->bf", (), 2),
        ("tanh(%x)", (), 0),
        ('custom-call(%x), custom_call_target="__cublas$gemm"', ("between",), 1),
    ],
)
def test_which_collectives_products_run_beside(work, products, beside):
    (gathers,) = collectives(parse(IN_STEPS.replace("WORK", work)), 4, products=products)
    array = 2048 * 2048 * 2 * 3 // 4
    assert (gathers.count, gathers.wire, gathers.covered) == (3, 3 * array, beside * array)


def test_a_fusion_that_scatters_is_a_reduce_scatter_and_sends_its_padding():
    whole, padded, moved = 2048 * 2048 * 4, 2112 * 2048 * 4, 48 * 2048 * 4
    assert collectives(parse(SCATTERED), 4) == [
        Collective("reduce-scatter", "float32", 4, "unattributed", 1, whole, padded * 3 // 4),
        Collective("collective-permute", "float32", 0, "unattributed", 1, moved, moved),
    ]


@pytest.mark.parametrize("name", ["calls=%all-reduce-scatter", "SingleInputAllReduceScatterFusion"])
def test_either_of_its_two_names_tells_it(name):
    for other in {"all-reduce-scatter", "SingleInputAllReduceScatterFusion"} - {name.removeprefix("calls=%")}:
        text = SCATTERED.replace(other, "renamed")
        assert [collective.kind for collective in collectives(parse(text), 4)][0] == "reduce-scatter"
    text = SCATTERED.replace("all-reduce-scatter", "fused").replace("AllReduceScatter", "Other")
    assert [collective.kind for collective in collectives(parse(text), 4)][0] == "all-reduce"


def test_an_all_reduce_whose_reader_slices_is_an_all_reduce():
    whole = 2048 * 2048 * 4
    assert collectives(parse(REDUCED), 16) == [
        Collective("all-reduce", "float32", 16, "unattributed", 1, whole, 2 * whole * 15 // 16)
    ]


def test_bytes_on_the_wire_of_a_ring_of_gpus():
    array, vector = 1024 * 512 * 4, 512 * 4
    by_kind = {collective.kind: collective for collective in collectives(parse(ON_GPUS), 8)}
    gathered = 1024 * 1024 * 2
    assert (by_kind["all-gather"].bytes, by_kind["all-gather"].wire) == (gathered, gathered * 7 // 8)
    assert by_kind["all-gather"].dtype == "bfloat16"
    assert (by_kind["reduce-scatter"].bytes, by_kind["reduce-scatter"].wire) == (array, array * 7 // 8)
    assert (by_kind["all-reduce"].count, by_kind["all-reduce"].bytes) == (2, array + vector)
    assert by_kind["all-reduce"].wire == (array + vector) * 2 * 7 // 8
    assert (by_kind["all-to-all"].group, by_kind["all-to-all"].wire) == (2, array // 2)


@pytest.mark.parametrize(
    ("groups", "size"),
    [
        ("replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%add", 4),
        ("replica_groups=[2,16]<=[4,8]T(1,0), to_apply=%add", 16),
        ("replica_groups=mesh['a'=2,'b'=4,'c'=4] {'b','c'}, to_apply=%add", 16),
        ("replica_groups=mesh['a'=2,'b'=8] {'b':(2)4}, to_apply=%add", 4),
        ("replica_groups={}, to_apply=%add", 32),
        ("to_apply=%add", 32),
    ],
)
def test_how_many_devices_take_part(groups, size):
    assert group_size(f", channel_id=1, {groups}", 32) == size


def test_a_device_alone_sends_nothing():
    alone = REDUCED.replace("{{0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15}}", "{{0},{1}}")
    assert [collective.wire for collective in collectives(parse(alone), 2)] == [0]
