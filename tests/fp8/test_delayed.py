"""Delayed scaling: the trajectory of its scales equals a reference in NumPy, whatever happens on the way."""

import keras
import numpy as np
import pytest
from marks import ci_on, few
from reference import cast, sqnr, tensors, to_numpy, with_gradients
from trajectory import (
    BAD,
    RECIPES,
    ROWS,
    WIDTH,
    assert_same_state,
    build,
    dot_loss,
    history_of,
    reference_of,
    run,
    steps,
)

import keras_mp
from keras_mp.fp8 import CurrentScaling, DelayedScaling, Float8Dense, convert, matmul, revert
from keras_mp.fp8.history import CALL_SITES, AmaxHistory

pytestmark = ci_on("jax")

EAGER, JIT = {"run_eagerly": True}, {"jit_compile": True}
MODES = [JIT, {"jit_compile": False}] if keras.backend.backend() == "tensorflow" else [JIT]
COMPILED = [JIT, *(pytest.param(mode, marks=pytest.mark.ci) for mode in MODES[1:])]
CASES = [pytest.param("margin", EAGER, True, marks=pytest.mark.once)]
CASES += [
    pytest.param(name, mode, checks, marks=[] if (mode, checks) == (JIT, True) else pytest.mark.ci)
    for name in RECIPES
    for mode in MODES
    for checks in (True, False)
]


@pytest.mark.parametrize("name, mode, checks", CASES, ids=str)
def test_trajectory(name, mode, checks):
    recipe = RECIPES[name]
    plan = steps(50) if checks else steps(50, bad=BAD[:2])  # what is skipped may be NaN
    run(build(recipe, checks=checks, **mode), reference_of(recipe), plan, checks)


@pytest.mark.parametrize("mode", COMPILED, ids=str)
@pytest.mark.parametrize("name", few(RECIPES, "margin"))
def test_micro_batches_move_the_history_once_an_update(name, mode):
    recipe = RECIPES[name]
    model = build(recipe, accumulate=3, **mode)
    run(model, reference_of(recipe, accumulate=3), steps(50), True)


@pytest.mark.parametrize("accumulate", [pytest.param(1, marks=pytest.mark.ci), 3])
@pytest.mark.parametrize("mode", COMPILED, ids=str)
@pytest.mark.parametrize("name", few(RECIPES, "margin"))
def test_a_reload_in_the_middle(name, accumulate, mode, tmp_path):
    recipe = RECIPES[name]
    model, reference, plan = build(recipe, accumulate=accumulate, **mode), reference_of(recipe, accumulate), steps(50)
    run(model, reference, plan[:25], True)
    model.save(tmp_path / "model.keras")
    model = keras.models.load_model(tmp_path / "model.keras")
    assert_same_state(model, reference)
    run(model, reference, plan[25:], True)


def test_a_float16_overflow_leaves_the_history():
    """A real one, of the loss scale: the step is skipped on the way down to a scale that fits."""
    keras.config.set_dtype_policy("mixed_float16")
    layer = Float8Dense(WIDTH, use_bias=False, recipe="delayed", name="shared")
    model = keras.Sequential([keras.Input((WIDTH,)), layer])
    model.compile(keras_mp.LossScaleOptimizer(keras.optimizers.SGD(0.0), initial_scale=2.0**24), dot_loss)
    x, c = (1e3 * np.random.default_rng().normal(size=(ROWS, WIDTH)).astype("float32") for _ in range(2))
    skipped = 0
    while int(model.optimizer.iterations) == 0:
        np.testing.assert_array_equal(history_of(model), 0)
        model.train_on_batch(x, c)
        skipped += 1
    assert skipped > 5 and np.all(history_of(model)[:, 0] > 0)


@pytest.mark.ci
def test_more_calls_than_slots_scale_too_little_and_never_grow():
    """A third call in one slot adds its amax; the older entries stay what they were."""
    layer = Float8Dense(WIDTH, use_bias=False, recipe=DelayedScaling(amax_history_length=3), name="shared")
    inputs = keras.Input((WIDTH,))
    calls = 2 * CALL_SITES + 1
    model = keras.Model(inputs, sum(layer(inputs) for _ in range(calls)))
    model.compile(keras.optimizers.SGD(0.0), dot_loss)
    x, c = (np.random.default_rng().normal(size=(ROWS, WIDTH)).astype("float32") for _ in range(2))
    amax = np.max(np.abs(x))
    for _ in range(10):
        model.train_on_batch(x, c)
    history = history_of(model)[0]
    assert np.all(history >= amax) and np.all(history <= 3 * amax * (1 + 1e-6))


def test_the_first_step_scales_just_in_time():
    x, w, g = tensors(*(np.random.default_rng().normal(size=(32, 32)) for _ in range(3)))
    zeros = keras.ops.zeros((3, 4))
    late, now = DelayedScaling(amax_history_length=4), CurrentScaling()
    first = with_gradients(lambda x, w: matmul(x, w, late, history=zeros))(x, w, g)
    for found, expected in zip(first, with_gradients(lambda x, w: matmul(x, w, now))(x, w, g), strict=True):
        np.testing.assert_array_equal(to_numpy(found), to_numpy(expected))
    without = with_gradients(lambda x, w: matmul(x, w, "delayed"))(x, w, g)
    for found, expected in zip(first, without, strict=True):
        np.testing.assert_array_equal(to_numpy(found), to_numpy(expected))


@pytest.mark.parametrize("bad", BAD)
def test_what_is_not_finite_stays_visible_and_the_rest_keeps_its_scale(bad):
    x = np.random.default_rng().normal(size=(4, 4)).astype("float32")
    x[1, 2] = bad
    found = DelayedScaling().quantize(keras.ops.convert_to_tensor(x), "input", history=keras.ops.full((16,), 7.0))
    assert to_numpy(found.scale) == 64.0
    np.testing.assert_array_equal(to_numpy(found.values), cast(x * 64, "E4M3").astype("float64"))


def test_a_frozen_layer_scales_just_in_time_and_keeps_its_history():
    model = build(DelayedScaling(amax_history_length=4))
    plan = [[np.abs(each) + 1 for each in step] for step in steps(9)]
    layer = model.get_layer("shared")

    def train(scale):
        model.train_on_batch([scale * plan[0][0], scale * plan[0][1]], plan[0][2])

    layer.kernel.assign(np.ones((WIDTH, WIDTH), "float32"))
    keras.utils.set_random_seed(0)
    train(2.0**-30)
    before = history_of(model)
    layer.trainable = False
    result = to_numpy(model([plan[0][0], plan[0][1]]))
    assert sqnr(result, (plan[0][0] + plan[0][1]).astype("float64") @ np.ones((WIDTH, WIDTH))) > 25
    np.testing.assert_array_equal(history_of(model), before)


def small(recipe=None):
    """A converted model, compiled."""
    layers = [keras.Input((16,)), keras.layers.Dense(32, "relu", name="shared"), keras.layers.Dense(4, name="last")]
    model = keras.Sequential(layers)
    model.compile(keras_mp.LossScaleOptimizer(keras.optimizers.Adam(1e-2), keras_mp.NoLossScale()), "mse")
    return convert(model, recipe, select=lambda path, layer: path == "shared")


def fit(model):
    rng = np.random.default_rng()
    model.fit(rng.normal(size=(32, 16)), rng.normal(size=(32, 4)), batch_size=8, verbose=0)


@pytest.mark.filterwarnings("ignore:.*compute in float32")
class TestOnAModel:
    """What users do with a model whose layers keep amaxes."""

    def test_a_recipe_that_changes_says_what_is_kept(self):
        model = small(DelayedScaling(amax_history_length=8))
        fit(model)
        before = history_of(model)
        with pytest.warns(UserWarning, match="the newest 2 of their amaxes of 8 steps are kept"):
            shorter = convert(model, DelayedScaling(amax_history_length=2))
        np.testing.assert_array_equal(history_of(shorter), before[:, :2])
        with pytest.warns(UserWarning, match="the newest 2 of their amaxes of 2 steps are kept"):
            longer = convert(shorter, DelayedScaling(amax_history_length=4))
        np.testing.assert_array_equal(history_of(longer), np.pad(before[:, :2], ((0, 0), (0, 2))))
        with pytest.warns(UserWarning, match="their amaxes of 4 steps are dropped, as CurrentScaling needs none"):
            current = convert(longer, "current")
        assert current.get_layer("shared").amax_history is None
        with pytest.warns(UserWarning, match="weights are kept, and they have no amaxes yet"):
            again = convert(current, "delayed")
        np.testing.assert_array_equal(history_of(again), 0)
        np.testing.assert_array_equal(again.get_layer("shared").kernel, model.get_layer("shared").kernel)
        assert convert(again).get_layer("shared").recipe == DelayedScaling()
        fit(again)

    def test_the_recipe_of_a_built_layer_is_not_swapped(self):
        layer = small("delayed").get_layer("shared")
        with pytest.raises(ValueError, match="keeps amaxes of 3 steps, and the built layer .* of 16: make a new model"):
            layer.recipe = DelayedScaling(amax_history_length=3)
        layer.recipe = DelayedScaling(margin=1)
        assert layer.recipe.margin == 1

    def test_weights_files_of_other_recipes_and_of_the_plain_model(self, tmp_path):
        model = small(DelayedScaling(amax_history_length=4))
        fit(model)
        model.save_weights(tmp_path / "delayed.weights.h5")
        plain, shorter = revert(model), small(DelayedScaling(amax_history_length=2))
        plain.load_weights(tmp_path / "delayed.weights.h5")
        with pytest.warns(UserWarning, match="the amax history of 4 steps is loaded into one of 2: the newest 2"):
            shorter.load_weights(tmp_path / "delayed.weights.h5")
        np.testing.assert_array_equal(history_of(shorter), history_of(model)[:, :2])
        plain.save_weights(tmp_path / "plain.weights.h5")
        before = history_of(model)
        model.load_weights(tmp_path / "plain.weights.h5")
        np.testing.assert_array_equal(history_of(model), before)

    def test_averaged_weights(self):
        model = small("delayed")
        inner = keras.optimizers.Adam(1e-2, use_ema=True, ema_overwrite_frequency=2, weight_decay=0.1)
        model.compile(keras_mp.LossScaleOptimizer(inner, keras_mp.NoLossScale()), "mse")
        fit(model)
        assert np.all(np.isfinite(history_of(model))) and np.all(history_of(model)[:, :4] > 0)

    @pytest.mark.ci
    def test_exported_without_amaxes(self, tmp_path):
        pytest.importorskip("tensorflow", reason="a SavedModel needs TensorFlow")
        model = small("delayed")
        fit(model)
        keras_mp.export_float32(model, tmp_path / "saved", verify=np.ones((2, 16), "float32"))


@pytest.mark.filterwarnings("ignore:.*compute in float32")
def test_projections_inside_attention_keep_amaxes(tmp_path):
    inputs = keras.Input((4, 16))
    model = keras.Model(inputs, keras.layers.MultiHeadAttention(2, 8, name="attention")(inputs, inputs))
    model.compile("sgd", "mse")
    model = convert(model, DelayedScaling(amax_history_length=3), select=lambda path, layer: True)
    rng = np.random.default_rng()
    model.fit(rng.normal(size=(8, 4, 16)), rng.normal(size=(8, 4, 16)), verbose=0)
    histories = [layer for layer in _below(model) if isinstance(layer, AmaxHistory)]
    assert len(histories) == 4
    model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    for old, new in zip(_below(model), _below(again), strict=True):
        if isinstance(old, AmaxHistory):
            first, second = {}, {}
            old.save_own_variables(first)
            new.save_own_variables(second)
            np.testing.assert_array_equal(first["0"], second["0"])
            assert np.all(first["0"][:, 0] > 0)
    with pytest.warns(UserWarning, match="change from DelayedScaling.* to CurrentScaling"):
        assert not [layer for layer in _below(convert(again, "current")) if isinstance(layer, AmaxHistory)]


def _below(model):
    return model._flatten_layers(include_self=False)


@pytest.mark.parametrize("name", ["margin", "amax_history_length"])
@pytest.mark.parametrize("value", [-1, 1.5, "2", True])
def test_bad_numbers(name, value):
    with pytest.raises(ValueError, match=f"{name}={value!r} must be a whole number"):
        DelayedScaling(**{name: value})


def test_bad_input():
    with pytest.raises(ValueError, match="amax_history_length=0 must be a whole number, 1 or more"):
        DelayedScaling(amax_history_length=0)
    with pytest.raises(ValueError, match="amax_compute='mean' is unknown: use 'max' or 'most_recent'"):
        DelayedScaling(amax_compute="mean")
    x, w = tensors(np.ones((2, 2)), np.ones((2, 2)))
    with pytest.raises(ValueError, match=r"history has the shape \(3, 2\), and DelayedScaling.* needs \(3, 16\)"):
        matmul(x, w, "delayed", history=np.zeros((3, 2), "float32"))
    with pytest.raises(ValueError, match=r"history has the shape \(3, 2\), and CurrentScaling.* keeps none"):
        matmul(x, w, "current", history=np.zeros((3, 2), "float32"))
