"""inspect of a step whose weights are quantized: which they are, and their bytes."""

import adapted_models
import keras
import numpy as np
import pytest
from keras import layers

import keras_mp
from keras_mp.xla.compile_table import memory_rows

pytestmark = pytest.mark.usefixtures("float32_policy")


@pytest.mark.parametrize(
    ("mode", "size"), [("int4", 32 * 5 + 4 * 9), pytest.param("int8", 32 * 9, marks=pytest.mark.ci)]
)
def test_inspect_shows_quantized_weights_and_their_bytes(mode, size):
    """Nine int4 columns take five bytes a row, and a zero point a group and a column is an int8 number."""
    model = keras.Sequential([keras.Input((32,)), layers.Dense(9)])
    config = keras.quantizers.Int4QuantizationConfig(block_size=8) if mode == "int4" else None
    adapted_models.adapt(model.layers[0], mode, config)
    model.compile("adam", "mse")
    report = keras_mp.inspect(model, (np.ones((4, 32), "float32"), np.ones((4, 9), "float32")))
    assert sum(report.memory.integers.values()) == size
    packed = 32 * 5 if mode == "int4" else 32 * 9
    assert report.memory.integers[mode] == packed
    title = "of them in int4, two to a byte" if mode == "int4" else "of them in int8"
    assert (title, packed) in memory_rows(report) and title in str(report)
    assert report.precision == "float32"
