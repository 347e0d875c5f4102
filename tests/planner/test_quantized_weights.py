"""inspect of a step whose weights are quantized: which they are, and their bytes."""

import adapted_models
import keras
import numpy as np
import pytest
from keras import layers

import keras_mp
from keras_mp.planner.report.compile_table import memory_rows

pytestmark = pytest.mark.usefixtures("float32_policy")


def test_inspect_shows_quantized_weights_and_their_bytes():
    """Nine int4 columns take five bytes a row, and a zero point a group and a column is an int8 number."""
    model = keras.Sequential([keras.Input((32,)), layers.Dense(9)])
    adapted_models.adapt(model.layers[0], "int4", keras.quantizers.Int4QuantizationConfig(block_size=8))
    model.compile("adam", "mse")
    report = keras_mp.inspect(model, (np.ones((4, 32), "float32"), np.ones((4, 9), "float32")))
    packed = 32 * 5
    assert report.memory.integers["int4"] == packed and sum(report.memory.integers.values()) == packed + 4 * 9
    title = "of them in int4, two to a byte"
    assert (title, packed) in memory_rows(report) and title in str(report.details("memory"))
    assert report.precision == "float32"
