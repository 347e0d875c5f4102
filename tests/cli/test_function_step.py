"""The options that a function that builds a model gets on the command line."""

from __future__ import annotations

import keras
import pytest

from keras_mp.cli.function_step import step_of_function


def model_of(width):
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(width)])
    model.compile("sgd", "mse")
    return model


def test_the_default_of_an_argument_called_policy_holds_without_a_type():
    policies = []

    def build(policy="mixed_bfloat16", width=4):
        policies.append((policy, width))
        return model_of(width)

    step_of_function("m:build", build, [], 2)
    step_of_function("m:build", build, ["--policy", "float32", "--width", "8"], 2)
    assert set(policies) == {("mixed_bfloat16", 4), ("float32", 8)}


def test_a_length_is_the_functions_own_argument_where_it_has_one():
    def build(length=8):
        return keras.Sequential([keras.Input((length, 4)), keras.layers.Dense(2)])

    for length, expected in ((None, 8), (16, 16)):
        _, (x, _), _ = step_of_function("m:build", build, [], 2, length)
        assert tuple(x.shape) == (2, expected, 4)


def test_types_that_only_a_type_checker_imports_leave_those_of_the_defaults():
    widths = []

    def build(width: Unknown = 4, initializer: Initializer = None):  # noqa: F821
        widths.append(width)
        return model_of(width)

    step_of_function("m:build", build, ["--width", "8"], 2)
    assert set(widths) == {8}
    with pytest.raises(Exception, match="No such option: --initializer"):
        step_of_function("m:build", build, ["--initializer", "zeros"], 2)


def test_a_type_error_of_the_function_itself_is_left_as_it_is():
    with pytest.raises(TypeError, match="unsupported operand") as error:
        step_of_function("m:build", lambda width=4: model_of(width + "a"), [], 2)
    assert "is taken for" not in str(error.value)


def test_a_function_that_cannot_be_called_with_options_is_told_what_it_is_taken_for():
    def build(width=4, /):
        return model_of(width)

    with pytest.raises(ValueError, match="m:build is taken for a function that builds a model"):
        step_of_function("m:build", build, [], 2)
