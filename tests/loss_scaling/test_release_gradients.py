"""Each weight updated as soon as its own gradient is there: the same weights, and what an infinite gradient leaves."""

import keras
import numpy as np
import pytest
from arrays import values
from keras import ops
from test_small_states import OPTIMIZERS, weights_of
from thirds import thirds

import keras_mp

TENSORFLOW = keras.backend.backend() == "tensorflow"
SHAPES = ((64, 80), (80,), (3,), (1, 70), (70, 64), ())
AS_STORED = {"float32": ({}, "float32"), "float8": ({"state_dtype": "float8"}, "bfloat16")}


def releasing(inner, release=True, **settings):
    settings["release_gradients"] = release
    return keras_mp.LossScaleOptimizer(inner, keras_mp.LossScale.none(), **settings)


def apply(optimizer, weights, gradients):
    optimizer.apply([g if g is None else ops.convert_to_tensor(np.asarray(g, "float32")) for g in gradients], weights)


def with_the_same_bits(make, steps, dtype="float32", **settings):
    """Weights and optimizer after steps, which are the same without the release."""
    after = []
    for release in (False, True):
        weights, optimizer = weights_of(*SHAPES, dtype=dtype), releasing(make(), release, **settings)
        optimizer.build(weights)
        for step in steps:
            apply(optimizer, weights, step)
        after.append(values([*weights, *optimizer.variables]))
    np.testing.assert_equal(*after)
    return weights, optimizer


QUICK = [("AdamW", "float8"), ("Muon", "float8"), ("SGD", "float32"), ("centered", "float32")]
OTHERS = [(name, stored) for name in OPTIMIZERS for stored in AS_STORED if (name, stored) not in QUICK]


@pytest.mark.parametrize("name, stored", [*QUICK, *thirds(OTHERS)])
def test_the_same_weights_and_slots_bit_for_bit_and_none_where_a_gradient_is_infinite(name, stored):
    settings, dtype = AS_STORED[stored]
    generator = np.random.default_rng()
    steps = [[generator.normal(size=shape) for shape in SHAPES] for _ in range(4)]
    steps[2][5] = None
    weights, optimizer = with_the_same_bits(OPTIMIZERS[name], steps, dtype, **settings)
    bad = [generator.normal(size=shape) for shape in SHAPES]
    bad[0][3, 4], bad[2][1] = np.inf, np.nan
    slots_before = values(optimizer.variables)
    weights_before = values(weights)
    apply(optimizer, weights, bad)
    moved = [not np.array_equal(old, new) for old, new in zip(weights_before, values(weights), strict=True)]
    assert not moved[0]
    assert not moved[2]
    assert moved[4]
    for variable, before, value in zip(optimizer.variables, slots_before, values(optimizer.variables), strict=True):
        assert np.isfinite(value).all(), variable.path
        if "w0" in variable.path or "w2" in variable.path:
            np.testing.assert_array_equal(value, before, err_msg=variable.path)
    assert int(optimizer.skipped_steps) == int(optimizer.consecutive_skips) == 1
    assert int(optimizer.iterations) == 5
    apply(optimizer, weights, steps[0])
    assert (int(optimizer.skipped_steps), int(optimizer.consecutive_skips)) == (1, 0)


@pytest.mark.parametrize("settings", [{"clipvalue": 0.5, "use_ema": True}, {"clipnorm": 1.0}])
def test_other_settings_of_the_optimizer_are_as_without(settings):
    generator = np.random.default_rng()
    steps = [[generator.normal(size=shape) for shape in SHAPES] for _ in range(3)]
    weights, optimizer = with_the_same_bits(lambda: keras.optimizers.Adam(1e-2, **settings), steps)
    # Clipping would make an infinity finite: it is looked for before.
    before = values(weights)
    apply(optimizer, weights, [np.full(shape, np.inf) for shape in SHAPES])
    np.testing.assert_equal(values(weights), before)


def test_training_is_that_without_and_a_step_that_overflows_keeps_the_statistics():
    generator = np.random.default_rng()
    x, y = generator.normal(size=(10, 8, 5)).astype("float32"), generator.integers(0, 3, (10, 8))
    trained = []
    for release in (False, True):
        keras.utils.set_random_seed(1)
        model = keras.Sequential(
            [keras.layers.Input((5,)), keras.layers.Dense(16, "tanh"), keras.layers.BatchNormalization(),
             keras.layers.Dense(3)]
        )  # fmt: skip
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        optimizer = releasing(keras.optimizers.AdamW(1e-2, weight_decay=0.1), release)
        model.compile(optimizer, loss, jit_compile=not TENSORFLOW)
        keras_mp.loss_scaling.atomic_skip(model)
        for inputs, labels in zip(x, y, strict=True):
            model.train_on_batch(inputs, labels)
        trained.append(values(model.weights))
    for expected, actual in zip(*trained, strict=True):
        # Two programs of the same step, which compilers round otherwise.
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)
    model.train_on_batch(np.full((8, 5), np.nan, "float32"), y[0])
    for weight, before, after in zip(model.weights, trained[1], values(model.weights), strict=True):
        np.testing.assert_array_equal(after, before, err_msg=weight.path)
    assert int(model.optimizer.skipped_steps) == 1


@pytest.mark.skipif(not TENSORFLOW, reason="only TensorFlow has sparse gradients")
@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_rows_of_a_sparse_gradient(name):
    import tensorflow as tf

    after = []
    for release in (False, True):
        weight = weights_of((6, 4))
        optimizer = releasing(OPTIMIZERS[name](), release)
        for rows in ([[1.0] * 4, [2.0] * 4, [-3.0] * 4],) * 2:
            optimizer.apply([tf.IndexedSlices(tf.constant(rows), tf.constant([1, 4, 1]), tf.constant([6, 4]))], weight)
        after.append(values(weight)[0])
    np.testing.assert_array_equal(*after)
    rows = tf.constant([[np.inf] * 4, [2.0] * 4])
    optimizer.apply([tf.IndexedSlices(rows, tf.constant([1, 4]), tf.constant([6, 4]))], weight)
    np.testing.assert_array_equal(values(weight)[0], after[1])


class Own(keras.optimizers.SGD):
    def update_step(self, gradient, variable, learning_rate):
        variable.assign(variable - gradient * learning_rate)


@pytest.mark.parametrize(
    ("inner", "says"),
    [
        (lambda: keras.optimizers.Adam(gradient_accumulation_steps=2), "gradient_accumulation_steps=2"),
        (lambda: keras.optimizers.Adam(global_clipnorm=1.0), "global_clipnorm=1.*clip each gradient by clipnorm"),
        (lambda: Own(0.1), "its own update_step, which may write anything"),
    ],
)
def test_refuses_what_needs_all_gradients_with_the_reason(inner, says):
    with pytest.raises(ValueError, match=says):
        releasing(inner())


def test_wrong_use_has_errors_that_say_what_is_right():
    with pytest.raises(ValueError, match="release_gradients='yes' must be True or False"):
        releasing(keras.optimizers.Adam(), release="yes")
    with pytest.raises(ValueError, match=r"needs loss_scale=LossScale.none\(\)"):
        keras_mp.LossScaleOptimizer(keras.optimizers.Adam(), release_gradients=True)
    model = keras.Sequential([keras.layers.Input((4,)), *(keras.layers.Dense(2, dtype="mixed_float16") for _ in "ab")])
    with pytest.raises(ValueError, match="computes in float16"):
        keras_mp.prepare(model, "adam", "mse", release_gradients=True)
    wrapped = keras_mp.LossScaleOptimizer(keras.optimizers.Adam(), keras_mp.LossScale.none())
    with pytest.raises(ValueError, match="with release_gradients=False: give it to the optimizer"):
        keras_mp.prepare(keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(2)]), wrapped, "mse",
                         release_gradients=True)  # fmt: skip


def test_prepare_says_so_and_the_setting_is_saved(tmp_path, capsys):
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(2)])
    keras_mp.prepare(model, keras.optimizers.Adam(), "mse", release_gradients=True, verbose=True)
    assert "gradients released" in capsys.readouterr().out
    model.fit(np.ones((4, 4)), np.ones((4, 2)), verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert loaded.optimizer.release_gradients
