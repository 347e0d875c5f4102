import pytest

from keras_mp.planner.read.hlo import Shape, parse

TEXT = """\
HloModule jit_step, is_scheduled=true, entry_computation_layout={(f32[8,16]{1,0})->f32[8,4]{1,0}}

%fused (param_0: bf16[8,16], param_1: f32[16,4]) -> f32[8,4] {
  %param_0 = bf16[8,16]{1,0:T(8,128)(2,1)} parameter(0)
  %param_1 = f32[16,4]{1,0} parameter(1)
  %cast.1 = bf16[16,4]{1,0} convert(%param_1), metadata={op_name="keras_mp.op.3"}
  ROOT %dot.2 = f32[8,4]{1,0} dot(%param_0, %cast.1), lhs_contracting_dims={1}, rhs_contracting_dims={0}, \
metadata={op_name="jit(step)/keras_mp.op.7/keras_mp.op.4"}
}

%body (state: (s32[], f32[16,4])) -> (s32[], f32[16,4]) {
  %state = (s32[], f32[16,4]{1,0}) parameter(0)
  %gte = f32[16,4]{1,0} get-tuple-element(%state), index=1
  %twice = f32[16,4]{1,0} add(%gte, %gte)
  ROOT %next = (s32[], f32[16,4]{1,0}) tuple(%gte, %twice)
}

%condition (state.1: (s32[], f32[16,4])) -> pred[] {
  %state.1 = (s32[], f32[16,4]{1,0}) parameter(0)
  ROOT %less = pred[] constant(true)
}

ENTRY %main (x: bf16[8,16], w: f32[16,4]) -> f32[8,4] {
  %x = bf16[8,16]{1,0} parameter(0)
  %w = f32[16,4]{1,0} parameter(1)
  %loop = (s32[], f32[16,4]{1,0}) while(%w), condition=%condition, body=%body, \
backend_config={"known_trip_count":{"n":"12"}}
  %pair = (f32[8]{0}, /*index=1*/f16[3]{0}) custom-call(%x), custom_call_target="__cublas$gemm"
  ROOT %fusion = f32[8,4]{1,0} fusion(%x, %w), kind=kCustom, calls=%fused, \
backend_config={"fusion_backend_config":{"kind":"__triton_gemm"},"estimated_cycles":"512"}
}
"""


@pytest.fixture
def module():
    return parse(TEXT)


def test_instructions(module):
    dot = module.computations["fused"]["dot.2"]
    assert (dot.opcode, dot.root, dot.operands) == ("dot", True, ("param_0", "cast.1"))
    assert dot.operation == "7/4"
    assert module.shapes_of(dot) == [Shape("bf16", (8, 16)), Shape("bf16", (16, 4))]
    pair = module.computations["main"]["pair"]
    assert pair.shapes == (Shape("f32", (8,)), Shape("f16", (3,)))
    assert (pair.size, pair.target) == (38, "__cublas$gemm")
    fusion = module.computations["main"]["fusion"]
    assert (fusion.target, fusion.cycles, fusion.callees) == ("__triton_gemm", 512, ["fused"])


def test_a_loop_counts_as_often_as_it_runs(module):
    kernels = {instruction.name: repeats for instruction, repeats in module.kernels()}
    assert kernels == {"twice": 12, "pair": 1, "fusion": 1}


def test_what_is_fused_belongs_to_its_kernel(module):
    fusion = module.computations["main"]["fusion"]
    assert [instruction.opcode for instruction in module.inside(fusion)] == [
        "fusion",
        "parameter",
        "parameter",
        "convert",
        "dot",
    ]
    assert module.traffic(fusion) == 8 * 4 * 4 + 8 * 16 * 2 + 16 * 4 * 4


def test_scratch_memory_of_a_library_is_no_traffic():
    product = '%y = (f32[8,4]{1,0}, s8[33554432]{0}) custom-call(%x, %w), custom_call_target="__cublas$lt$matmul"'
    plain = TEXT.replace("  ROOT %fusion", f"  {product}\n  ROOT %fusion")
    module = parse(plain)
    call = module.computations["main"]["y"]
    assert (call.workspace, call.size) == (33554432, 33554432 + 128)
    assert module.traffic(call) == 8 * 4 * 4 + 8 * 16 * 2 + 16 * 4 * 4
    other = parse(plain.replace("__cublas$lt$matmul", "my_kernel")).computations["main"]["y"]
    assert other.workspace == 0 and module.computations["main"]["pair"].workspace == 0


def test_subbyte_and_scalar_sizes():
    assert Shape("s4", (3,)).size == 2
    assert Shape("f32", ()).size == 4
    assert Shape("f8e4m3fn", (5, 2)).size == 10
    assert Shape("token", ()).size == 0


def test_no_module():
    with pytest.raises(ValueError, match="no ENTRY computation"):
        parse("nothing here")


CONDITIONAL = """\
HloModule conditional

%skip (p: (f32[4])) -> (f32[4]) {
  %p = (f32[4]{0}) parameter(0)
  %x = f32[4]{0} get-tuple-element(%p), index=0
  %kept = f32[4]{0} copy(%x)
  ROOT %out = (f32[4]{0}) tuple(%kept)
}

%update (q: (f32[4])) -> (f32[4]) {
  %q = (f32[4]{0}) parameter(0)
  %y = f32[4]{0} get-tuple-element(%q), index=0
  %sum = f32[4]{0} add(%y, %y)
  %twice = f32[4]{0} multiply(%sum, %y)
  ROOT %made = (f32[4]{0}) tuple(%twice)
}

ENTRY %main (a: pred[], b: f32[4]) -> (f32[4]) {
  %a = pred[] parameter(0)
  %b = f32[4]{0} parameter(1)
  %state = (f32[4]{0}) tuple(%b)
  ROOT %result = (f32[4]{0}) conditional(%a, %state, %state), branch_computations={%skip, %update}
}
"""


def test_one_branch_of_a_conditional_runs():
    module = parse(CONDITIONAL)
    assert [kernel.name for kernel, _ in module.kernels()] == ["kept", "sum", "twice"]
    assert [kernel.name for kernel, _ in module.kernels(one_branch=True)] == ["sum", "twice"]
    moved = sum(module.traffic(kernel) for kernel, _ in module.kernels(one_branch=True))
    assert moved == (16 + 16) + (16 + 16 + 16)
