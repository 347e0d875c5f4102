import math

import keras
import numpy as np
import pytest
from faults import (
    backward_only,
    compiled,
    healthy,
    large_activations,
    large_logits,
    measure,
    nan_weight,
    normal,
    small_gradients,
)
from keras import layers, ops

import keras_mp
from keras_mp import audit
from keras_mp.conversion.to_float32 import in_float32
from keras_mp.precision.formats import FORMATS
from keras_mp.precision.policy import set_global_policy


def by_path(report):
    return {each.path: each for each in report.layers}


def test_every_tensor_of_a_layer_is_measured_exactly():
    """Two Dense layers, the backward pass by hand in float64."""
    x, y = normal(16, 8), normal(16, 1)
    model = keras.Sequential([keras.Input((8,)), layers.Dense(4, name="first"), layers.Dense(1, name="last")])
    model = compiled(model)
    report = audit(model, (x, y), sample=None)
    w1, b1, w2, b2 = (np.asarray(weight, "float64") for weight in model.get_weights())
    h = x @ w1 + b1
    prediction = h @ w2 + b2
    d_prediction = 2 * (prediction - y) / 16
    d_h = d_prediction @ w2.T
    expected = {
        "input": x,
        "output": h,
        "output gradient": d_h,
        "kernel": np.concatenate([w1.ravel(), b1]),
        "kernel gradient": np.concatenate([(x.T @ d_h).ravel(), d_h.sum(0)]),
    }
    first = by_path(report)["first"]
    for role, values in expected.items():
        seen = first.ranges[role]
        assert seen.lowest == pytest.approx(values.min(), rel=1e-4, abs=1e-6), role
        assert seen.highest == pytest.approx(values.max(), rel=1e-4, abs=1e-6), role
        assert seen.values == values.size
        assert seen.loss("bfloat16").sqnr == pytest.approx(measure(values, "bfloat16").sqnr, abs=1.5), role
    assert report.loss == pytest.approx(((prediction - y) ** 2).mean(), rel=1e-5)


@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="retracing is TensorFlow's")
def test_tensorflow_does_not_warn_of_batches_of_many_sizes(monkeypatch):
    from tensorflow.python.platform import tf_logging

    warned = []
    monkeypatch.setattr(tf_logging, "warning", lambda message, *arguments: warned.append(message))
    model = compiled(
        keras.Sequential([keras.Input((8,)), layers.Dense(4, "relu"), layers.Dropout(0.5), layers.Dense(1)])
    )
    audit(model, [(normal(size, 8), normal(size, 1)) for size in range(1, 7)])  # from five on it warned of retracing
    assert warned == []


def test_activations_past_float16_are_the_first_suspect():
    suspect = audit(*large_activations()).suspects()[0]
    assert (suspect.path, suspect.safe) == ("large", False)
    assert "7e+04" in suspect.reason and "65504" in suspect.reason and "float32" in suspect.remedy


def test_huge_logits_are_the_first_suspect():
    suspect = audit(*large_logits()).suspects()[0]
    assert (suspect.path, suspect.tensor) == ("softmax", "input")


def test_small_gradients_are_the_first_suspect_and_the_scale_brings_them_in():
    report = audit(*small_gradients())
    first = report.suspects()[0]
    assert first.path == "small" and first.safe and "scale the loss" in first.remedy
    small = by_path(report)["small"]
    gradient = small.ranges["output gradient"]
    assert measure(np.full(3, gradient.largest), "float16").zeroed == 1
    assert measure(np.full(3, gradient.largest), "float16", report.loss_scale).zeroed == 0
    assert len(report.suspects()) == 1
    assert "loss scale: small needs one: without a loss scale" in " ".join(str(report).split())


def test_layers_that_need_the_loss_scale_are_said_in_one_sentence():
    model = keras.Sequential([keras.Input((8,)), *(layers.Dense(8, name=f"dense{i}") for i in range(3))])
    model.compile("sgd", lambda y, prediction: 1e-8 * ops.mean(ops.square(y - prediction), axis=-1))
    report = audit(model, (normal(16, 8), normal(16, 8)))
    saved = [suspect for suspect in report.suspects() if suspect.safe]
    said = " ".join(str(report).split())
    assert len(saved) > 1 and said.count("scale the loss, by") == 1
    assert f"loss scale: {len(saved)} layers need one, {saved[0].path} the most" in said


def test_a_later_batch_with_larger_gradients_lowers_the_scale_and_overflows_nothing():
    model = keras.Sequential([keras.Input((8,)), layers.Dense(4, name="first"), layers.Dense(1, name="last")])
    model.compile("sgd", "mse")
    x, y = normal(16, 8), normal(16, 1)
    weak, strong = np.full(16, 1.0, "float32"), np.full(16, 2.0**12, "float32")
    report = audit(model, [(x, y, weak), (x, y, strong)])
    alone = audit(model, [(x, y, strong)])
    assert report.loss_scale == alone.loss_scale < audit(model, [(x, y, weak)]).loss_scale
    for before, after in zip(alone.layers, report.layers, strict=True):
        assert after.verdicts["mixed_float16"].ok
        for role in ("output gradient", "kernel gradient"):
            if role in after.ranges:
                assert after.ranges[role].loss("float16").overflow == 0
                assert after.ranges[role].loss("float16").sqnr == pytest.approx(
                    before.ranges[role].loss("float16").sqnr, abs=1.0
                )


def test_a_healthy_model_has_no_suspects_and_a_scale_that_fits_every_gradient():
    report = audit(*healthy())
    assert report.suspects() == [] and all(layer.verdicts["mixed_float16"].ok for layer in report.layers)
    largest = max(layer.ranges[r].largest for layer in report.layers for r in layer.ranges if "gradient" in r)
    assert largest * report.loss_scale * 16 <= 65504 or report.loss_scale == 1
    assert math.log2(report.loss_scale).is_integer()
    assert largest * report.loss_scale * 32 > 65504 or report.loss_scale == 2.0**24


def test_a_mixed_model_is_audited_in_float32_and_left_alone():
    model, batch = healthy("mixed_float16")
    trained = model.get_weights()
    report = audit(model, batch)
    assert any("its own precision is restored" in note for note in report.notes)
    assert model.get_layer("first").compute_dtype == "float16"
    np.testing.assert_equal(model.get_weights(), trained)
    assert report.loss == pytest.approx(float(np.mean((np.asarray(model(batch[0])) - batch[1]) ** 2)), rel=0.05)


def test_statistics_and_seeds_are_put_back():
    model = compiled(
        keras.Sequential(
            [keras.Input((4,)), layers.BatchNormalization(), layers.Dropout(0.5), layers.Dense(1), layers.Dense(1)]
        )
    )
    before = [np.asarray(v) for v in model.variables]
    audit(model, [(normal(8, 4), normal(8, 1))] * 3)
    for old, new in zip(before, model.variables, strict=True):
        np.testing.assert_array_equal(old, np.asarray(new))


def test_batches_of_several_sizes_and_a_dataset():
    model, _ = healthy()
    sizes = (16, 3, 16, 1)
    report = audit(model, [(normal(size, 8), normal(size, 1)) for size in sizes])
    assert report.steps == 4 and by_path(report)["first"].ranges["output"].values == sum(sizes) * 8

    class Data(keras.utils.PyDataset):
        def __len__(self):
            return 3

        def __getitem__(self, index):
            return normal(4, 8), normal(4, 1), np.ones(4, "float32")

    assert audit(model, Data(), steps=8).steps == 3


def test_a_sample_agrees_with_all_values():
    model = compiled(keras.Sequential([keras.Input((64,)), layers.Dense(512, name="wide"), layers.Dense(1)]))
    batch = (normal(256, 64), normal(256, 1))
    all_values, some = (by_path(audit(model, batch, sample=n))["wide"] for n in (None, 4096))
    for role, whole in all_values.ranges.items():
        assert some.ranges[role].lowest == pytest.approx(whole.lowest, rel=1e-5)
        assert some.ranges[role].highest == pytest.approx(whole.highest, rel=1e-5)
        for name in FORMATS:
            assert some.ranges[role].loss(name).sqnr == pytest.approx(whole.loss(name).sqnr, abs=1.5)


def test_shared_layers_softmax_outputs_and_nested_models():
    inner = keras.Sequential([keras.Input((8,)), layers.Dense(8, activation="relu", name="dense")], name="inner")
    inputs = keras.Input((8,))
    x = inner(inner(inputs))
    model = keras.Model(inputs, layers.Dense(3, activation="softmax", name="head")(x))
    model = compiled(model, loss="sparse_categorical_crossentropy")
    x, y = normal(16, 8), np.random.default_rng().integers(0, 3, 16)
    report = audit(model, (x, y))
    found = by_path(report)
    assert found["inner/dense"].calls == 2 and found["inner/dense"].ranges["output"].lowest == 0
    assert found["head"].ranges["kernel gradient"].largest > 0
    expected = -np.log(np.asarray(model(x))[np.arange(16), y]).mean()
    assert report.loss == pytest.approx(expected, rel=1e-4)


def test_values_that_are_not_finite_in_float32_are_told():
    model, batch = nan_weight()
    assert any("find_nonfinite" in note for note in audit(model, batch).notes)
    model, batch = backward_only()
    assert any("find_nonfinite" in note for note in audit(model, batch).notes)


def test_a_custom_train_step_is_not_run_and_without_a_loss_says_what_it_needs():
    class Own(keras.Model):
        def train_step(self, *arguments):
            raise AssertionError("is not run")

    inputs = keras.Input((8,))
    model = Own(inputs, layers.Dense(1)(inputs))
    with pytest.raises(ValueError, match="define compute_loss.*train_step is not run"):
        audit(model, (normal(4, 8), normal(4, 1)))

    class WithLoss(Own):
        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            return ops.mean(ops.square(y_pred - y))

    model = WithLoss(inputs, layers.Dense(1)(inputs))
    report = audit(model, (normal(4, 8), normal(4, 1)))
    assert any("train_step of its own" in note for note in report.notes) and len(report.layers) == 1
    assert keras_mp.audit is audit


@pytest.mark.parametrize("built_by", ["a call", "an Input in bfloat16"])
def test_inputs_are_not_rounded_to_16_bits_on_the_way_in(built_by):
    """A Sequential that a call built has an InputLayer of the dtype that it computed in then."""
    x = np.random.default_rng().normal(size=(4, 8)).astype("float32")
    dense = layers.Dense(3, dtype="mixed_bfloat16" if built_by == "a call" else "float32")
    inputs = [] if built_by == "a call" else [keras.Input((8,), dtype="bfloat16")]
    with set_global_policy("mixed_bfloat16" if built_by == "a call" else "float32"):
        model = keras.Sequential([*inputs, dense])
    model(x)
    kernel, bias = map(keras.ops.convert_to_numpy, dense.weights)
    with in_float32(model):
        np.testing.assert_allclose(keras.ops.convert_to_numpy(model(x)), x @ kernel + bias, rtol=1e-5, atol=1e-6)
    assert model.input_dtype == "bfloat16"


@pytest.mark.jax
def test_sparse_batches_are_taken_as_fit_takes_them():
    sparse = pytest.importorskip("scipy.sparse")
    x, y = np.where(normal(8, 6) > 0.5, normal(8, 6), 0).astype("float32"), normal(8, 1)
    inputs = keras.Input((6,), sparse=True)
    model = compiled(keras.Model(inputs, layers.Dense(1, name="only")(inputs)))
    batch = (sparse.csr_matrix(x), y)
    kernel, bias = model.get_weights()
    report = audit(model, batch)
    assert report.loss == pytest.approx(np.mean((x @ kernel + bias - y) ** 2), rel=1e-4)
    assert by_path(report)["only"].ranges["input"].highest == x.max()
    assert keras_mp.numerics.find_nonfinite(model, batch) is None
    x[3, 2] = np.nan
    assert keras_mp.numerics.find_nonfinite(model, (sparse.csr_matrix(x), y)).records == [3]
