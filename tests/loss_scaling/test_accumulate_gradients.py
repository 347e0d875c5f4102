"""A compiled model whose optimizer accumulates: the update is that of the whole batch."""

import keras
import numpy as np
import pytest

import keras_mp
from keras_mp.rebuild.optimizers import unwrapped


def model(optimizer=None, **arguments):
    layers = [keras.Input((5,)), keras.layers.Dense(3, kernel_initializer="ones"), keras.layers.Dense(1)]
    built = keras.Sequential(layers)
    built.compile(optimizer or keras.optimizers.SGD(0.1), "mse", **arguments)
    return built


@pytest.mark.jax
@pytest.mark.parametrize("settings", [{}, {"global_clipnorm": 0.1, "loss_scale_factor": 8.0}], ids=["plain", "clipped"])
def test_weights_are_those_of_keras(settings):
    rng = np.random.default_rng()
    x, y = rng.normal(size=(24, 5)).astype("float32"), rng.normal(size=(24, 1)).astype("float32")
    kerass = model(keras.optimizers.AdamW(0.1, gradient_accumulation_steps=3, **settings))
    ours = model(keras.optimizers.AdamW(0.1, **settings))
    ours.set_weights(kerass.get_weights())
    keras_mp.loss_scaling.change_optimizer(ours, accumulate=3)
    assert isinstance(ours.optimizer, keras_mp.LossScaleOptimizer) == (keras.backend.backend() == "jax")
    for trained in (kerass, ours):
        trained.fit(x, y, batch_size=4, epochs=3, shuffle=False, verbose=0)
    for one, other in zip(kerass.get_weights(), ours.get_weights(), strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-5, atol=1e-6)


def test_an_optimizer_that_accumulates_or_scales_already():
    twice = keras_mp.loss_scaling.change_optimizer(
        model(keras.optimizers.Adam(gradient_accumulation_steps=2)), accumulate=3
    )
    assert unwrapped(twice.optimizer).gradient_accumulation_steps == 6
    scaled = keras_mp.loss_scaling.change_optimizer(
        model(keras_mp.LossScaleOptimizer(keras.optimizers.Adam(0.5))), accumulate=2
    ).optimizer
    assert type(scaled) is keras_mp.LossScaleOptimizer
    assert scaled.inner_optimizer.gradient_accumulation_steps == 2
    assert keras_mp.loss_scaling.change_optimizer(model(), accumulate=1).optimizer.gradient_accumulation_steps is None


def test_a_compile_of_its_own_keeps_its_arguments():
    class Own(keras.Sequential):
        def compile(self, optimizer="sgd", loss="mse", weight=1.0, **arguments):
            super().compile(optimizer=optimizer, loss=loss, **arguments)
            self.weight = weight

    own = Own([keras.Input((5,)), keras.layers.Dense(1)])
    own.compile("adam", weight=3.0)
    keras_mp.loss_scaling.change_optimizer(own, accumulate=2)
    assert own.weight == 3.0 and unwrapped(own.optimizer).gradient_accumulation_steps == 2

    class Lost(keras.Sequential):
        def compile(self, how, **arguments):
            super().compile("sgd" if how else "adam", "mse", **arguments)

    lost = Lost([keras.Input((5,)), keras.layers.Dense(1)])
    lost.compile(True)
    with pytest.raises(TypeError, match="Lost has a compile"):
        keras_mp.loss_scaling.change_optimizer(lost, accumulate=2)


@pytest.mark.jax
@pytest.mark.skipif(keras.backend.backend() != "jax", reason="an accelerator's program has loops there")
def test_an_accelerators_program_makes_the_same_updates(monkeypatch):
    import jax

    from keras_mp.optimizer import _jax as update

    gradients = np.random.default_rng().normal(size=(8, 4)).astype("float32")
    gradients[4, 2] = np.inf  # in the second accumulation

    def trained():
        weight = keras.Variable(np.ones(4, "float32"))
        inner = keras.optimizers.AdamW(0.1, gradient_accumulation_steps=3)
        optimizer = keras_mp.LossScaleOptimizer(inner, keras_mp.LossScale.none())
        optimizer.build([weight])
        state = [weight.value], [variable.value for variable in optimizer.variables]
        step = jax.jit(lambda state, gradient: optimizer.stateless_apply(state[1], [gradient], state[0]))
        for gradient in gradients:
            state = step(state, gradient)
        return jax.tree.leaves(state)

    expected = trained()
    monkeypatch.setattr(update, "_is_for_cpu", lambda: False)
    for value, other in zip(trained(), expected, strict=True):
        np.testing.assert_allclose(value, other, rtol=1e-6)


@pytest.mark.parametrize("how", ["default", "by their mean", "mean_with_sample_weight"])
def test_micro_batches_in_which_rows_count_otherwise(how):
    """The gradient of a weighted mean over 4 rows, in NumPy: of all of them, or the mean over the means of pairs."""
    x, weights = np.random.default_rng().normal(size=(4, 1)).astype("float32"), np.array([1, 1, 0, 1], "float32")
    loss = keras.losses.MeanSquaredError(
        reduction="mean_with_sample_weight" if how[0] == "m" else "sum_over_batch_size"
    )
    given = weights / weights.mean() if how == "by their mean" else weights
    layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
    built = keras.Sequential([keras.Input((1,)), layer])
    built.compile(keras.optimizers.SGD(1.0), loss)
    keras_mp.loss_scaling.change_optimizer(built, accumulate=2)
    built.fit(x, 0 * x, sample_weight=given, batch_size=2, shuffle=False, verbose=0)
    each = 2 * x[:, 0].astype("float64") ** 2 * weights
    of_all = {"default": each.sum() / 4, "by their mean": each.sum() / 3}
    expected = of_all.get(how, np.mean([each[:2].sum() / 2, each[2:].sum() / 1]))
    np.testing.assert_allclose(1 - layer.kernel.numpy()[0, 0], expected, rtol=1e-4, atol=1e-6)
