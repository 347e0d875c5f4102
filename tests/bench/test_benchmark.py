"""`benchmark` measures a model in several precisions, and leaves it alone."""

import json
import math

import keras
import numpy as np
import pytest

import keras_mp
import keras_mp.bench.keras_step
from keras_mp import backend
from keras_mp.bench.benchmark_report import BenchmarkReport
from keras_mp.bench.keras_step import _why_not
from keras_mp.bench.timing import check_precisions
from keras_mp.bench.workloads import Measured
from keras_mp.precision import hardware
from keras_mp.precision.hardware import Device, Support

engine = backend.engine_of("keras_mp.bench")

X = np.random.default_rng(0).normal(size=(4, 8)).astype("float32")
Y = np.array([0, 1, 2, 0])


def small_model():
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16, activation="relu"), keras.layers.Dense(3)])
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


@pytest.mark.slow
def test_a_model_in_three_precisions_with_a_row_for_what_cannot_run(tmp_path, capsys):
    model = small_model()
    before = [weight.copy() for weight in model.get_weights()]
    report = keras_mp.bench.benchmark(model, (X, Y), ["mixed_bfloat16", "fp8"], rounds=3, seconds=0.005, verbose=True)
    assert [row.name for row in report.rows] == ["float32", "mixed_bfloat16", "fp8"]
    assert all(np.array_equal(*pair) for pair in zip(before, model.get_weights(), strict=True))
    low = report.row("mixed_bfloat16")
    assert (
        not report.row("float32").reason
        and not low.reason
        and len(low.seconds) == 3
        and low.first > report.step("mixed_bfloat16").median
    )
    assert low.details["backend"] == keras.backend.backend() and low.details["batch"] == 4
    assert report.ratio("float32").median == 1.0
    assert report.rate("float32") == pytest.approx(4 / report.step("float32").median)
    if not hardware.support("fp8").ok:
        assert report.row("fp8").problem == "cannot run"
        assert report.row("fp8").reason == hardware.support("fp8").reason
        assert report.step("fp8") is None and report.ratio("fp8") is None
        assert report.row("fp8").reason in " ".join(str(report).split())
    assert "samples/s" in str(report) and "mixed_bfloat16" in capsys.readouterr().err
    saved = json.loads(report.to_json(tmp_path / "report.json"))
    assert saved == json.loads((tmp_path / "report.json").read_text())
    assert saved["rows"][1]["of_base"] == report.ratio("mixed_bfloat16").median
    assert report.versions["keras"] == keras.__version__


def test_steps_are_those_of_fit():
    model = small_model()
    traced = []
    original = model.compute_loss
    model.compute_loss = lambda *args, **kwargs: traced.append(1) or original(*args, **kwargs)
    run = engine.timed_steps(model, (X, Y, np.ones(4, "float32")))
    first = run(1)
    compiled = len(traced)
    several = run(50)
    assert len(traced) == compiled  # nothing is traced anew
    assert 0 < several and several / 50 < first
    assert int(model.optimizer.iterations.numpy()) == 51 if keras.backend.backend() == "tensorflow" else True


@pytest.mark.slow
def test_a_file_that_leaves_the_length_open(tmp_path):
    tokens = [keras.Input((None,), dtype="int32"), keras.layers.Embedding(9, 4), keras.layers.Dense(9)]
    model = keras.Sequential(tokens)
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.save(tmp_path / "model.keras")
    batch = (np.ones((4, 7), "int32"), np.ones((4, 7), "int32"))
    report = keras_mp.bench.benchmark(tmp_path / "model.keras", batch, ["mixed_bfloat16"], rounds=1, seconds=0)
    assert "model.keras" in report.title
    assert [row.problem for row in report.rows] == ["", ""]
    assert (report.row("float32").details["batch"], report.row("float32").details["units"]) == (4, 28)


def test_a_model_that_is_not_compiled():
    with pytest.raises(ValueError, match="has no optimizer: compile it for training first"):
        keras_mp.bench.benchmark(keras.Sequential([keras.Input((8,)), keras.layers.Dense(3)]), (X, Y))


def test_classes_of_the_running_script_are_refused():
    class Mine(keras.layers.Dense):
        pass

    Mine.__module__ = "__main__"
    model = keras.Sequential([keras.Input((8,)), Mine(3)])
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match=r"classes of the script that runs \(Mine\)"):
        keras_mp.bench.benchmark(model, (X, X[:, :3]))


@pytest.mark.parametrize(
    ("precisions", "message"),
    [
        ([], "nothing to compare with float32"),
        (["float32"], "nothing to compare with float32"),
        (["bfloat16"], "compare='bfloat16' must be one of 'float32', 'mixed_float16', 'mixed_bfloat16', 'fp8'"),
    ],
)
def test_nothing_to_compare_and_unknown_precisions(precisions, message):
    with pytest.raises(ValueError, match=message):
        keras_mp.bench.benchmark(small_model(), (X, Y), precisions)


def test_float32_is_added_and_first():
    assert check_precisions("fp8") == ["float32", "fp8"]
    assert check_precisions(["fp8", "float32", "fp8"]) == ["float32", "fp8"]


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no file"):
        keras_mp.bench.benchmark(tmp_path / "none.keras", (X, Y))


def measured_report():
    rows = [
        Measured("float32", seconds=[0.2, 0.4, 0.3], first=5.0, peak=3 * 2**30,
                 details={"units": 60, "unit": "tokens", "batch": 2, "device": "X"}),
        Measured("fp8", seconds=[0.1, 0.1, 0.1], first=9.0, peak=None,
                 details={"units": 60, "unit": "tokens", "batch": 2, "device": "X"}),
        Measured("mixed_float16", "out of memory", "no room for <1> & more"),
    ]  # fmt: skip
    return BenchmarkReport("a step on X", "float32", rows)


def test_the_report_computes_and_prints_what_was_measured(tmp_path):
    report = measured_report()
    assert report.ratio("fp8").median == pytest.approx(1 / 3)
    assert report.rate("fp8") == pytest.approx(600)
    names, rows = report.table()
    assert names == [
        "",
        "step, ms",
        "time, of float32's",
        "tokens/s",
        "compile, s",
        "MiB",
        "batch",
    ]
    assert rows[1] == ["fp8", "100", "0.33 (0.29-0.42)", "600", "8.9", "", "2"]
    assert rows[2][:3] == ["mixed_float16", "out of memory", ""]
    assert "mixed_float16: out of memory. no room for <1> & more" in " ".join(str(report).split())
    assert max(map(len, str(report).splitlines())) <= 120
    with pytest.raises(KeyError, match="there is no row 'none'"):
        report.row("none")
    assert not math.isnan(report.to_dict()["rows"][0]["first"])
    assert json.loads(report.to_json())["rows"][2]["first"] is None


def test_the_report_begins_with_a_sentence_a_precision():
    why_not = {"why_not": "the products are too small to gain."}
    rows = [
        Measured("float32", seconds=[0.1, 0.1, 0.1]),
        Measured("mixed_bfloat16", seconds=[0.123, 0.124, 0.122], details=why_not),
        Measured("fp8", seconds=[0.07, 0.07, 0.07], details=why_not),
        Measured("mixed_float16", seconds=[0.05, 0.101, 0.2]),
    ]
    report = BenchmarkReport("a step", "float32", rows)
    assert report.verdict == [
        "mixed_bfloat16 takes 23% more time than float32 here: the products are too small to gain.",
        "fp8 takes 30% less time than float32 here.",
        "mixed_float16 takes as much time as float32 here, within the spread of the rounds.",
    ]
    assert " ".join(str(report).split()).startswith(f"a step {' '.join(report.verdict)}")


def test_products_that_are_too_small_are_named(monkeypatch):
    monkeypatch.setattr(keras_mp.bench.keras_step, "pays", lambda policy, device: Support(True, "It pays."))
    cpu = Device("cpu", "CPU")
    model = keras.Sequential([keras.Input((16,)), keras.layers.Dense(300), keras.layers.Dense(2)])
    assert _why_not(model, cpu, "mixed_bfloat16").startswith(
        "the products are too small to gain. The largest has 16 inputs and 300 outputs;"
    )
    assert _why_not(model, Device("gpu", "NVIDIA T4", "7.5"), "mixed_bfloat16") == ""
    model = keras.Sequential([keras.Input((256,)), keras.layers.Dense(256), keras.layers.Dense(2)])
    assert _why_not(model, cpu, "mixed_bfloat16") == ""
    monkeypatch.setattr(keras_mp.bench.keras_step, "pays", lambda policy, device: Support(False, "It is slower."))
    assert _why_not(model, cpu, "mixed_float16") == "It is slower."
