"""A recipe written outside the package: in a product, through convert, and in a file."""

import dataclasses

import keras
import numpy as np
import pytest
import reference
from own_recipe import Headroom
from reference import compiled, tensors

from keras_mp import fp8


def quantized(x, name, margin):
    """In NumPy: FP8 values and the scale that puts the largest magnitude 2^margin below the top."""
    x = np.asarray(x, "float32")
    scale = np.float32(reference.MAX[name] * 2.0**-margin) / np.max(np.abs(x))
    return reference.cast(x * scale, name), np.float32(scale)


def random(*shape):
    rng = np.random.default_rng()
    return (rng.normal(size=shape) * 10.0 ** rng.uniform(-3, 3)).astype("float32")


def network():
    first = keras.layers.Dense(16, "relu", name="first", dtype="mixed_bfloat16")
    return keras.Sequential([keras.Input((16,)), first, keras.layers.Dense(8, name="last", dtype="mixed_bfloat16")])


@pytest.mark.parametrize("margin", [0, 3])
def test_a_product_takes_its_scales_from_a_recipe_of_ones_own(margin):
    x, w = random(5, 16), random(16, 8)
    actual = compiled(lambda x, w: fp8.matmul(x, w, Headroom(margin=margin)))(*tensors(x, w))
    sides = quantized(x, "E4M3", margin), quantized(w, "E4M3", margin)
    reference.assert_close(actual, reference.product("ab,bc->ac", *sides))


def test_convert_keeps_the_arguments_of_a_recipe_of_ones_own():
    recipe = Headroom("E4M3", power_of_two=True, margin=3)
    assert str(recipe) == "Headroom(format='E4M3', power_of_two=True, margin=3)"
    model = fp8.convert(network(), recipe, select=lambda path, layer: True)
    assert [layer.recipe for layer in model.layers] == [recipe, recipe]
    again = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(recipe))
    assert again == recipe and type(again) is Headroom


@keras.saving.register_keras_serializable("test_own_recipe")
@dataclasses.dataclass(frozen=True, repr=False)
class Derived(fp8.CurrentScaling):
    """Has a field that is no argument."""

    margin: int = 1
    factor: float = dataclasses.field(init=False, default=0.0)

    def __post_init__(self):
        super().__post_init__()
        object.__setattr__(self, "factor", 2.0**-self.margin)


def test_a_field_that_is_no_argument_is_not_saved():
    recipe = Derived(margin=3)
    assert recipe.factor == 0.125 and str(recipe) == "Derived(margin=3)"
    again = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(recipe))
    assert again == recipe and again.factor == 0.125


def test_a_file_with_a_recipe_of_ones_own_is_loaded(tmp_path):
    model = fp8.convert(network(), Headroom(margin=2), select=lambda path, layer: True)
    x = random(8, 16)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert loaded.get_layer("first").recipe == Headroom(margin=2)
    np.testing.assert_array_equal(reference.to_numpy(loaded(x)), reference.to_numpy(model(x)))
