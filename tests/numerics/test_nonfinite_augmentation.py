"""find_nonfinite of bfloat16 models that move the pixels of their images, for which TensorFlow has no gradient."""

import keras
import numpy as np
from keras import layers

from keras_mp.numerics import find_nonfinite


def test_a_model_that_moves_pixels_is_looked_into():
    keras.config.set_dtype_policy("mixed_bfloat16")
    inputs = keras.Input((8, 8, 3))
    moved = layers.RandomPerspective(1.0)(layers.RandomTranslation(0.2, 0.2)(inputs))
    hidden = layers.Dense(3, name="spoiled")(layers.Flatten()(moved))
    model = keras.Model(inputs, layers.Dense(1, dtype="float32")(hidden))
    model.compile("sgd", "mse")
    batch = np.random.default_rng().random((4, 8, 8, 3)).astype("float32"), np.zeros((4, 1))
    assert find_nonfinite(model, batch) is None
    kernel = model.get_layer("spoiled").kernel
    values = keras.ops.convert_to_numpy(kernel).copy()
    values[0, 0] = np.nan
    kernel.assign(values)
    found = find_nonfinite(model, batch)
    assert found.path.endswith("spoiled") and found.tensor == "weight kernel"
