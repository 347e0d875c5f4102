import keras
import numpy as np
import pytest
from arrays import numpy
from gradients_of import compiled

import keras_mp
from keras_mp.optimizer import gradients


def tensor(values, dtype="float32"):
    return keras.ops.convert_to_tensor(np.array(values, "float64"), dtype)


@pytest.mark.parametrize(
    "compile", [lambda function: function, pytest.param(compiled, marks=pytest.mark.jax)], ids=["eager", "compiled"]
)
def test_all_finite(compile):
    others = [tensor([[1.0, 2.0]]), tensor([3.0], "bfloat16")]
    all_finite = compile(lambda *grads: gradients.all_finite([None, *grads]))
    for values, dtype, finite in [
        ([1.0, -2.0], "float32", True),
        ([1.0, np.nan], "float32", False),
        ([np.inf, -np.inf], "float32", False),
        ([-np.inf, 0.0], "float16", False),
        ([6e4] * 9, "float16", True),  # their sum is past the largest float16
        ([3e38] * 9, "bfloat16", True),  # their sum is past the largest float32
        ([3e38] * 9, "float32", True),
        ([3e38, np.nan], "float32", False),
        ([3e38, -np.inf], "float32", False),
        ([], "float32", True),
    ]:
        for place in range(3):
            grads = [*others[:place], tensor(values, dtype), *others[place:]]
            assert numpy(all_finite(*grads)) == finite, (values, dtype, place)
    assert numpy(all_finite())


def variables(*marked):
    made = [keras.Variable(np.zeros(2, "float32")) for _ in marked]
    for variable, mark in zip(made, marked, strict=True):
        variable.overwrite_with_gradient = mark
    return made


def test_norm_and_share_are_those_of_numpy():
    values = np.random.default_rng(0).normal(size=(3, 2))
    values[0, 0] = 0.0
    grads = [tensor(row) for row in values]
    marked = variables(False, False, True)
    assert numpy(gradients.norm(grads, marked)) == pytest.approx(np.linalg.norm(values[:2]), rel=1e-6)
    magnitudes = np.abs(values[:2][values[:2] != 0])
    for threshold in (0.05, 0.3, 9.0):
        share = numpy(gradients.share_below(threshold, grads, marked))
        assert share == pytest.approx(np.mean(magnitudes < threshold), abs=1e-6)
    assert numpy(gradients.share_below(1.0, [tensor([0.0])], variables(False))) == 0


@pytest.mark.jax
@pytest.mark.parametrize("bad", [False, True])
def test_gradients_of_numpy_make_a_step_or_skip_it(bad):
    weight = keras.Variable(np.ones(3, "float32"))
    optimizer = keras_mp.LossScaleOptimizer(keras.optimizers.SGD(0.5), initial_scale=4.0)
    gradient = np.random.default_rng().normal(size=3).astype("float32")
    given = np.where([bad, False, False], np.inf, gradient).astype("float32")
    optimizer.apply([given], [weight])
    expected = np.ones(3) if bad else 1 - 0.5 * gradient.astype("float64") / 4
    np.testing.assert_allclose(keras.ops.convert_to_numpy(weight), expected, rtol=1e-6)
    optimizer.apply_gradients([(given, weight)])
    assert int(optimizer.skipped_steps) == 2 * bad and bool(optimizer.check_finite([given])) is not bad
