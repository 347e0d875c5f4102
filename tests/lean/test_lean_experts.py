"""`make_lean` on KerasHub's six families of experts, against their own code in float64: outputs, losses, gradients."""

import contextlib

import keras
import numpy as np
import pytest
from arrays import numpy, rounded, values
from gradients_of import MODES, value_and_gradients
from keras import ops

import keras_mp
from keras_mp.conversion.to_float32 import merged_float32
from keras_mp.lean import expert_blocks
from keras_mp.lean.lean_model import lean_parts
from keras_mp.rebuild.quantized_banks import quantized_banks
from keras_mp.rebuild.walk import Walk

pytest.importorskip("keras_hub")
import causal_models
from keras_hub.src.models.gemma4.gemma4_moe import Gemma4MoEBlock, Gemma4Router
from keras_hub.src.models.gpt_oss.gpt_oss_decoder import GptOssSparseMoeBlock
from keras_hub.src.models.mixtral.mixtral_decoder import MixtralSparseMoeBlock
from keras_hub.src.models.qwen3_5_moe.qwen3_5_moe_decoder import Qwen3_5MoeSparseMoeBlock
from keras_hub.src.models.qwen3_moe.qwen3_moe_decoder import Qwen3SparseMoeBlock
from keras_hub.src.models.qwen_moe.qwen_moe_decoder import QwenSparseMoeBlock
from twins import twin

pytestmark = pytest.mark.jax
JAX = keras.backend.backend() == "jax"
WIDTH, INNER, EXPERTS, CHOSEN = 16, 12, 8, 2
ROWS, LENGTH = 3, 11  # tokens that are no multiple of anything


class Gemma4Experts(keras.layers.Layer):
    """Router and bank as Gemma 4's decoder calls them."""

    enable_moe_block, num_experts, num_experts_per_token = True, EXPERTS, CHOSEN

    def __init__(self, dtype):
        super().__init__(dtype=dtype)
        self.moe_router = Gemma4Router(EXPERTS, CHOSEN, dtype=dtype)
        self.moe_expert_bank = Gemma4MoEBlock(EXPERTS, WIDTH, INNER, dtype=dtype)

    def build(self, shape):
        self.moe_router.build(shape)
        self.moe_expert_bank.build(shape)
        self.built = True

    def call(self, x):
        result = self.moe_expert_bank(ops.reshape(x, (-1, WIDTH)), self.moe_router(x))
        return ops.reshape(result, ops.shape(x)), x


FAMILIES = {
    "mixtral": lambda dtype: MixtralSparseMoeBlock(WIDTH, INNER, EXPERTS, CHOSEN, dtype=dtype),
    "qwen_moe": lambda dtype: QwenSparseMoeBlock(WIDTH, INNER, 20, EXPERTS, CHOSEN, True, dtype=dtype),
    "qwen3_moe": lambda dtype: Qwen3SparseMoeBlock(WIDTH, INNER, EXPERTS, CHOSEN, False, dtype=dtype),
    "qwen3_5_moe": lambda dtype: Qwen3_5MoeSparseMoeBlock(WIDTH, INNER, 20, EXPERTS, CHOSEN, dtype=dtype),
    "gpt_oss": lambda dtype: GptOssSparseMoeBlock(WIDTH, INNER, EXPERTS, CHOSEN, dtype=dtype),
    "gemma4": Gemma4Experts,
}
TOLERANCES = {"float32": 2e-5, "mixed_bfloat16": 4e-2, "mixed_float16": 6e-3}


def model_of(family, dtype):
    """A model of one block, which gets the rows of a batch and their padding mask."""
    block = FAMILIES[family](dtype)
    x, mask = keras.Input((None, WIDTH), dtype=block.compute_dtype), keras.Input((None,), dtype="bool")
    options = {}
    if family not in ("gpt_oss", "gemma4"):
        over_pairs = family in ("qwen_moe", "qwen3_moe")
        options["attention_mask"] = mask[:, None, :] & mask[:, :, None] if over_pairs else mask
    block.build((None, None, WIDTH))
    return keras.Model([x, mask], block(x, **options)[0])


def total(model, mask):
    """The sum of a model's output times numbers, and of its losses, as a function of input, numbers and weights.

    The gradient of the numbers is the output.
    """

    def function(x, upstream, *weights):
        mapping = list(zip(model.trainable_variables, weights, strict=True))
        with keras.StatelessScope(state_mapping=mapping, collect_losses=True) as scope:
            output = model([x, ops.convert_to_tensor(mask)], training=True)
        dtype = model.variables[0].dtype
        losses = sum(ops.cast(loss, dtype) for loss in scope.losses)
        return ops.sum(ops.cast(output, dtype) * upstream) + 100 * losses

    return function


@pytest.fixture
def float64(monkeypatch):
    """A scope in which both backends compute in float64, also where KerasHub casts to float32."""

    @contextlib.contextmanager
    def scope():
        cast = ops.cast
        with contextlib.ExitStack() as stack, monkeypatch.context() as patch:
            if JAX:
                import jax

                stack.enter_context(jax.enable_x64(True))
            patch.setattr(ops, "cast", lambda x, dtype: cast(x, "float64" if dtype == "float32" else dtype))
            keras.config.set_floatx("float64")
            yield
        keras.config.set_floatx("float32")

    yield scope
    keras.config.set_floatx("float32")


def drawn(family, kind, low):
    """Tokens that choose as said, and by far; a mask; weights for each trainable variable; all as 16 bits hold them."""
    random = np.random.default_rng()
    weights = {}
    for variable in model_of(family, "float32").trainable_variables:
        fan_in = variable.shape[-2] if len(variable.shape) > 1 else 16
        weights[variable.path] = random.normal(size=variable.shape) / fan_in**0.5 + ("scale" in variable.path)
    router = next(path for path in weights if "gate_dense/kernel" in path or "router" in path and "kernel" in path)
    bias = next((weights[path] for path in weights if path.endswith("router_dense/bias")), np.zeros(EXPERTS))
    tokens = random.normal(size=(200 * LENGTH, WIDTH))
    tokens[:, 0] = 1.0
    if kind == "collapsed":
        weights[router][0] = 3 * (np.arange(EXPERTS) < CHOSEN)
    if kind == "empty":
        weights[router][0] = -12 * (np.arange(EXPERTS) < EXPERTS // 2)
    weights = {path: rounded(array, low) for path, array in weights.items()}
    tokens, scale = rounded(tokens, low), next((weights[path] for path in weights if "per_dim_scale" in path), 1.0)
    logits = np.sort(tokens * scale @ weights[router] / WIDTH**0.5 + bias)
    tokens = tokens[logits[:, -CHOSEN] - logits[:, -CHOSEN - 1] > 0.05][: ROWS * LENGTH]
    mask = np.arange(LENGTH)[None] < np.array([[LENGTH], [7], [4]])
    upstream = rounded(random.normal(size=(ROWS, LENGTH, WIDTH)), low)
    return tokens.reshape(ROWS, LENGTH, WIDTH), mask, list(weights.values()), upstream


KINDS = ("any", "collapsed", "empty")
# Each family in each dtype, with one kind of choice; those that are not rare have each kind and dtype twice.
CASES = [
    pytest.param(
        family,
        dtype,
        KINDS[(i + j) % 3],
        marks=([] if i < 3 else [pytest.mark.slow]) if i % 3 == j else [pytest.mark.slow, pytest.mark.rare],
    )
    for i, family in enumerate(FAMILIES)
    for j, dtype in enumerate(TOLERANCES)
]


@pytest.mark.parametrize("family, dtype, kind", CASES)
def test_is_the_familys_own_code_in_float64(family, dtype, kind, float64):
    compute, jit = dtype.removeprefix("mixed_"), MODES[-1]
    x, mask, weights, upstream = drawn(family, kind, compute)
    with float64():
        plain = total(model_of(family, "float64"), mask)
        _, *wanted = value_and_gradients(plain, [x, upstream, *weights], "jit" if JAX else "eager")
    model = keras_mp.lean.make_lean(model_of(family, dtype))
    assert [row.done for row in lean_parts(Walk(model)) if row.kind == "experts"] == [True]
    arrays = [ops.cast(x, compute), *(array.astype("float32") for array in (upstream, *weights))]
    _, *got = value_and_gradients(total(model, mask), arrays, jit)
    for number, (one, right) in enumerate(zip(got, wanted, strict=True)):
        size = max(np.max(np.abs(right)), 1e-3)
        assert np.max(np.abs(one - right)) <= TOLERANCES[dtype] * size, number


SIZES = {"vocabulary_size": 40, "num_layers": 1, "num_query_heads": 4, "num_key_value_heads": 2, "hidden_dim": 16}
MODELS = {
    "Qwen3Moe": {
        **SIZES, "intermediate_dim": 32, "head_dim": 4, "moe_intermediate_dim": 16, "num_experts": 8, "top_k": 2,
    },
    "Gemma4": {
        **SIZES, "intermediate_dim": 32, "head_dim": 4, "image_size": None, "enable_moe_block": True, "num_experts": 8,
        "expert_intermediate_dim": 16, "num_experts_per_token": 2,
    },
    "GptOss": {**SIZES, "intermediate_dim": 32, "num_experts": 8, "top_k": 2},
}  # fmt: skip


def task(name, **changes):
    """A language model of a family, compiled; its experts differ from each other."""
    backbone = getattr(causal_models.keras_hub.models, f"{name}Backbone")(**MODELS[name] | changes)
    model = getattr(causal_models.keras_hub.models, f"{name}CausalLM")(backbone=backbone, preprocessor=None)
    for variable in model.variables:
        if len(variable.shape) == 3:
            variable.assign(np.random.default_rng().normal(0, 0.3, variable.shape))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1), loss, jit_compile=JAX)
    return model


def experts_of(model):
    return [row for row in lean_parts(Walk(model)) if row.kind == "experts"]


def test_all_experts_compute_in_inference_and_where_a_step_is_divided_over_devices(monkeypatch):
    """The compiler would gather all tokens to sort them."""
    assert expert_blocks._computes_chosen(True) and not expert_blocks._computes_chosen(False)
    monkeypatch.setattr(expert_blocks.backend, "is_on_one_device", lambda: False)
    assert not expert_blocks._computes_chosen(True)


def test_own_code_stays_where_the_choice_saves_nothing():
    model = keras_mp.lean.make_lean(task("Qwen3Moe", num_experts=5))
    assert [(row.done, row.reason.partition(",")[0]) for row in experts_of(model)] == [
        (False, "a token chooses 2 of its 5 experts")
    ]


@pytest.mark.slow
def test_inspect_counts_products_of_the_loop_once_and_says_so():
    model, sizes = keras_mp.lean.make_lean(task("Qwen3Moe")), MODELS["Qwen3Moe"]
    x = causal_models.batch(model)
    report = keras_mp.inspect(model, (x, x["token_ids"]), target="cpu")
    assert "Products in loops of unknown length count once: for chosen experts, balanced routing." in report.notes
    rows, width, inner = 16, sizes["hidden_dim"], sizes["moe_intermediate_dim"]  # 1.25 of 32 x 2 / 8, in steps of 16
    once = 2 * rows * (width * 2 * inner + inner * width)
    forward = [one for one in report.matmuls if one.layer.endswith("moe_block") and one.role == "forward"]
    for counted, experts in ((True, sizes["num_experts"]), (False, 1)):
        assert sum(one.flops for one in forward if one.counted is counted) == experts * once


@pytest.mark.parametrize("name", ["Qwen3Moe", pytest.param("GptOss", marks=pytest.mark.slow)])
def test_stabilize_lets_routers_choose_in_float32(name):
    """On TensorFlow plain Keras fails in 16 bits: blocks of Mixtral and Qwen multiply a loss in float32 by 16 bits."""
    # XLA for CPUs has no attention in float16.
    tensorflow = keras.backend.backend() == "tensorflow"
    keras.config.set_dtype_policy("mixed_float16" if tensorflow else "mixed_bfloat16")
    model = task(name, num_experts=4)
    keras.config.set_dtype_policy("float32")
    x = causal_models.batch(model)
    if tensorflow and name == "Qwen3Moe":
        with pytest.raises(TypeError, match="Mul"):
            twin(model).train_on_batch(x, x["token_ids"])
    keras_mp.stabilize(model)
    assert np.isfinite(model.train_on_batch(x, x["token_ids"], return_dict=True)["loss"])
    low, seen = [], []
    for layer in model._flatten_layers():
        if "router" in layer.name or "gate_dense" in layer.name:
            seen.append(layer.compute_dtype)
            low += [layer.name] * (layer.compute_dtype != "float32")
    assert seen and not low


def dequantized(codes, scale, zero, columns):
    """float64: `(code - zero) scale` of groups of 128 rows, of int4 the low bits first."""
    if codes.shape[-1] != columns:
        low, high = ((codes.astype("int64") >> shift) % 16 for shift in (0, 4))
        codes = np.stack([low, high], -1).reshape(*codes.shape[:-1], -1)[..., :columns]
        codes = np.where(codes > 7, codes - 16, codes)
    group = np.arange(codes.shape[1]) // 128
    return (codes.astype("float64") - zero[:, group]) * scale[:, group].astype("float64")


def with_frozen_experts(name, integers, **changes):
    """A model with LoRA whose banks are integers; the same with float banks of the same values; the banks of before."""
    model = task(name, **changes)
    model.backbone.enable_lora(rank=2)
    for variable in model.trainable_variables:  # of LoRA's matrices the second begins as zeros
        variable.assign(np.random.default_rng().normal(0, 0.3, variable.shape))
    other, before = twin(model), []
    how = {"jit_compile": True} if JAX else {"run_eagerly": True}  # which takes less time than to trace a step
    for one in (model, other):
        one.compile(keras.optimizers.SGD(0.1), model.loss, **how)
    keras_mp.lean.narrow_frozen(model, experts=integers)
    for layer, plain in zip(model._flatten_layers(), other._flatten_layers(), strict=True):
        for place, bank in quantized_banks(layer).items():
            variable = getattr(plain, place)
            before.append((numpy(variable), *values(bank)))
            variable.assign(dequantized(*before[-1][1:], variable.shape[-1]))
    return model, other, before


QUANTIZED = [
    pytest.param(
        "Qwen3Moe", "int4", {"hidden_dim": 144, "moe_intermediate_dim": 9},
        marks=[pytest.mark.slow] * JAX,
    ),
    pytest.param("GptOss", "int8", {"num_experts": 12}, marks=[pytest.mark.slow] + [pytest.mark.rare] * JAX),
    pytest.param("Gemma4", "int4", {}, marks=[pytest.mark.slow] + [pytest.mark.rare] * JAX),
]  # fmt: skip


@pytest.mark.parametrize("name, integers, changes", QUANTIZED)
def test_experts_of_integers_train_as_the_floats_they_stand_for(name, integers, changes, tmp_path):
    model, plain, banks = with_frozen_experts(name, integers, **changes)
    steps = 2 ** {"int8": 8, "int4": 4}[integers] - 1
    assert len(banks) >= 2
    for floats, codes, scale, zero in banks:
        size = codes.dtype.itemsize * codes.size * (8 // {"int8": 8, "int4": 4}[integers])
        assert codes.dtype == "int8" and floats.size <= size <= floats.size * (1 + 1 / floats.shape[-1])
        for start in range(0, floats.shape[1], 128):
            group = floats[:, start : start + 128]
            group = np.pad(group, ((0, 0), (0, 128 - group.shape[1]), (0, 0)))  # as Keras fills up a group
            np.testing.assert_allclose(scale[:, start // 128] * steps, np.ptp(group, axis=1), rtol=1e-4)
        wrong = np.abs(dequantized(codes, scale, zero, floats.shape[-1]) - floats)
        assert np.all(wrong <= 1.01 * np.repeat(scale, 128, axis=1)[:, : floats.shape[1]])
    x = causal_models.batch(model)
    y = np.roll(x["token_ids"], -1, 1)
    np.testing.assert_allclose(model.predict(x, verbose=0), plain.predict(x, verbose=0), rtol=1e-4, atol=1e-4)
    keras_mp.lean.make_lean(model, remat=name == "GptOss")
    assert f"{len(banks)} banks of experts are stored as {integers}" in str(keras_mp.report(model))
    losses = [[one.train_on_batch(x, y) for _ in range(2)] for one in (model, plain)]
    np.testing.assert_allclose(*losses, rtol=1e-5)
    for one, right in zip(model.trainable_variables, plain.trainable_variables, strict=True):
        np.testing.assert_allclose(numpy(one), numpy(right), rtol=0, atol=1e-5)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(loaded.predict(x, verbose=0), model.predict(x, verbose=0), rtol=1e-5, atol=1e-5)
    merged = merged_float32(model)
    # As many weights of the same shapes as the model had, in the same order; of a loaded one, without LoRA's matrices.
    keras_mp.revert(model)
    keras_mp.revert(loaded)
    for one in (model, loaded, merged):
        own = [variable for variable in plain.variables if one is model or "lora" not in variable.path]
        assert [(v.name, v.shape, v.dtype) for v in one.variables] == [(v.name, v.shape, v.dtype) for v in own]
        for variable, right in zip(one.variables, own, strict=True):
            if len(variable.shape) == 3 and "expert" in variable.path and "bias" not in variable.path:
                np.testing.assert_allclose(numpy(variable), numpy(right), rtol=1e-6)
