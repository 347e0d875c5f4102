"""Scales, and what they do to values that break."""

import keras
import numpy as np
import pytest
import reference
from reference import compiled, tensors

from keras_mp.fp8 import E4M3, E5M2, HYBRID, CurrentScaling, RoleFormats
from keras_mp.fp8.scaling import get_recipe
from keras_mp.fp8.scaling_recipe import ROLES, Recipe

BACKEND = keras.backend.backend()
FORMAT_OF = {"input": "E4M3", "kernel": "E4M3", "gradient": "E5M2"}


def in_all_roles(recipe):
    """Values and scale of a tensor for each role."""
    return lambda x: [recipe.quantize(x, role) for role in ROLES]


# Tensors of one shape and dtype share a compiled program.
current = compiled(in_all_roles(CurrentScaling()))
MODES = [pytest.param(current, id="jit")]
if BACKEND == "tensorflow":
    MODES.append(pytest.param(in_all_roles(CurrentScaling()), id="eager"))


@pytest.mark.jax
@pytest.mark.parametrize(
    "power_of_two, dtype, shape",
    [
        (False, "float32", (17, 5)),
        (True, "bfloat16", (3, 4, 5, 6)),
        (True, "float32", (1, 1)),
        (False, "float16", (7,)),
    ],
)
def test_the_largest_magnitude_goes_to_the_largest_number(power_of_two, dtype, shape):
    rng = np.random.default_rng()
    [x] = tensors(rng.normal(size=shape) * 10.0 ** rng.uniform(-3, 3), dtype=dtype)
    rounded = keras.ops.convert_to_numpy(keras.ops.cast(x, "float32"))
    found = compiled(in_all_roles(CurrentScaling(power_of_two=power_of_two)))(x)
    for role, (values, scale) in zip(ROLES, found, strict=True):
        expected_values, expected_scale = reference.quantize(rounded, FORMAT_OF[role], power_of_two)
        assert keras.backend.standardize_dtype(scale.dtype) == "float32" and scale.shape == ()
        assert float(scale) == expected_scale
        actual, expected = (np.asarray(each).astype(np.float32) for each in (values, expected_values))
        np.testing.assert_array_equal(actual, expected)
        largest = reference.MAX[FORMAT_OF[role]]
        if power_of_two:
            assert np.log2(scale) == round(np.log2(scale)) and largest / 2 <= np.max(np.abs(actual)) <= largest
        else:
            assert np.max(np.abs(actual)) == largest


@pytest.mark.jax
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "x, scale",
    [
        ([[0.0, -0.0]], 1.0),
        (np.zeros((0, 4)), 1.0),
        ([[np.inf, 2.0]], 1.0),
        ([[-np.inf, 2.0]], 1.0),
        ([[np.nan, 2.0]], None),  # whether a maximum over a NaN is one is the backend's affair
        ([[1e-38 * 1.2, 0.0]], 2.0**126),
        ([[1e-37, -3e-38]], 2.0**126),
    ],
    ids=["zeros", "empty", "inf", "-inf", "nan", "smallest normal", "small"],
)
def test_breaking_values(x, scale, mode):
    for role, (values, actual) in zip(ROLES, mode(*tensors(x)), strict=True):
        if scale is not None:
            assert float(actual) == scale
        assert np.isfinite(float(actual)) and float(actual) > 0
        values, x = np.asarray(values).astype(np.float32), np.float32(x)
        np.testing.assert_array_equal(np.isfinite(values), np.isfinite(x))
        expected = np.asarray(reference.cast(x * np.float32(actual), FORMAT_OF[role])).astype(np.float32)
        np.testing.assert_array_equal(values, expected)


@pytest.mark.jax
@pytest.mark.parametrize("x", [65504.0, 6e-8], ids=["largest float16", "smallest float16"])
def test_float16_at_its_ends(x):
    values, scale = current(*tensors([[x, 0.0]], dtype="float16"))[2]
    assert np.isfinite(float(scale))
    largest = np.asarray(values).astype(np.float32)[0, 0]
    # Compilers for CPUs flush float16's subnormals, or do not: zero, or all of the range.
    assert largest == 57344.0 or (x < 6.1e-5 and largest == 0 and float(scale) == 1.0)


def test_formats_by_role():
    assert CurrentScaling().format == HYBRID == RoleFormats(E4M3, E4M3, E5M2)
    for everywhere in (E4M3, "E4M3", {"gradient": "E4M3"}, RoleFormats(gradient=E4M3)):
        recipe = CurrentScaling(everywhere)
        assert [recipe.format_of(role) for role in ROLES] == [E4M3] * 3
    wide_input = CurrentScaling({"input": "E5M2", "kernel": E4M3, "gradient": "e4m3"})
    assert wide_input.format_of("input") is E5M2 and wide_input.format_of("gradient") is E4M3


def test_recipes_are_values():
    recipe = CurrentScaling("E4M3", power_of_two=True)
    assert recipe == CurrentScaling(E4M3, True) != CurrentScaling() and len({recipe, CurrentScaling(E4M3, True)}) == 1
    with pytest.raises(AttributeError):
        recipe.power_of_two = False
    back = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(recipe))
    assert back == recipe and isinstance(back, Recipe)
    assert get_recipe(keras.saving.serialize_keras_object(recipe)) == recipe
    assert get_recipe() == get_recipe("current") == CurrentScaling() and get_recipe(recipe) is recipe


def test_bad_recipes():
    with pytest.raises(ValueError, match="E5M2 to input and kernel and gradient, whose product .* HYBRID"):
        CurrentScaling("E5M2")
    with pytest.raises(ValueError, match="E5M2 to kernel and gradient"):
        CurrentScaling({"kernel": "E5M2"})
    with pytest.raises(ValueError, match="role 'weights', which is not one of 'input', 'kernel', 'gradient'"):
        CurrentScaling({"weights": "E4M3"})
    with pytest.raises(ValueError, match="role='output' is not one of 'input', 'kernel', 'gradient'"):
        CurrentScaling().quantize(keras.ops.ones((2, 2)), "output")
    with pytest.raises(ValueError, match="format='E8' is unknown: use 'hybrid', 'E4M3'"):
        CurrentScaling("E8")
    with pytest.raises(ValueError, match="format='E8' must be one of 'E4M3', 'E5M2'"):
        CurrentScaling({"input": "E8"})
    with pytest.raises(ValueError, match="power_of_two=2 must be True or False"):
        CurrentScaling(power_of_two=2)
    for wrong in ("delayed?", 3, CurrentScaling):
        with pytest.raises(
            ValueError, match="recipe=.* is unknown: use 'current', 'delayed', 'static'.*, or a scaling recipe such as"
        ):
            get_recipe(wrong)
