import dataclasses
import functools
import json
import re
from pathlib import Path

import keras
import pytest
from steps import tensor

from keras_mp.backend.common.device import TracedChip
from keras_mp.lowering import lower_step
from keras_mp.planner.chips.targets import Target, find_target
from keras_mp.planner.compile import compiler as compiling
from keras_mp.planner.compile.compiler import CompileError, compile_step
from keras_mp.system.packages import install_command


@functools.cache
def step():
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4, name="dense")], name="small")
    model.compile("sgd", "mse")
    return lower_step(model, (tensor((2, 8)), tensor((2, 4))), training=True, chip=TracedChip("cpu"))


def test_the_same_step_is_compiled_once_and_kept_as_json_and_text(monkeypatch):
    lowered = step()
    first = compile_step(lowered, find_target("host"))
    kept = Path(first.log).parent
    assert first.seconds > 0 and json.loads((kept / "memory.json").read_text())["argument"] > 0
    assert "ENTRY" in (kept / "compiled.hlo").read_text()
    monkeypatch.setattr(compiling.subprocess, "run", None)
    again = compile_step(lowered, find_target("host"))
    assert again == dataclasses.replace(first, kept=True)


def test_another_meaning_of_what_is_kept_needs_no_compiler(monkeypatch):
    lowered = step()
    first = compile_step(lowered, find_target("host"))
    monkeypatch.setattr(compiling, "_ASKED", "asked-of-another-version.json")
    again = compile_step(lowered, find_target("host"))
    assert again == dataclasses.replace(first, kept=True)
    assert (Path(again.log).parent / "asked-of-another-version.json").is_file()


def test_another_flag_is_another_step():
    first = compile_step(step(), find_target("host"))
    other = compile_step(step(), find_target("host"), {"xla_cpu_enable_fast_math": True})
    assert other.log != first.log


def test_a_compiler_that_fails_leaves_its_log_and_nothing_else(monkeypatch, tmp_path):
    monkeypatch.setenv("KERAS_MP_CACHE", str(tmp_path))
    broken = Target("h100", "cuda", find_target("h100").chip, configuration="nonsense {")
    with pytest.raises(CompileError, match="The compiler for H100 SXM5 failed: .*failed-h100.log"):
        compile_step(step(), broken)
    assert [path.name for path in (tmp_path / "compiled").iterdir()] == ["failed-h100.log"]


def test_an_unknown_flag_is_the_compilers_error(monkeypatch, tmp_path):
    monkeypatch.setenv("KERAS_MP_CACHE", str(tmp_path))
    with pytest.raises(CompileError, match="xla_no_such_flag"):
        compile_step(step(), find_target("host"), {"xla_no_such_flag": 1})


def test_a_killed_compiler_is_said_to_be_out_of_memory(monkeypatch, tmp_path):
    monkeypatch.setenv("KERAS_MP_CACHE", str(tmp_path))
    ended = compiling.subprocess.CompletedProcess([], -9)
    monkeypatch.setattr(compiling.subprocess, "run", lambda *args, **kwargs: ended)
    with pytest.raises(CompileError, match="ended by signal 9; 9 most often means out of memory"):
        compile_step(step(), find_target("host"))


def test_no_ptxas_is_said_with_the_command(monkeypatch, tmp_path):
    monkeypatch.setenv("KERAS_MP_CACHE", str(tmp_path))

    def run(*args, stdout, **kwargs):
        stdout.write(b"UNIMPLEMENTED: No PTX compilation provider is available.")
        return compiling.subprocess.CompletedProcess([], 1)

    monkeypatch.setattr(compiling.subprocess, "run", run)
    with pytest.raises(CompileError, match="found no ptxas.*" + re.escape(install_command("inspect"))):
        compile_step(step(), find_target("h100"))


@pytest.mark.slow
def test_nothing_is_written_to_the_users_screen(capfd):
    compile_step(step(), find_target("v5e"))
    assert capfd.readouterr() == ("", "")


def attention():
    """A step in which XLA fuses a product of width 32 that no default tile of Triton fits."""
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy("mixed_bfloat16")
    inputs = keras.Input((128, 1))
    x = keras.layers.LayerNormalization()(keras.layers.Conv1D(32, 9, strides=4, activation="relu")(inputs))
    x = keras.layers.Add()([x, keras.layers.MultiHeadAttention(4, 8)(x, x)])
    x = keras.layers.Dense(4)(keras.layers.GlobalAveragePooling1D()(x))
    model = keras.Model(inputs, x)
    model.compile("adam", "mse")
    return lower_step(model, (tensor((64, 128, 1)), tensor((64, 4))), training=True, chip=TracedChip("gpu"))


@pytest.mark.slow
def test_a_product_that_triton_has_no_tile_for_is_compiled_without_it():
    lowered, h100 = attention(), find_target("h100")
    compiled = compile_step(lowered, h100)
    try:
        compile_step(lowered, h100, {"xla_gpu_enable_triton_gemm": True})
        fits = True  # on another version of XLA
    except CompileError as error:
        assert re.search("tile sizes|Too small divisible part", str(error))  # of jax 0.10, of jax 0.7
        fits = False
    assert (compiled.flags.get("xla_gpu_enable_triton_gemm") is False) != fits and compiled.module.entry
    assert compile_step(lowered, h100).flags == compiled.flags  # what is kept says so too
