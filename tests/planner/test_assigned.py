"""The memory that compilers assign, against what they say of a finished program, and without waiting for the code."""

import re

import keras
import pytest

import keras_mp
from keras_mp.backend.common.device import TracedChip
from keras_mp.lowering import lower_step
from keras_mp.planner.chips.targets import find_target
from keras_mp.planner.compile import compiler as compile
from keras_mp.planner.compile.compiler import compile_step
from keras_mp.planner.inspect import report_on
from keras_mp.planner.read.compiler_memory import assigned_memory

UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "": 1}
ASSIGNMENT = """\
BufferAssignment:
allocation 0: size 512, thread-local:
 value: <2 op.1 @0> (size=512,offset=0): f32[]{:T(128)}
allocation 1: size 4096, parameter 1, shape |f32[1024]| at ShapeIndex {}, maybe-live-out:
 value: <3 param.1 @0> (size=4096,offset=0): f32[1024]{0:T(1024)}
allocation 2: size 8192, parameter 0, shape |f32[2048]| at ShapeIndex {}:
 value: <4 param.0 @0> (size=8192,offset=0): f32[2048]{0:T(1024)}
allocation 3: size 256, output shape is |(f32[1024])|, maybe-live-out:
allocation 4: size 1024, constant:
allocation 5: size 70000, preallocated-temp:
allocation 6: size 117440512, color 1, preallocated-temp:
"""


@pytest.mark.parametrize(
    "platform, rest", [("tpu", {"temp": 71024}), ("cuda", {"temp": 70000, "peak_memory": 8192 + 4096 + 256 + 71024})]
)
def test_arrays_of_the_chips_main_memory_are_counted(tmp_path, platform, rest):
    (tmp_path / "module_0001.step.after_optimizations-buffer-assignment.txt").write_text(ASSIGNMENT)
    expected = {"argument": 4096 + 8192, "output": 4096 + 256, "alias": 4096}
    assert assigned_memory(tmp_path, platform) == expected | rest


@pytest.mark.slow
def test_for_gpus_memory_is_that_of_the_finished_program(monkeypatch, tmp_path):
    chip, policy = "h100", "mixed_bfloat16"
    monkeypatch.setenv("KERAS_MP_CACHE", str(tmp_path / "cache"))
    keras_mp.set_global_policy(policy)
    step, target = lowered("cuda"), find_target(chip)
    # In this order: a step that was compiled to the end is not compiled again for its memory.
    early, whole = (report_on(compile_step(step, target, until=until), policy) for until in ("memory", "code"))
    assert (early.memory, early.matmuls, early.time) == (whole.memory, whole.matmuls, whole.time)
    assert (early.roofline, early.cast_kernels) == (whole.roofline, whole.cast_kernels)
    assert early.log != whole.log

    # Where the worker finds no files it takes the compiler's own statistics.
    blind = (
        "import keras_mp.planner.read.compiler_memory as memory\nmemory.is_assigned = lambda folder, platform: False\n"
    )
    (tmp_path / "sitecustomize.py").write_text(blind)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("KERAS_MP_CACHE", str(tmp_path / "statistics"))
    memory, said = early.memory, report_on(compile_step(step, target), policy).memory
    names = ("arguments", "outputs", "aliased", "temporary", "largest")
    assert [getattr(memory, name) for name in names] == [getattr(said, name) for name in names]
    # Its peak leaves out gaps between arrays.
    assert 0 <= memory.peak - said.peak < 2**-12 * said.peak


def lowered(platform="tpu"):
    """A step between whose arrays libtpu leaves gaps."""
    x = y = keras.Input((512, 128))
    y = keras.layers.MultiHeadAttention(2, 64)(y, y, use_causal_mask=True) + y
    y = keras.layers.Dense(128)(keras.layers.Dense(384, "gelu")(y)) + y
    model = keras.Model(x, keras.layers.Dense(1000)(y))
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    batch = keras.KerasTensor((32, 512, 128)), keras.KerasTensor((32, 512), "int32")
    return lower_step(model, batch, training=True, chip=TracedChip(platform))


def sizes_in(log):
    """What libtpu says of its program: name -> bytes, rounded to a hundredth of the unit."""
    total = log[log.index("Total hbm usage >=") : log.index("Total host usage")]
    program = log[log.index("Program hbm requirement") : log.index("Program vmem requirement")]
    sizes = re.findall(r"^ +(program|arguments|overlays|HLO temp) +([\d.]+)([KMG]?)", total + program, re.MULTILINE)
    return {name: float(size) * UNITS[unit] for name, size, unit in sizes}


@pytest.mark.slow
def test_memory_is_what_libtpu_says_of_its_program(monkeypatch, tmp_path):
    monkeypatch.setenv("KERAS_MP_CACHE", str(tmp_path))
    talks = {
        "LIBTPU_INIT_ARGS": "--vmodule=deepsea_compiler_backend=1 --stderrthreshold=0",
        "TF_CPP_MIN_LOG_LEVEL": "0",
    }
    silent = compile._environment
    monkeypatch.setattr(compile, "_environment", lambda: silent() | talks)
    keras_mp.set_global_policy("mixed_bfloat16")
    step, chip = lowered(), find_target("v5e")
    # In this order: a step that was compiled to the end is not compiled again for its memory.
    until_memory, until_code = (
        report_on(compile_step(step, chip, until=until), "mixed_bfloat16") for until in ("memory", "code")
    )
    memory = until_code.memory
    with open(until_code.log) as log:
        said = sizes_in(log.read())
    assert memory.temporary == pytest.approx(said["HLO temp"], rel=0.01)
    assert memory.code == pytest.approx(said["overlays"], rel=0.05)
    assert memory.peak == pytest.approx(said["program"] + said["arguments"], rel=0.01)
    assert memory.peak > memory.code > 0

    early = until_memory.memory
    assert (early.arguments, early.outputs, early.aliased) == (memory.arguments, memory.outputs, memory.aliased)
    assert (early.temporary, early.code, early.peak) == (memory.temporary, 0, memory.peak - memory.code)
    assert until_memory.roofline.memory == pytest.approx(until_code.roofline.memory)
    assert until_memory.time.seconds == pytest.approx(until_code.time.seconds)
    assert [product.compiled for product in until_memory.matmuls] == [
        product.compiled for product in until_code.matmuls
    ]
    assert until_code.roofline.cycles > 0 == until_memory.roofline.cycles
