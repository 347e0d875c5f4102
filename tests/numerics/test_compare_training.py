import json
import statistics

import keras
import pytest
from faults import normal
from keras import layers

from keras_mp.numerics import compare_training
from keras_mp.numerics.parity import ParityReport

X = normal(256, 8)
Y = (X[:, :1] * X[:, 1:2] + 0.1 * normal(256, 1)).astype("float32")
DATA = [(X[i : i + 32], Y[i : i + 32]) for i in range(0, 256, 32)]


def build(width=16):
    model = keras.Sequential(
        [
            keras.Input((8,)),
            layers.Dense(width, activation="tanh", name="first"),
            layers.Dense(1, dtype="float32", name="head"),
        ]
    )
    model.compile(keras.optimizers.Adam(1e-2), loss="mse")
    return model


def test_a_precision_that_differs_little_is_within_noise():
    report = compare_training(build, DATA, ("float32", "mixed_bfloat16"), seeds=2, steps=6)
    assert report.steps == 6 and report.seeds == 2 and len(report.curves["float32"][0]) == 6
    assert report.final["float32"] == [curve[-1] for curve in report.curves["float32"]]
    first = [curve[0] for curve in report.curves["float32"]]
    low = [curve[0] for curve in report.curves["mixed_bfloat16"]]
    assert low == pytest.approx(first, rel=0.05) and low != first  # the same weights and data
    assert len(set(first)) == 2
    pairs = zip(report.final["mixed_bfloat16"], report.final["float32"], strict=True)
    expected = statistics.mean(one - other for one, other in pairs)
    assert report.difference("mixed_bfloat16") == pytest.approx(expected)
    assert report.within_noise("mixed_bfloat16") == (abs(expected) <= report.spread)


@pytest.mark.slow
def test_float32_twice_is_the_same_training_and_one_that_breaks_is_told():
    def broken():
        model = build()
        model.optimizer.learning_rate = 1e38
        return model

    others = {"again": "float32", "broken": broken}
    report = compare_training(build, DATA, others, seeds=2, steps=6)
    assert report.curves["again"] == report.curves["float32"] and report.difference("again") == 0
    assert report.within_noise("again") and "within seed noise" in str(report)
    assert report.within_noise("broken") is False
    assert "diverges" in report.verdict("broken") or "worse than seed noise" in report.verdict("broken")
    json.loads(report.to_json())


def test_the_verdict_in_numbers(tmp_path):
    curves = {"float32": [[3.0, 1.0], [3.0, 1.2]], "low": [[3.0, 1.1], [3.0, 1.3]], "bad": [[3.0, 2.0], [3.0, 2.0]]}
    final = {name: [seed[-1] for seed in seeds] for name, seeds in curves.items()}
    report = ParityReport(2, 2, curves, final)
    assert report.spread == pytest.approx(0.2)
    assert report.verdict("low") == (
        "low ends 0.1 above float32 in the loss, the mean of 2 seeds. The float32 seeds are 0.2 apart, so this is "
        "within seed noise."
    )
    assert "worse than seed noise" in report.verdict("bad")
    page = report.to_html(tmp_path / "a.html").read_text()
    assert "worse than seed noise" in page
    one = ParityReport(1, 1, {"float32": [[1.0]], "low": [[1.0]]}, {"float32": [1.0], "low": [1.0]})
    assert one.within_noise("low") is None and "no spread" in one.verdict("low")
