"""Reports of small steps, compiled for chips that are not attached, against counts made without the compiler."""

import dataclasses
import functools
import json
import re
from collections import Counter
from pathlib import Path

import keras
import numpy as np
import pytest
from steps import BATCH, LENGTH, convolutional, gpt_flops, planted, tensor, tiny_gpt

import keras_mp
from keras_mp.planner.chips.targets import find_target
from keras_mp.planner.read.matmuls import Matmul
from keras_mp.planner.read.memory import Memory
from keras_mp.planner.report.compile_report import CheckError
from keras_mp.planner.report.suggestions import suggest
from keras_mp.rebuild.walk import layers_by_path


@functools.cache
def inspected(chip):
    model, batch = tiny_gpt()
    return keras_mp.inspect(model, batch, chip)


@pytest.fixture(params=["h100", *(pytest.param(chip, marks=pytest.mark.slow) for chip in ("v5e", "host"))])
def gpt_report(request):
    return inspected(request.param)


@pytest.fixture
def h100():
    return inspected("h100")


def has_kernel(report):
    """Whether attention is one kernel forward, and one backward: cuDNN's, which JAX alone has."""
    return keras.backend.backend() == "jax" and report.target == "h100"


@pytest.mark.jax
def test_operations_are_those_of_the_paper(gpt_report):
    assert gpt_report.flops == pytest.approx(gpt_flops(causal_kernel=has_kernel(gpt_report)), rel=0.001)


@pytest.mark.jax
def test_every_product_has_its_layer_and_its_role(gpt_report):
    assert all(matmul.layer != "unattributed" for matmul in gpt_report.matmuls)
    roles = Counter((matmul.layer, matmul.role) for matmul in gpt_report.matmuls)
    for layer in ("attention/query_key_value", "attention/output", "dense_1", "dense_2"):
        for role in ("forward", "input gradient", "kernel gradient"):
            assert roles[f"block1_{layer}", role] == 1, (layer, role)
    forward, backward = (1, 1) if has_kernel(gpt_report) else (2, 5)  # the scores, once more
    assert roles["block1_attention", "forward"] == forward
    assert roles["block1_attention", "input gradient"] == backward
    assert sum(roles.values()) == 4 * 3 + forward + backward + 3


def untied():
    """A lean model whose head has weights of its own."""
    tokens = keras.Input((LENGTH,), dtype="int32")
    logits = keras.layers.Dense(64, name="head")(keras.layers.Embedding(64, 32)(tokens))
    return keras_mp.lean.make_lean(keras.Model(tokens, logits)), (tensor((BATCH, LENGTH), "int32"),) * 2


@pytest.mark.parametrize(
    "build, head", [(untied, "head"), pytest.param(tiny_gpt, "tokens_embedding", marks=pytest.mark.slow)]
)
def test_a_loss_in_chunks_is_of_the_layer_that_makes_the_logits(build, head):
    model, batch = build()
    model.compile("sgd", keras_mp.lean.ChunkedCrossEntropy(rows=BATCH * LENGTH // 4))
    matmuls = keras_mp.inspect(model, batch, "host").matmuls
    assert all(matmul.layer != "unattributed" for matmul in matmuls)
    products = Counter((matmul.role, matmul.repeats) for matmul in matmuls if matmul.layer == head)
    assert products == Counter([("forward", 4), ("input gradient", 4), ("kernel gradient", 4)])


@pytest.mark.jax
def test_every_product_is_found_in_the_compiled_step(gpt_report):
    assert all(matmul.compiled for matmul in gpt_report.matmuls)


def test_dtypes_are_those_of_the_compiled_text(h100):
    """Counts the operand dtypes of each `dot` in the compiler's own dump, with nothing of the report's parser."""
    text = (Path(h100.log).parent / "compiled.hlo").read_text()
    counted = Counter()
    for computation in re.split(r"\n\}\n", text):
        types = dict(re.findall(r"%?([\w.\-]+) = \(?(\w+)\[", computation))
        for left, right in re.findall(r" dot\(%?([\w.\-]+), %?([\w.\-]+)\)", computation):
            counted[types[left], types[right]] += 1
    short = {"bfloat16": "bf16", "float32": "f32"}
    reported = Counter(
        tuple(short[dtype] for dtype in matmul.compiled) for matmul in h100.matmuls if "merged" not in matmul.note
    )
    # A kernel that is compiled once and used for equal products stands once in the text.
    assert set(reported) == set(counted)
    assert sum(reported.values()) >= sum(counted.values()) > 0


def test_memory_is_the_compilers(gpt_report):
    kept = json.loads((Path(gpt_report.log).parent / "memory.json").read_text())
    memory = gpt_report.memory
    assert (memory.arguments, memory.temporary) == (kept["argument"], kept["temp"])
    model, _ = tiny_gpt()
    model.optimizer.build(model.trainable_variables)
    assert memory.parameters == sum(np.prod(w.shape, dtype=int) * 4 for w in model.weights)
    assert memory.optimizer == sum(np.array(variable).nbytes for variable in model.optimizer.variables)
    if gpt_report.target != "v5e":  # a TPU's arrays are padded to its tiles
        metrics_and_batch = 8 + 2 * BATCH * LENGTH * 4
        assert memory.arguments == pytest.approx(memory.parameters + memory.optimizer + metrics_and_batch, abs=64)
    assert memory.peak >= memory.parameters + memory.optimizer
    assert memory.fits


@pytest.mark.parametrize("chip", ["h100", pytest.param("v5e", marks=pytest.mark.slow)])
def test_what_is_planted_is_found_and_named(chip):
    model, batch = planted(rows=8192)
    report = keras_mp.inspect(model, batch, chip)
    with pytest.raises(CheckError, match="probabilities: softmax of 524288 values in float16"):
        report.check(no_low_precision_softmax=True)
    with pytest.raises(CheckError, match="full \\(forward\\)"):
        report.check(low_precision_share=0.95 if chip == "h100" else 1.0)
    asked_in_float32 = {matmul.layer for matmul in report.matmuls if "float32" in matmul.asked}
    assert asked_in_float32 == {"full"}
    assert {matmul.layer for matmul in report.matmuls if 1001 in matmul.off(8)} == {"odd", "full"}
    advice = "\n".join(advice.text for advice in report.advice)
    assert "Softmax in float16 in 'probabilities'" in advice
    assert "asked for in float32, in 'full'" in advice
    # A TPU pads 1001 to 1024, which costs less than a hundredth of this step.
    assert ("The size 1001 in 'odd'" in advice) == (chip == "h100")


@pytest.mark.slow
def test_a_stabilized_model_has_no_low_softmax_and_is_compared_with_float32():
    model, batch = planted()
    report = keras_mp.inspect(keras_mp.stabilize(model), batch, "host", compare=["float32"])
    report.check(no_low_precision_softmax=True, fits=True)
    assert set(report.compared["float32"].shares) == {"float32"}


@pytest.mark.slow
def test_why_mixed_precision_is_not_faster_here():
    report = inspected("host")
    if all(matmul.compiled == ("bfloat16", "bfloat16") for matmul in report.matmuls):
        pytest.skip("this CPU has bfloat16 units that XLA uses")
    assert any("mixed precision is not faster" in advice.text for advice in report.advice)


@pytest.mark.slow
def test_keras_float8_on_an_h100_is_no_float8():
    layers = [keras.layers.Dense(256, dtype="float8_from_mixed_bfloat16") for _ in range(3)]
    model = keras.Sequential([keras.Input((256,)), *layers], name="keras_float8")
    model.compile("sgd", "mse")
    report = keras_mp.inspect(model, (tensor((256, 256)), tensor((256, 256))), "h100")
    assert report.asked_and_compiled[0].startswith("8 of 8 products are FP8 in the model: 0 run in FP8, 8 in bfloat16")
    with pytest.raises(CheckError, match="8 products asked for in FP8 do not run in FP8"):
        report.check(fp8_kept=True)
    assert report.precision == "fp8"


@pytest.mark.slow
def test_convolutions():
    model, batch = convolutional()
    report = keras_mp.inspect(model, batch, "h100")
    rows = {(matmul.layer, matmul.role): matmul for matmul in report.matmuls}
    expected = {("first", "forward"), ("first", "kernel gradient"), ("second", "forward")}
    expected |= {("second", "input gradient"), ("second", "kernel gradient")}
    assert {key for key, matmul in rows.items() if matmul.kind == "convolution"} == expected
    # Along one side of 16 with padding, a window of 3 sees 3 * 16 - 2 values; all four kinds multiply the same pairs.
    assert rows["first", "forward"].flops == 2 * 4 * 16 * 8 * (3 * 16 - 2) ** 2
    for role in ("forward", "input gradient", "kernel gradient"):
        assert rows["second", role].flops == 2 * 4 * 24 * 16 * (3 * 7) ** 2
    assert all(matmul.compiled == ("bfloat16", "bfloat16") for matmul in rows.values() if matmul.kind == "convolution")
    assert rows["head", "forward"].asked == ("float32", "float32")


@pytest.mark.jax
def test_no_convolution_of_a_cpu_is_lost():
    """XLA for CPUs takes the names from the gradients of kernels, so they are found by their sizes."""
    convolutions = [keras.layers.Conv2D(filters, 3, padding="same", use_bias=False) for filters in (16, 24)]
    network = [*convolutions, keras.layers.GlobalAveragePooling2D(), keras.layers.Dense(8)]
    model = keras.Sequential([keras.Input((4, 4, 16)), *network])
    model.compile("adam", "mse")
    found = keras_mp.inspect(model, (tensor((2, 4, 4, 16)), tensor((2, 8)))).matmuls
    of_convolutions = [matmul for matmul in found if matmul.kind == "convolution"]
    assert [matmul.note for matmul in of_convolutions] == [""] * 5
    assert len({matmul.runs for matmul in of_convolutions}) == 5


def test_a_sequential_model_in_float32_beside_another_precision():
    # The dtype of its input is written as "float32", as its policy may be.
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16), keras.layers.Dense(2)])
    model.compile("sgd", "mse")
    batch = (keras.KerasTensor((4, 8), "float32"), keras.KerasTensor((4, 2), "float32"))
    report = keras_mp.inspect(model, batch, "host", compare="mixed_bfloat16")
    assert set(report.shares) == {"float32"}
    assert model.dtype_policy.name == "float32" and "The same step in mixed_bfloat16: " in str(report)
    assert "In other precisions" in str(report.details("compared"))
    low = report.compared["mixed_bfloat16"]
    assert {matmul.asked for matmul in low.matmuls} >= {("bfloat16", "bfloat16")}


def test_inference_of_a_function_that_builds():
    report = keras_mp.inspect(lambda: tiny_gpt()[0], tensor((BATCH, LENGTH), "int32"), "host", training=False)
    assert report.flops == pytest.approx(gpt_flops(training=False), rel=0.001)
    assert {matmul.role for matmul in report.matmuls} == {"forward"}
    assert report.memory.optimizer == 0


def test_a_layer_called_twice_of_a_model_that_is_left_as_it_was():
    shared = keras.layers.Dense(32, name="shared")
    inputs = keras.Input((32,))
    model = keras.Model(inputs, shared(shared(inputs)))
    model.compile("adam", "mse")
    model.train_on_batch(np.ones((8, 32)), np.zeros((8, 32)))
    before = [np.array(v) for v in (*model.variables, *model.optimizer.variables, *model.metrics_variables)]
    attributes = {path: set(vars(layer)) for path, layer in layers_by_path(model).items()}
    report = keras_mp.inspect(model, (tensor((8, 32)), tensor((8, 32))), "host")
    after = [np.array(v) for v in (*model.variables, *model.optimizer.variables, *model.metrics_variables)]
    for old, new in zip(before, after, strict=True):
        np.testing.assert_array_equal(old, new)
    assert {path: set(vars(layer)) for path, layer in layers_by_path(model).items()} == attributes

    forward = [(matmul.layer, matmul.call) for matmul in report.matmuls if matmul.role == "forward"]
    assert forward == [("shared", 1), ("shared", 2)]
    backward = Counter((m.call, m.role) for m in report.matmuls if m.role != "forward")
    assert backward[2, "kernel gradient"] == 1 and backward[2, "input gradient"] == 1


def test_scaling_accumulation_and_atomic_skips():
    keras.config.set_dtype_policy("mixed_float16")
    model = keras.Sequential([keras.Input((16,)), keras.layers.Dense(16), keras.layers.Dense(8)])
    inner = keras.optimizers.Adam(gradient_accumulation_steps=2, global_clipnorm=1.0)
    model.compile(keras_mp.LossScaleOptimizer(inner), "mse")
    keras_mp.loss_scaling.atomic_skip(model)
    report = keras_mp.inspect(model, (tensor((8, 16)), tensor((8, 8))), "v5e")
    assert Counter(matmul.role for matmul in report.matmuls) == {
        "forward": 2, "kernel gradient": 2, "input gradient": 1,
    }  # fmt: skip
    assert all(matmul.asked == ("float16", "float16") for matmul in report.matmuls)


@pytest.mark.slow
def test_a_recurrent_layer_counts_its_steps():
    model = keras.Sequential([keras.Input((7, 16)), keras.layers.LSTM(8, name="lstm")])
    model.compile("sgd", "mse")
    report = keras_mp.inspect(model, tensor((4, 7, 16)), "host", training=False)
    # Four gates, from the input and from the state, for each of seven steps.
    assert report.flops == 2 * 7 * 4 * 4 * 8 * (16 + 8)
    trained = keras_mp.inspect(model, (tensor((4, 7, 16)), tensor((4, 8))), "host")
    assert {(matmul.repeats, matmul.counted) for matmul in trained.matmuls} == {(7, True)}


@pytest.mark.jax
@pytest.mark.skipif(keras.backend.backend() != "jax", reason="TensorFlow allocates what it builds: 16 GiB here")
def test_a_model_that_does_not_fit():
    report = keras_mp.inspect(_wide, (tensor((64, 65536)), tensor((64, 65536))), "t4")
    assert not report.memory.fits
    with pytest.raises(CheckError, match="needs .* GiB, and Tesla T4 has 14.74"):
        report.check(fits=True)
    assert "more than Tesla T4 has" in report.advice[0].text


def _wide():
    model = keras.Sequential([keras.Input((65536,)), keras.layers.Dense(65536, use_bias=False)])
    model.compile("sgd", "mse")
    return model


@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="on JAX, XLA has all that Keras runs here")
def test_what_xla_has_not_is_named_with_its_layer():
    layers = [keras.Input((8, 8, 3)), keras.layers.RandomRotation(0.1, name="turn"), keras.layers.Flatten()]
    model = keras.Sequential([*layers, keras.layers.Dense(2)], name="augmented")
    model.compile("sgd", "mse")
    with pytest.raises(
        keras_mp.errors.CompileError,
        match="layer 'turn' \\(RandomRotation\\) runs ImageProjectiveTransformV3, which XLA does not support",
    ):
        keras_mp.inspect(model, (tensor((2, 8, 8, 3)), tensor((2, 2))), "host")


@pytest.mark.parametrize("share", [-0.1, 1.5])
def test_a_share_is_from_0_to_1(h100, share):
    with pytest.raises(ValueError, match="fp8_share must be from 0 to 1"):
        h100.check(fp8_share=share)


def test_the_report_as_json_as_text_and_as_a_page(h100, tmp_path):
    read = json.loads(h100.to_json())
    assert read["target"] == "h100" and len(read["matmuls"]) == len(h100.matmuls)
    text = " ".join(str(h100).split())
    assert f"of {len(h100.matmuls)} products run in bfloat16" in text and "at the chip's peak rates" in text
    page = h100.to_html(tmp_path / "new" / "report.html").read_text()
    assert "block1_dense_1" in page.replace("<wbr>", "") and "http" not in page
    assert list((tmp_path / "new").iterdir()) == [tmp_path / "new" / "report.html"]


def test_the_answer_is_first_and_on_80_columns(h100):
    lines = str(h100).splitlines()
    assert max(map(len, lines)) <= 80 and len(lines) <= 25
    labels = [line.partition(":")[0] for line in lines if not line.startswith(" ")]
    assert labels[:3] == ["gpt", "Fits", "Largest at the peak"] and labels[-1] == "More"
    assert {"Time", "Precision"} < set(labels) and "0.0 MiB" not in str(h100)


def test_what_gains_less_than_a_hundredth_of_the_step_is_not_advised():
    product = Matmul(
        "dense", 1, "forward", "dot", (64, 130, 8), ("float32",) * 2, ("float32",) * 2, "float32", "float32", 10**9, 1,
        "k", 0,
    )  # fmt: skip
    memory = Memory(*(1 for _ in dataclasses.fields(Memory)[:-1]), ())
    target = find_target("h100")
    given = [suggest([product], [], memory, target, "float32", seconds) for seconds in (0.0, 1e-4, 1.0)]
    gain = max(advice.seconds for advice in given[0])
    assert 0 < gain < 1e-3
    assert given[2] == []  # of a step of a second
    assert all((advice.seconds or advice.at_most) >= 1e-6 for advice in given[1])


def test_bad_input():
    model, batch = tiny_gpt()
    x, y = batch
    with pytest.raises(ValueError, match="batch must be \\(x, y\\).* got the shapes \\(4, 32\\)"):
        keras_mp.inspect(model, x, "host")
    with pytest.raises(
        ValueError, match="shape \\(4, 31\\) for input 'tokens' of model 'gpt', which takes \\(None, 32\\)"
    ):
        keras_mp.inspect(model, (tensor((4, 31), "int32"), y), "host")
    with pytest.raises(ValueError, match="2 inputs, and it takes 1"):
        keras_mp.inspect(model, ([x, x], y), "host")
    with pytest.raises(ValueError, match="fixed sizes"):
        keras_mp.inspect(model, (tensor((None, 32), "int32"), y), "host")
    with pytest.raises(ValueError, match="holds 'tokens' of type str"):
        keras_mp.inspect(model, ("tokens", y), "host")
    with pytest.raises(ValueError, match="target='tpu' is not known"):
        keras_mp.inspect(model, batch, "tpu")
    with pytest.raises(ValueError, match="compare='bfloat16' must be one of"):
        keras_mp.inspect(model, batch, "host", compare=["bfloat16"])
    with pytest.raises(TypeError, match="model must be a keras.Model, or a function"):
        keras_mp.inspect(3, batch, "host")
    fresh = keras.Sequential([keras.layers.Dense(2)])
    with pytest.raises(ValueError, match="is not built"):
        keras_mp.inspect(fresh, (x, y), "host")
    fresh.build((None, 3))
    with pytest.raises(ValueError, match="is not compiled"):
        keras_mp.inspect(fresh, (tensor((2, 3)), tensor((2, 2))), "host")
