"""A step of a model beside that of another one: how it is compiled, what it makes, and that both are the same."""

import warnings
from typing import NamedTuple

import keras
import numpy as np
import pytest
from twins import twin

import keras_mp


def optimizer(rate=1.0):
    return keras.optimizers.SGD(rate, momentum=0.9)  # after a step its momenta are minus the gradients times the rate


def compiled(model, **mode):
    loss, metrics = keras.losses.SparseCategoricalCrossentropy, keras.metrics
    model.compile(
        optimizer(),
        loss(from_logits=True),
        metrics=[metrics.SparseCategoricalCrossentropy(from_logits=True, name="crossentropy")],
        weighted_metrics=[metrics.SparseCategoricalAccuracy()],
        **mode,
    )
    return model


def lean_of(model, **options):
    """The lean model, which nothing must be missing from."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="(?s).*could not change some layers.*")
        return keras_mp.lean.make_lean(twin(model), **options)


class Step(NamedTuple):
    """What a step made: the logs, minus the gradients, moving statistics, and the states of random seeds."""

    logs: dict
    gradients: list
    statistics: list
    seeds: list


def step(model, x, y, sample_weight=None):
    numbers = keras.ops.convert_to_numpy
    model.optimizer.build(model.trainable_variables)
    for momentum in model.optimizer.momentums:
        momentum.assign(np.zeros(momentum.shape))
    logs = model.train_on_batch(x, y, sample_weight, return_dict=True)
    gradients = [numbers(momentum) for momentum in model.optimizer.momentums]
    statistics = [numbers(weight) for weight in model.non_trainable_weights]
    seeds = [numbers(seed.state) for layer in model._flatten_layers() for seed in layer._seed_generators]
    return Step({name: float(value) for name, value in logs.items()}, gradients, statistics, seeds)


def assert_same_step(ours, plain, least=1e-2):
    """Compares two steps, each gradient in parts of its own size or of a share of the largest's, where that is more."""
    assert ours.logs == pytest.approx(plain.logs, rel=1e-5, abs=1e-6)
    largest = max(np.abs(b).max() for b in plain.gradients)
    for a, b in zip(ours.gradients, plain.gradients, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * max(np.abs(b).max(), least * largest))
    for a, b in zip(ours.statistics, plain.statistics, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(b).max())
    np.testing.assert_equal(ours.seeds, plain.seeds)
