"""The masks of dropout: what is drawn is the hash, and looks random between any two places; it is drawn again alike."""

from pathlib import Path

import keras
import numpy as np
import pytest
from drawn import kept_in_numpy, seed_state
from gradients_of import compiled
from in_own_process import run
from keras import ops

import keras_mp
from keras_mp.lean.blockwise_attention import kept, keys_of

pytestmark = pytest.mark.jax
SHAPE = (4, 6, 128, 128)  # samples, heads, rows, columns
# By their degrees of freedom: chi squared is larger once in a billion draws (scipy.stats.chi2.isf(1e-9, degrees)).
LIMITS = {1: 37.4, 3: 45.1}


def seeds():
    """The words of a generator's seed, and of its next step and of another layer's."""
    first, second = (int(word) for word in np.random.default_rng().integers(2**31, size=2))
    return {
        "this": (first, 7),
        "the next step": (first, 8),
        "a later step": (first, 7 + 1024),
        "another layer": (second, 7),
    }


def draw(seed, rate, shape=SHAPE):
    return ops.convert_to_numpy(kept(*keys_of(seed_state(seed), shape[:-1]), shape[-1], rate))


def chi_squared(counts, expected):
    assert expected.sum() == pytest.approx(counts.sum())
    return ((counts - expected) ** 2 / expected).sum()


def test_it_is_the_hash_of_seed_and_place():
    # Pinned: a resumed run of a later version draws the same.
    seed, shape = seeds()["this"], (2, 3, 5, 7)
    np.testing.assert_array_equal(draw(seed, 0.3, shape), kept_in_numpy(seed, shape, 0.3))
    assert draw((0, 0), 0.3, shape).any()


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_shares_and_pairs_are_those_of_independent_draws(rate):
    words = seeds()
    masks = {name: draw(seed, rate) for name, seed in words.items()}
    for name, mask in masks.items():
        counts = np.array([(~mask).sum(), mask.sum()])
        assert chi_squared(counts, mask.size * np.array([rate, 1 - rate])) < LIMITS[1], (name, words)
    mask = masks.pop("this")
    pairs = {name: (mask, other) for name, other in masks.items()}
    for axis, what in enumerate(["samples", "heads", "rows", "columns"]):
        for lag in (lag for lag in (1, 2, 3, 16, 64) if lag < SHAPE[axis]):
            ahead, behind = (
                np.take(mask, places, axis) for places in (range(lag, SHAPE[axis]), range(SHAPE[axis] - lag))
            )
            pairs[f"{what}, {lag} apart"] = ahead, behind
    pairs["a sample and another's head"] = mask[1:, :-1], mask[:-1, 1:]
    pairs["a row and the next, shifted"] = mask[:, :, 1:, :-1], mask[:, :, :-1, 1:]
    upper = np.triu(np.ones(SHAPE[2:], bool), 1)
    pairs["a score and its mirror"] = mask[..., upper], mask.swapaxes(2, 3)[..., upper]
    both = np.outer([rate, 1 - rate], [rate, 1 - rate])
    for name, (one, other) in pairs.items():
        counts = np.bincount(2 * one.ravel() + other.ravel().astype(int), minlength=4)
        assert chi_squared(counts, one.size * both.ravel()) < LIMITS[3], (name, words)


def test_no_place_drops_more_than_its_share_over_the_steps():
    (first, _), steps = seeds()["this"], 400
    draw = compiled(lambda seed: kept(*keys_of(seed, (64,)), 64, 0.5))
    masks = (ops.convert_to_numpy(draw(seed_state((first, step)))) for step in range(steps))
    dropped = sum((~mask).astype(int) for mask in masks)
    standard = (dropped - steps / 2) / np.sqrt(steps / 4)
    assert np.abs(standard).max() < 7.5  # of 4096 places one is beyond once in three billion draws
    assert abs(np.mean(standard**2) - 1) < 6 * np.sqrt(2 / standard.size)


def attending():
    """A compiled model whose attention drops, lean, and whose gradient of `output` sums what is kept."""
    inputs = keras.Input((160, 8))
    attend = keras.layers.MultiHeadAttention(2, 4, dropout=0.4, seed=11)
    model = keras_mp.lean.make_lean(keras.Model(inputs, attend(inputs, inputs, use_causal_mask=True)))
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


def test_each_step_draws_a_mask_of_its_own():
    model = attending()
    model.optimizer.learning_rate = 0.0
    x, y = np.random.default_rng().normal(size=(2, 4, 160, 8)).astype("float32")
    losses = [float(np.ravel(model.train_on_batch(x, y))[0]) for _ in range(5)]
    assert len(set(losses)) == 5


@pytest.mark.slow
@pytest.mark.rare
@pytest.mark.skipif(keras.backend.backend() != "jax", reason="on TensorFlow each replica draws from a seed of its own")
def test_one_device_as_eight():
    run(Path(__file__).with_name("dropped_on_devices.py"), "not slow", 8)
