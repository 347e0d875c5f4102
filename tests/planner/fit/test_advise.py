"""`advise` where nothing has to be compiled: bad input, what shapes decide, compilers that are not there; the lines."""

import importlib.util
import re

import command_line
import keras
import numpy as np
import pytest

import keras_mp
from keras_mp.lean.lean_model import lean_parts
from keras_mp.lowering import Source
from keras_mp.planner.fit import step as step_module
from keras_mp.planner.fit.measures import Measures, lines
from keras_mp.rebuild.optimizers import unwrapped
from keras_mp.rebuild.walk import Walk
from keras_mp.system.packages import install_command, installed

BATCH = (keras.KerasTensor((8, 6, 16)), keras.KerasTensor((8, 6, 4)))
on_jax = pytest.mark.skipif(keras.backend.backend() != "jax", reason="variables without values, and several devices")


def build(width=16):
    inputs = keras.Input((6, 16))
    x = keras.layers.Dense(width, "gelu", name="hidden")(inputs)
    x = x + keras.layers.MultiHeadAttention(2, 8)(x, x)
    model = keras.Model(inputs, keras.layers.Dense(4)(x), name="small")
    model.compile(keras.optimizers.Adam(), "mse")
    return model


@pytest.fixture
def nothing_compiles(monkeypatch, tmp_path):
    def refuse(*_, **__):
        raise AssertionError("nothing is to be compiled")

    monkeypatch.setattr(step_module, "compile_step", refuse)
    monkeypatch.setenv("KERAS_MP_CACHE", str(tmp_path))


def test_bad_input():
    for targets, said in (
        (["rtx4080ti"], "target='rtx4080ti' is not a known chip. Did you mean"),
        (["h1000"], "Did you mean 'h100'"),
        (["h100x3"], "8 rows, which the 3 devices of 'h100x3' do not divide: give a multiple of 3"),
        ([], "target names no chip"),
    ):
        with pytest.raises(ValueError) as error:
            keras_mp.advise(build, BATCH, targets)
        assert said in str(error.value)
    with pytest.raises(ValueError, match="not compiled with an optimizer and a loss"):
        keras_mp.advise(lambda: keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)]), BATCH, ["h100"])
    with pytest.raises(TypeError, match="must return a keras.Model, got int"):
        keras_mp.advise(lambda: 3, BATCH, ["h100"])
    with pytest.raises(TypeError, match="build must be a keras.Model, or a function"):
        keras_mp.advise("model.keras", BATCH, ["h100"])
    with pytest.raises(ValueError, match="batch must be"):
        keras_mp.advise(build, 3, ["h100"])


def test_without_compilers_there_are_rows_from_shapes(monkeypatch, nothing_compiles):
    there = importlib.util.find_spec
    missing = ("libtpu", "jax_cuda13_plugin")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in missing else there(name))
    report = keras_mp.advise(build, BATCH, ["h100", "v5e"])
    state = 3 * 4 * build().count_params()
    for row in report.rows:
        assert (row.verdict, row.measures, row.how) == ("not known", None, "shapes alone")
        assert install_command("inspect") in row.reason
        assert state <= row.memory.peak < state + 6000
    assert install_command("inspect") in str(report) and report.compiles == 0


def test_what_no_compiler_takes_says_so(nothing_compiles):
    row = keras_mp.advise(build, BATCH, ["v100"])["v100"]
    assert row.verdict == "not known" and "No compiler that can be installed takes" in row.reason


@pytest.mark.jax
@on_jax
def test_a_state_larger_than_the_memory_is_not_compiled(nothing_compiles):
    def large():
        layers = [keras.Input((65536,)), *(keras.layers.Dense(65536, use_bias=False) for _ in range(12))]
        model = keras.Sequential(layers)
        model.compile("adam", "mse")
        return model

    batch = (keras.KerasTensor((8, 65536)),) * 2
    report = keras_mp.advise(large, batch, ["t4", "v5e", "v5e-4", "rtx4090"])
    for row in report.rows:
        assert row.fits is False and row.compiles == 0 and row.code == ()
        share = 4 if row.target == "v5e-4" else 1
        in_bfloat16 = row.target != "t4"
        assert row.memory.parameters == (2 if in_bfloat16 else 4) * 12 * 65536**2 // share
        assert row.missing == row.memory.peak - row.memory.capacity > 0
        # Float16 needs its loss scaled, so that no gradient can be released. TensorFlow has no states on the host, and
        # libtpu takes 8-bit ones there from 0.0.52 on.
        takes = row.target == "rtx4090" or installed(["libtpu"]).get("libtpu", "") >= "0.0.52"
        on_host = in_bfloat16 and takes and keras.backend.backend() == "jax"
        both = "float8 states" + (", bfloat16 weights and states on the host" if on_host else " and bfloat16 weights")
        assert f"with {both if in_bfloat16 else 'float8 states'}." in row.reason
        states = 2 * 12 * 65536**2 // share  # an eighth of the 16 bytes, and scales
        assert row.memory.host == (states if on_host else 0)
        assert 0 < row.memory.optimizer + row.memory.host - states < 2**24
    # 192 GiB of weights and 96 GiB of states, in devices of 14.7 GiB.
    assert "of 20 such devices or more" in report["t4"].reason


@pytest.mark.skipif(keras.backend.backend() == "jax", reason="JAX lowers a step on several devices")
def test_several_devices_need_jax(nothing_compiles):
    row = keras_mp.advise(build, BATCH, ["h100x2"])["h100x2"]
    assert row.verdict == "not known" and "KERAS_BACKEND=jax" in row.reason


@pytest.mark.parametrize(
    "measures, given",
    [
        (Measures("mixed_bfloat16", ("lean", "float8 states"), micro_batches=2), "function"),
        pytest.param(Measures("mixed_float16", micro_batches=4), "model", marks=pytest.mark.slow),
    ],
    ids=["lean with float8 states", "scaled"],
)
def test_the_lines_apply_the_measures_and_train(measures, given):
    source = Source(build if given == "function" else build())
    program = lines(measures, source, 1, 8)
    scope = {"keras_mp": keras_mp, "keras": keras, "build": build, "model": build()}
    scope["x"], scope["y"] = (np.zeros(tensor.shape, "float32") for tensor in BATCH)
    exec("\n".join(program), scope)
    model, optimizer = scope["model"], scope["model"].optimizer
    assert model.get_layer("hidden").dtype_policy.name == measures.precision
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    assert (inner.gradient_accumulation_steps or 1) == measures.micro_batches
    assert int(inner._iterations) == measures.micro_batches
    assert getattr(optimizer, "state_dtype", "float32") == (
        "float8" if "float8 states" in measures.names else "float32"
    )
    assert any(row.done for row in lean_parts(Walk(model))) == ("lean" in measures.names)


def test_a_function_that_asks_for_auto_is_built_in_the_precision_that_is_asked_about():
    def build_in_auto():
        keras_mp.set_global_policy("auto")
        return build()

    for precision, dtype in (("mixed_float16", "float16"), ("bfloat16", "bfloat16"), ("float32", "float32")):
        assert Source(build_in_auto).build(precision).get_layer("hidden").compute_dtype == dtype
    report = keras_mp.inspect(build_in_auto, BATCH, compare=["float32", "mixed_bfloat16"])
    asked = {name: {matmul.asked[0] for matmul in other.matmuls} for name, other in report.compared.items()}
    assert asked["float32"] == {"float32"} and "bfloat16" in asked["mixed_bfloat16"]


@pytest.mark.slow
@pytest.mark.jax
@on_jax
def test_the_lines_of_several_devices():
    strategy = "fully_sharded"
    measures = Measures("mixed_bfloat16", micro_batches=2, strategy=strategy)
    program = lines(measures, Source(build), 4, 8)
    assert program[1] == f'with keras_mp.parallel.distribute("{strategy}", devices=4):'
    text = "\n".join(program).replace("devices=4", "devices=1")
    scope = {"keras_mp": keras_mp, "build": build}
    scope["x"], scope["y"] = (np.zeros(tensor.shape, "float32") for tensor in BATCH)
    exec(text, scope)
    assert int(unwrapped(scope["model"].optimizer)._iterations) == 2


def test_the_command(tmp_path):
    build().save(tmp_path / "mine.keras")
    done = command_line.run("advise", tmp_path / "mine.keras", "--target", "v100,h1000")
    assert done.returncode == 1 and "Did you mean 'h100'" in done.stderr and done.stderr.count("\n") == 1
    page = tmp_path / "advice.html"
    done = command_line.run("advise", tmp_path / "mine.keras", "--target", "v100", "--html", page)
    assert done.returncode == 0
    assert re.fullmatch(
        r"\d+ s  .*: tracing its step\n\d+ s  Tesla V100 .*: not compiled\. No compiler .*\n", done.stderr
    )
    assert "It is not known whether Tesla V100 SXM2 16GB holds it" in " ".join(done.stdout.split())
    assert " of 1 chips" not in done.stdout and "small" in page.read_text()
