"""Kernels that are no HLO products: Mosaic's for TPUs and cuDNN's attention: operations, layer, bytes, time."""

import dataclasses
import importlib.util

import keras
import numpy as np
import pytest
from keras import layers

from keras_mp import backend
from keras_mp.lowering import lower_step, plan_of
from keras_mp.planner.chips.targets import find_target
from keras_mp.planner.compile.compiler import compile_step
from keras_mp.planner.inspect import report_on
from keras_mp.planner.read.hlo import parse
from keras_mp.planner.read.matmuls import seconds
from keras_mp.planner.time.estimate import Roofline, impossible

pytestmark = pytest.mark.jax
only_jax = pytest.mark.skipif(keras.backend.backend() != "jax", reason="TensorFlow's programs have no such kernel")
BATCH, LENGTH, HEADS, FEATURES = 2, 512, 2, 128
V5E, H100 = find_target("v5e").traced, find_target("h100").traced


def kernels_of(function, *shapes, chip=V5E):
    """The kernels of a function of arrays, lowered for a chip."""
    import jax

    from keras_mp.planner.read.program import read, read_module

    platform = {"gpu": "cuda"}.get(chip.platform, chip.platform)
    with backend.traced_for(chip):
        lowered = jax.jit(function).trace(*shapes).lower(lowering_platforms=(platform,))
    asked = read(read_module(lowered.compiler_ir("stablehlo").operation.get_asm(enable_debug_info=True).encode()))
    return [entry for entry in asked.contractions if entry.kind == "kernel"]


def shape(*sizes, dtype="bfloat16"):
    import jax

    return jax.ShapeDtypeStruct(sizes, dtype)


def splash(mask):
    import jax
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask

    masks = splash_attention_mask.MultiHeadMask([splash_attention_mask.NumpyMask(mask)] * HEADS)
    return jax.vmap(splash_attention_kernel.make_splash_mha(mask=masks, head_shards=1, q_seq_shards=1))


@only_jax
@pytest.mark.parametrize("kind", ["causal", "full", "window"])
def test_splash_computes_the_blocks_that_its_mask_leaves(kind):
    import jax

    rows, columns = np.arange(LENGTH)[:, None], np.arange(LENGTH)
    mask = {"causal": columns <= rows, "full": columns >= 0, "window": abs(rows - columns) < 100}[kind]
    mask = np.broadcast_to(mask, (LENGTH, LENGTH))
    attend = splash(mask)
    found = kernels_of(jax.grad(lambda q, k, v: attend(q, k, v).astype("float32").sum(), (0, 1, 2)),
                       *[shape(BATCH, HEADS, LENGTH, FEATURES)] * 3)  # fmt: skip
    # The kernel's blocks are of 128 rows and columns. A product of a block is 2 * 128 * 128 * features.
    blocks = mask.reshape(LENGTH // 128, 128, LENGTH // 128, 128).any((1, 3)).sum()
    product = BATCH * HEADS * int(blocks) * 2 * 128 * 128 * FEATURES
    # Scores and output; scores, their gradient, and that of keys and values; the same of queries.
    assert {entry.name.split("_")[2]: entry.flops for entry in found} == {
        "fwd": 2 * product, "dkv": 4 * product, "dq": 3 * product}  # fmt: skip
    (forward,) = (entry for entry in found if "fwd" in entry.name)
    assert forward.asked == ("bf16", "bf16") and forward.sizes == (LENGTH, FEATURES, LENGTH)
    # Of each block of scores a block of keys and one of values are read: more than each array once.
    assert forward.traffic > BATCH * HEADS * int(blocks) * 2 * 128 * FEATURES * 2


@only_jax
@pytest.mark.parametrize("estimate", [None, 12345])
def test_a_pallas_kernel_has_its_own_estimate_or_the_products_of_its_body(estimate):
    import jax
    from jax.experimental import pallas as pl

    def body(x, y, out):
        def add(i, total):
            return total + jax.numpy.dot(x[...], y[...], preferred_element_type="float32")

        out[...] = jax.lax.fori_loop(0, 3, add, jax.numpy.zeros((128, 128), "float32"))

    cost = estimate and pl.CostEstimate(flops=estimate, transcendentals=0, bytes_accessed=777)
    call = pl.pallas_call(
        body,
        jax.ShapeDtypeStruct((512, 256), "float32"),
        grid=(4, 2),
        in_specs=[pl.BlockSpec((128, 384), lambda i, j: (i, 0)), pl.BlockSpec((384, 128), lambda i, j: (0, j))],
        out_specs=pl.BlockSpec((128, 128), lambda i, j: (i, j)),
        cost_estimate=cost,
    )
    (kernel,) = kernels_of(call, shape(512, 384), shape(384, 256))
    # Rows of x stay while columns of y change, which are read anew for each of them.
    moved = (512 * 384 + 4 * 384 * 256) * 2 + 512 * 256 * 4
    assert (kernel.flops, kernel.traffic) == ((estimate, 777) if estimate else (3 * 2 * 512 * 384 * 256, moved))


@only_jax
@pytest.mark.parametrize("causal", [False, True])
def test_cudnns_attention_computes_two_products_and_five_backward(causal):
    import jax

    def attend(q, k, v):
        y = jax.nn.dot_product_attention(q, k, v, is_causal=causal, implementation="cudnn")
        return y.astype("float32").sum()

    found = kernels_of(jax.grad(attend, (0, 1, 2)), *[shape(BATCH, LENGTH, HEADS, 64)] * 3, chip=H100)
    seen = int(np.tril(np.ones((LENGTH, LENGTH))).sum()) if causal else LENGTH * LENGTH
    assert [entry.flops for entry in found] == [products * 2 * BATCH * HEADS * seen * 64 for products in (2, 5)]
    assert all(entry.sizes == (LENGTH, 64, LENGTH) for entry in found)


def attention_model():
    class Attention(layers.Layer):
        def call(self, x):
            import jax

            rows = keras.ops.reshape(x, (-1, LENGTH, HEADS, FEATURES))
            if backend.traced_chip().platform == "gpu":
                y = jax.nn.dot_product_attention(rows, rows, rows, is_causal=True, implementation="cudnn")
            else:
                rows = rows.transpose(0, 2, 1, 3)
                y = splash(np.tril(np.ones((LENGTH, LENGTH), bool)))(rows, rows, rows).transpose(0, 2, 1, 3)
            return keras.ops.reshape(y, x.shape)

        def compute_output_spec(self, x):
            return keras.KerasTensor(x.shape, "bfloat16")

    keras.config.set_dtype_policy("mixed_bfloat16")
    width = HEADS * FEATURES
    x = keras.Input((LENGTH, width))
    y = layers.Dense(width, name="after")(Attention(name="attention")(layers.Dense(width, name="before")(x)))
    model = keras.Model(x, y)
    model.compile("sgd", "mse")
    return model


@pytest.mark.slow
@only_jax
@pytest.mark.parametrize(
    ("target", "package", "kernel"),
    [("v5e", "libtpu", "Mosaic"), ("h100", "jax_cuda13_plugin", "cuDNN attention")],
)
def test_no_product_around_a_kernel_is_lost_and_the_kernel_has_its_layer_and_time(target, package, kernel):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} compiles for it")
    size = keras.KerasTensor((BATCH, LENGTH, HEADS * FEATURES))
    chip = find_target(target)
    step = lower_step(attention_model(), (size, size), training=True, chip=chip.traced)
    report = report_on(compile_step(step, chip), "mixed_bfloat16")
    mine = [matmul for matmul in report.matmuls if matmul.kind == "kernel"]
    assert {(matmul.layer, matmul.kernel, matmul.operands) for matmul in mine} == {("attention", kernel, "bfloat16")}
    assert [matmul.role for matmul in mine] == ["forward", *["input gradient"] * (len(mine) - 1)]
    assert len(mine) == (3 if target == "v5e" else 2)
    assert all(matmul.compiled for matmul in report.matmuls)
    dense = [matmul for matmul in report.matmuls if matmul.layer in ("before", "after")]
    assert len(dense) == 5  # the gradient of the batch is not computed
    assert report.time.seconds > sum(seconds(matmul, chip.chip) for matmul in report.matmuls) and not report.error


@only_jax
def test_a_recomputed_kernel_computes_the_blocks_of_its_mask_too():
    import jax

    attend = splash(np.tril(np.ones((LENGTH, LENGTH), bool)))

    def loss(q, k, v):
        return attend(q, k, v).astype("float32").sum()

    once, anew = (
        {
            entry.name: entry.flops
            for entry in kernels_of(jax.grad(function, (0, 1, 2)), *[shape(BATCH, HEADS, LENGTH, FEATURES)] * 3)
        }
        for function in (loss, jax.checkpoint(loss))
    )
    assert once == anew and len(once) == 3


@only_jax
def test_of_a_step_on_several_devices_a_kernel_computes_the_blocks_of_its_mask_too():
    from keras_mp.planner.read.program import read, read_module

    def operations(plan):
        size = keras.KerasTensor((BATCH, LENGTH, HEADS * FEATURES))
        step = lower_step(attention_model(), (size, size), training=True, chip=V5E, plan=plan)
        asked = read(read_module(step.module))
        return [entry.flops for entry in asked.contractions if entry.kind == "kernel"]

    assert operations(plan_of("data", 2)) == [flops // 2 for flops in operations(None)]


def ragged_model(rows, width, features, groups):
    class Banks(layers.Layer):
        def build(self, shape):
            self.bank = self.add_weight(shape=(groups, width, features))

        def call(self, x):
            import jax

            sizes = jax.numpy.full((groups,), rows // groups, "int32")
            return jax.lax.ragged_dot(x, jax.numpy.asarray(self.bank, x.dtype), sizes)

        def compute_output_spec(self, x):
            return keras.KerasTensor((*x.shape[:-1], features), "bfloat16")

    keras.config.set_dtype_policy("mixed_bfloat16")
    x = keras.Input((width,), batch_size=rows)
    model = keras.Model(x, layers.Dense(8)(Banks(name="banks")(layers.Dense(width)(x))))
    model.compile("sgd", "mse")
    return model


@pytest.mark.slow
@only_jax
@pytest.mark.parametrize(
    ("target", "package", "dense"),
    [("v5e", "libtpu", ["kernel gradient"]), ("h100", "jax_cuda13_plugin", ["forward", "kernel gradient", "input"])],
)
def test_a_ragged_product_has_its_operations_or_those_of_a_dense_one_where_it_was_made_so(target, package, dense):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} compiles for it")
    rows, width, features, groups = 512, 128, 256, 4
    chip = find_target(target)
    batch = keras.KerasTensor((rows, width)), keras.KerasTensor((rows, 8))
    step = lower_step(ragged_model(rows, width, features, groups), batch, training=True, chip=chip.traced)
    report = report_on(compile_step(step, chip), "mixed_bfloat16")
    mine = [matmul for matmul in report.matmuls if matmul.layer == "banks"]
    own = 2 * rows * width * features  # each row by the matrix of its group
    sizes = {"forward": (rows, width, features), "kernel gradient": (width, rows, features),
             "input gradient": (rows, features, width)}  # fmt: skip
    assert {matmul.role: matmul.sizes for matmul in mine} == sizes
    for matmul in mine:
        is_dense = any(matmul.role.startswith(role) for role in dense)
        assert matmul.compiled and matmul.flops == (groups if is_dense else 1) * own
        assert matmul.note == ("expanded to a dense product, 4 times the operations" if is_dense else "")


@only_jax
@pytest.mark.parametrize("length", [32, 33])
def test_attention_of_an_odd_length_trains_on_a_gpu_without_cudnns_kernel(length):
    import keras_mp

    keras.config.set_dtype_policy("mixed_bfloat16")
    x = keras.Input((length, 64), batch_size=BATCH)
    y = x
    for _ in range(2):
        y = layers.Add()([y, layers.MultiHeadAttention(2, 32)(y, y)])
    model = keras.Model(x, y)
    model.compile("sgd", "mse")
    size = keras.KerasTensor((BATCH, length, 64))
    step = lower_step(keras_mp.lean.make_lean(model, remat=True), (size, size), training=True, chip=H100)
    assert (b"fmha" in step.module) == (length % 2 == 0)


def test_a_time_below_what_the_products_need_is_called_a_fault():
    chip = find_target("v5e").chip
    import keras_mp

    model = keras.Sequential([keras.Input((64,)), layers.Dense(64, name="dense")])
    (product,) = keras_mp.inspect(model, keras.KerasTensor((8, 64)), training=False).matmuls
    lost = dataclasses.replace(product, runs="", flops=round(chip.peak["bfloat16"]))  # a second's work
    bound = Roofline(0.5, 0.5, 0.0, 0)
    assert impossible([product], bound, 0.6, chip) == impossible([lost], bound, 1.6, chip) == ""
    said = impossible([product, lost], bound, 0.6, chip)
    assert said.startswith("600 ms is impossible") and "1.5e+03 ms" in said and "1 of 2" in said
    assert "in dense." in said


def test_an_instruction_whose_attributes_have_line_breaks_ends_no_computation():
    text = """\
HloModule jit_step, is_scheduled=true

ENTRY %main (x: bf16[8,8]) -> bf16[8,8] {
  %x = bf16[8,8]{1,0} parameter(0)
  %kernel = (f32[8]{0}, bf16[8,8]{1,0}) custom-call(%x, %x), custom_call_target="tpu_custom_call", metadata_of={kernel={
"blocks":"{128}"
}}, metadata={op_name="keras_mp.op.7/keras_mp.op.9"}
  ROOT %dot = bf16[8,8]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%other (y: f32[]) -> f32[] {
  ROOT %y = f32[] parameter(0)
}
"""
    module = parse(text)
    assert [kernel.name for kernel, _ in module.kernels()] == ["kernel", "dot"]
    kernel = module.computations["main"]["kernel"]
    assert (kernel.operation, kernel.target) == ("7/9", "tpu_custom_call") and list(module.computations) == [
        "main",
        "other",
    ]


@only_jax
def test_what_is_in_a_devices_part_has_the_names_of_the_layers_around_it():
    """JAX begins names anew there: without these a kernel's gradient was a forward product of no layer."""
    import jax
    from jax.sharding import PartitionSpec

    from keras_mp.planner.read.program import number_operations

    mesh = jax.sharding.AbstractMesh((4,), ("rows",))

    def loss(x):
        with jax.named_scope("layer"):
            rows = PartitionSpec("rows")
            return jax.shard_map(jax.lax.tanh, mesh=mesh, in_specs=rows, out_specs=rows)(x).sum()

    sharding = jax.sharding.NamedSharding(mesh, PartitionSpec("rows"))
    traced = jax.jit(jax.grad(loss)).trace(jax.ShapeDtypeStruct((8, 8), "float32", sharding=sharding))
    names = number_operations(traced.lower(lowering_platforms=("tpu",)).compiler_ir("stablehlo"))
    assert [name for name in names if name.endswith("tanh")] == ["jit(loss)/jvp(layer)/shard_map/tanh"]
    assert any("transpose(jvp(layer))/shard_map" in name and name.endswith("mul") for name in names)
