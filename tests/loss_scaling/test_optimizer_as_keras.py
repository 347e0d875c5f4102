"""Keras's own tests of its LossScaleOptimizer, run with ours in its place."""

import importlib.util
import unittest
import warnings

import pytest

import keras_mp

_HAS_TESTS = importlib.util.find_spec("keras.src.optimizers.loss_scale_optimizer_test") is not None


@pytest.mark.jax
@pytest.mark.skipif(not _HAS_TESTS, reason="this release of Keras does not ship its tests")
def test_passes_every_test_that_keras_has_for_its_own(monkeypatch):
    from keras.src.optimizers import loss_scale_optimizer_test as keras_tests

    monkeypatch.setattr(keras_tests, "LossScaleOptimizer", keras_mp.LossScaleOptimizer)
    suite = unittest.defaultTestLoader.loadTestsFromTestCase(keras_tests.LossScaleOptimizerTest)
    result = unittest.TestResult()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # scales that are not powers of two
        suite.run(result)
    assert not result.failures + result.errors, "\n".join(
        f"{test}: {text}" for test, text in result.failures + result.errors
    )
    # What Keras skips is apply() on JAX and stateless_apply() on TensorFlow.
    assert result.testsRun >= 25 and result.testsRun - len(result.skipped) >= 18
