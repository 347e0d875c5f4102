"""Delayed scaling: the trajectory of its scales equals a reference in NumPy, whatever happens on the way."""

import keras
import numpy as np
import pytest
from reference import cast, quantized_by, sqnr, tensors, to_numpy, with_gradients
from trajectory import (
    BAD,
    RECIPES,
    ROWS,
    WIDTH,
    assert_same_state,
    build,
    dot_loss,
    only,
    references_of,
    run,
    saved_history,
    steps,
)
from twins import twin

import keras_mp
from keras_mp import convert, revert
from keras_mp.fp8 import Scalings, matmul
from keras_mp.fp8.layers import CALL_SITES, AmaxHistory
from keras_mp.fp8.quantize import next_step
from keras_mp.layers import Float8Dense


@pytest.mark.jax
def test_trajectory():
    jit = keras.backend.backend() == "jax"  # on TensorFlow each product is compiled anyway, and the next step is jitted
    run(build(RECIPES, jit_compile=jit), references_of(RECIPES), steps(24))


def test_trajectory_of_an_optimizer_that_skips_nothing():
    recipes = only("margin")
    model = build(recipes, checks=False, run_eagerly=True)
    plan = steps(12, bad=BAD[:2])  # what is skipped elsewhere may be NaN
    run(model, references_of(recipes), plan, checks=False)


def test_micro_batches_and_a_reload_in_the_middle(tmp_path):
    """The history moves once an update. The file is of a moment when some of an update's micro-batches are in."""
    recipes = only("int8_delayed")  # its amaxes move on, and its steps are counted
    model, references, plan = build(recipes, 3, jit_compile=True), references_of(recipes, 3), steps(30)
    run(model, references, plan[:16])
    model.save(tmp_path / "model.keras")
    model = keras.models.load_model(tmp_path / "model.keras")
    assert_same_state(model, references)
    run(model, references, plan[16:])


def test_a_float16_overflow_leaves_the_history():
    """A real one, of the loss scale: the step is skipped on the way down to a scale that fits."""
    keras.config.set_dtype_policy("mixed_float16")
    layer = Float8Dense(WIDTH, use_bias=False, scaling="delayed", name="shared")
    model = keras.Sequential([keras.Input((WIDTH,)), layer])
    model.compile(keras_mp.LossScaleOptimizer(keras.optimizers.SGD(1.0), initial_scale=2.0**24), dot_loss)
    x, c = (1e3 * np.random.default_rng().normal(size=(ROWS, WIDTH)).astype("float32") for _ in range(2))
    before, skipped = to_numpy(layer.kernel), 0
    while int(model.optimizer.iterations) == 0:
        np.testing.assert_array_equal(saved_history(layer)["0"], 0)
        np.testing.assert_array_equal(to_numpy(layer.kernel), before)
        model.train_on_batch(x, c)
        skipped += 1
    assert skipped > 5 and int(model.optimizer.skipped_steps) == skipped - 1
    assert np.all(saved_history(layer)["0"][:, 0] > 0) and np.any(to_numpy(layer.kernel) != before)


def test_more_calls_than_slots_scale_too_little_and_never_grow():
    """A third call in one slot adds its amax; the older entries stay what they were."""
    history = AmaxHistory(3)
    history.build()

    def read(slots, following):
        with keras.StatelessScope(state_mapping=[(history.slots, slots)]):
            return sum(history.call() * following[call] for call in range(2 * CALL_SITES + 1))

    following = np.random.default_rng().uniform(1, 2, (2 * CALL_SITES + 1, 3, 3)).astype("float32")
    following[:, :, 1:] = following[0, :, 1:]
    operands = np.zeros(history.slots.shape), following, np.ones((3, 3))
    history.slots.assign(with_gradients(read)(*tensors(*operands))[1])
    store = {}
    history.save_own_variables(store)
    newest = following[:, :, 0].max(0)
    assert np.all(store["0"][:, 0] >= newest) and np.all(store["0"][:, 0] <= 3 * newest * (1 + 1e-6))
    np.testing.assert_allclose(store["0"][:, 1:], following[0, :, 1:], rtol=1e-6)


def test_the_first_step_scales_just_in_time():
    x, w, g = tensors(*(np.random.default_rng().normal(size=(32, 32)) for _ in range(3)))
    late, zeros = Scalings.named("delayed", history=4), keras.ops.zeros((3, 4))
    first, without, static, expected = (
        with_gradients(lambda x, w, options=options: matmul(x, w, **options))(x, w, g)
        for options in (
            {"scaling": late, "history": zeros},
            {"scaling": "delayed"},
            {"scaling": Scalings.named("static", margin=0)},
            {"scaling": Scalings.named("current")},
        )
    )
    for found in (first, without, static):
        for actual, own in zip(found, expected, strict=True):
            np.testing.assert_array_equal(to_numpy(actual), to_numpy(own))


@pytest.mark.parametrize("bad", BAD)
def test_what_is_not_finite_stays_visible_and_the_rest_keeps_its_scale(bad):
    x = np.random.default_rng().normal(size=(4, 4)).astype("float32")
    x[1, 2] = bad
    found = quantized_by(Scalings.named("delayed"), *tensors(x), "input", row=keras.ops.full((16,), 7.0))
    assert to_numpy(found.scale) == 64.0
    np.testing.assert_array_equal(to_numpy(found.values), cast(x * 64, "E4M3").astype("float64"))


def test_a_frozen_layer_scales_just_in_time_and_keeps_its_history():
    layer = Float8Dense(WIDTH, use_bias=False, scaling=Scalings.named("delayed", history=4))
    layer.build((None, WIDTH))
    layer.kernel.assign(np.ones((WIDTH, WIDTH), "float32"))
    before = np.full((3, 4), 2.0**-30)
    layer.amax_history.load_own_variables({"0": before})
    x = np.random.default_rng().uniform(1, 4, (ROWS, WIDTH)).astype("float32")
    exact = x.astype("float64") @ np.ones((WIDTH, WIDTH))
    assert sqnr(layer(x), exact) < 5  # all saturates
    layer.trainable = False
    assert sqnr(layer(x), exact) > 25
    np.testing.assert_array_equal(saved_history(layer)["0"], before)


@pytest.mark.jax
@pytest.mark.parametrize("scaling", ["static", pytest.param("int8", marks=pytest.mark.slow)])
def test_other_weights_are_not_clipped_by_the_amaxes_of_those_before(scaling, tmp_path):
    generator = np.random.default_rng()
    plain = keras.Sequential([keras.Input((WIDTH,)), keras.layers.Dense(WIDTH), keras.layers.Dense(WIDTH)])
    model = convert(twin(plain), scaling, select=lambda path, layer: True)
    model.compile(keras.optimizers.SGD(1e-6), "mse")
    x = generator.normal(size=(ROWS, WIDTH)).astype("float32")
    model.fit(x, x, epochs=17, batch_size=ROWS, verbose=0)  # the scales of "static" are fixed after 16 updates
    assert histories(model).any(axis=(1, 2)).all()
    plain.set_weights([weight * 8 for weight in plain.get_weights()])
    plain.save_weights(tmp_path / "plain.weights.h5")
    model.load_weights(tmp_path / "plain.weights.h5")
    exact = np.linalg.multi_dot([x, *(to_numpy(layer.kernel) for layer in plain.layers)])
    assert sqnr(model.predict(x, verbose=0), exact) > 20
    model.fit(x, x, epochs=2, batch_size=ROWS, verbose=0)
    assert sqnr(model.predict(x, verbose=0), exact) > 20
    largest = [abs(to_numpy(layer.kernel)).max() for layer in plain.layers]
    assert histories(model)[:, 1].max(axis=-1) == pytest.approx(largest, rel=1e-3)
    for layer, own in zip(model.layers, plain.layers, strict=True):
        layer.kernel.assign(own.kernel * 1.5)  # as of a step: the history stays
        assert histories(model).any(axis=(1, 2)).all()
    for layer, own in zip(model.layers, plain.layers, strict=True):
        layer.kernel.assign(own.kernel * 8)
    assert sqnr(model.predict(x, verbose=0), 64 * exact) > 20
    assert not any("assign" in vars(layer.kernel) for layer in keras_mp.revert(model).layers)


@pytest.mark.parametrize("jitted", [True, False])
def test_a_constraint_assigns_in_a_step_of_any_kind(jitted):
    """What a step assigns is no other kernel, and is a tensor of a program where no value can be looked at."""
    model = keras.Sequential([keras.Input((WIDTH,)), keras.layers.Dense(WIDTH, kernel_constraint="max_norm")])
    convert(model, "delayed", select=lambda path, layer: True)
    model.compile(keras.optimizers.SGD(1e-3), "mse", jit_compile=jitted)
    x = np.random.default_rng().normal(size=(ROWS, WIDTH)).astype("float32")
    model.fit(x, x, epochs=3, batch_size=ROWS, verbose=0)
    assert (histories(model)[:, :, :3] > 0).all()


def small(recipe):
    """A converted model with a Dense layer and attention."""
    inputs = keras.Input((4, 16))
    x = keras.layers.Dense(16, "relu", name="shared")(inputs)
    x = keras.layers.MultiHeadAttention(2, 8, name="attention")(x, x)
    model = keras.Model(inputs, keras.layers.Dense(4, name="last")(x))
    return convert(model, recipe, select=lambda path, layer: path in ("shared", "attention/query", "attention/value"))


def histories(model):
    """What is kept, by order: of the Dense layer, and of two projections of attention."""
    kept = [each for each in model._flatten_layers(include_self=False) if isinstance(each, AmaxHistory)]
    stores = [{} for _ in kept]
    for layer, store in zip(kept, stores, strict=True):
        layer.save_own_variables(store)
    return np.array([store["0"] for store in stores])


@pytest.fixture(scope="module")
def trained():
    """Trained for four steps with averaged weights; nothing changes it."""
    keras.config.set_dtype_policy("mixed_bfloat16")
    model = small(Scalings.named("delayed", history=8))
    inner = keras.optimizers.Adam(1e-2, use_ema=True, ema_overwrite_frequency=2, weight_decay=0.1)
    model.compile(keras_mp.LossScaleOptimizer(inner, keras_mp.LossScale.none()), "mse", run_eagerly=True)
    rng = np.random.default_rng()
    for _ in range(4):
        model.train_on_batch(rng.normal(size=(8, 4, 16)), rng.normal(size=(8, 4, 4)))
    return model


@pytest.mark.usefixtures("mixed_bfloat16")
class TestOnAModel:
    """What users do with a model whose layers keep amaxes."""

    def test_a_recipe_that_changes_says_what_is_kept(self, trained):
        before = histories(trained)
        with pytest.warns(UserWarning, match="the newest 1 of their amaxes of 8 steps are kept"):
            shorter = convert(twin(trained), Scalings.named("delayed", history=1))
        np.testing.assert_array_equal(histories(shorter), before[:, :, :1])
        with pytest.warns(UserWarning, match="'delayed'.* to .*'int8'.* newest 1 of their amaxes of 1 steps"):
            longer = convert(twin(shorter), Scalings.named("int8", history=4))
        np.testing.assert_array_equal(histories(longer), np.pad(before[:, :, :1], ((0, 0), (0, 0), (0, 3))))
        assert not saved_history(longer.get_layer("shared"))["1"].any()
        with pytest.warns(UserWarning, match="their amaxes of 4 steps are dropped, as .*'mxfp8'. needs none"):
            blocks = convert(twin(longer), "mxfp8")
        assert blocks.get_layer("shared").amax_history is None and not len(histories(blocks))
        with pytest.warns(UserWarning, match="weights are kept, and their first step computes the amaxes"):
            again = convert(twin(blocks), "delayed")
        assert not histories(again).any() and len(histories(again)) == 3
        np.testing.assert_array_equal(again.get_layer("shared").kernel, trained.get_layer("shared").kernel)
        assert convert(again).get_layer("shared").scaling == Scalings.named("delayed")

    def test_files_of_itself_and_weights_of_other_recipes_and_of_the_plain_model(self, trained, tmp_path):
        before = histories(trained)
        trained.save(tmp_path / "model.keras")
        again = keras.models.load_model(tmp_path / "model.keras", compile=False)
        np.testing.assert_array_equal(histories(again), before)
        trained.save_weights(tmp_path / "delayed.weights.h5")
        plain, shorter = revert(twin(trained)), small(Scalings.named("delayed", history=2))
        plain.load_weights(tmp_path / "delayed.weights.h5")
        with pytest.warns(UserWarning, match="the amax history of 8 steps is loaded into one of 2: the newest 2"):
            shorter.load_weights(tmp_path / "delayed.weights.h5")
        np.testing.assert_array_equal(histories(shorter), before[:, :, :2])
        plain.save_weights(tmp_path / "plain.weights.h5")
        again.load_weights(tmp_path / "plain.weights.h5")
        assert not histories(again).any()  # amaxes of other weights would clip these


def test_the_updates_are_counted_as_far_as_float32_counts_them():
    counted = next_step(*tensors([0.0, 1.0, 2.0**24 - 2, 2.0**24 - 1, 2.0**23]))
    np.testing.assert_array_equal(to_numpy(counted), [1, 2, 2**24 - 1, 2**23, 2**23 + 1])


def test_bad_input():
    x, w = tensors(np.ones((2, 2)), np.ones((2, 2)))
    for recipe, needs in (
        ("delayed", r"Scalings.named\('delayed'\) needs \(3, 16\)"),
        ("int8", r"Scalings.named\('int8'\) needs \(3, 17\)"),
        ("current", "Scalings.named.* keeps none"),
    ):
        with pytest.raises(ValueError, match=rf"history has the shape \(3, 2\), and {needs}"):
            matmul(x, w, recipe, history=np.zeros((3, 2), "float32"))
