"""What counts as a kernel of a compiled step, and the bytes that it moves, in text that compilers write."""

from keras_mp.planner.read.hlo import is_work, moved_bytes, parse
from tests.planner.test_step_time import ON_A_TPU, TEXT


def working(text):
    module = parse(text)
    return {
        name: moved_bytes(instruction, module)
        for name, instruction in module.computations[module.entry].items()
        if is_work(instruction, module)
    }


def test_collectives_and_copies_ahead_are_no_work():
    assert set(working(ON_A_TPU)) == {"product", "twice"}
    assert {"gather-start", "gather-done", "sum"}.isdisjoint(working(TEXT))


def test_a_product_counts_however_it_is_started():
    module = parse(ON_A_TPU)
    start = module.computations["main"]["copy-start"]
    assert not is_work(start, module) and is_work(start, module, {"copy-start"})


def test_bytes_cross_the_memory_once():
    """The operand and the weights, which a copy brought ahead; the result stays with the core, the gather is sent."""
    moved = working(ON_A_TPU)
    assert moved["product"] == 2 * 4096 * 2048 + 2 * 2048 * 2048
    assert moved["twice"] == 2 * 2 * 2048 * 2048


IN_A_LOOP = """HloModule step

%read (param_0: bf16[8,64,32], param_1: s32[], param_2: f32[64]) -> bf16[64,32] {
  %param_0 = bf16[8,64,32]{2,1,0} parameter(0)
  %param_1 = s32[] parameter(1)
  %param_2 = f32[64]{0} parameter(2)
  %zero = s32[] constant(0)
  %cut = bf16[1,64,32]{2,1,0} dynamic-slice(%param_0, %param_1, %zero, %zero), dynamic_slice_sizes={1,64,32}
  ROOT %flat = bf16[64,32]{1,0} bitcast(%cut)
}

%write (param_0: f32[8,64,32], param_1: f32[1,64,32], param_2: s32[]) -> f32[8,64,32] {
  %param_0 = f32[8,64,32]{2,1,0} parameter(0)
  %param_1 = f32[1,64,32]{2,1,0} parameter(1)
  %param_2 = s32[] parameter(2)
  %zero = s32[] constant(0)
  ROOT %new = f32[8,64,32]{2,1,0} dynamic-update-slice(%param_0, %param_1, %param_2, %zero, %zero)
}

%body (state: (bf16[8,64,32], f32[8,64,32], f32[1,64,32], s32[], f32[64])) -> (bf16[8,64,32], f32[8,64,32]) {
  %state = (bf16[8,64,32]{2,1,0}, f32[8,64,32]{2,1,0}, f32[1,64,32]{2,1,0}, s32[], f32[64]{0}) parameter(0)
  %bank = bf16[8,64,32]{2,1,0} get-tuple-element(%state), index=0
  %sums = f32[8,64,32]{2,1,0} get-tuple-element(%state), index=1
  %one = f32[1,64,32]{2,1,0} get-tuple-element(%state), index=2
  %number = s32[] get-tuple-element(%state), index=3
  %row = f32[64]{0} get-tuple-element(%state), index=4
  %read.1 = bf16[64,32]{1,0} fusion(%bank, %number, %row), kind=kLoop, calls=%read
  %write.1 = f32[8,64,32]{2,1,0} fusion(%sums, %one, %number), kind=kLoop, calls=%write
  ROOT %out = (bf16[8,64,32]{2,1,0}, f32[8,64,32]{2,1,0}) tuple(%bank, %write.1)
}

ENTRY %main (state: (bf16[8,64,32])) -> (bf16[8,64,32]) {
  %state = (bf16[8,64,32]{2,1,0}) parameter(0)
  ROOT %loop = (bf16[8,64,32]{2,1,0}) while(%state), condition=%never, body=%body
}
"""


def test_of_an_array_that_a_loop_takes_a_slice_of_the_slice_crosses():
    module = parse(IN_A_LOOP)
    read, write = (module.computations["body"][name] for name in ("read.1", "write.1"))
    assert moved_bytes(read, module) == 2 * (2 * 64 * 32) + 4 + 4 * 64  # slice and result, number, row
    assert moved_bytes(write, module) == 4 * (64 * 32) * 3 + 4  # values read; slice read and written; number
