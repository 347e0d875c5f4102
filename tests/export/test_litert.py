"""LiteRT files in float32: run with LiteRT's interpreter, and compared with numpy and with the model in float32."""

import os
import warnings

import keras
import numpy as np
import pytest
import zoo
from exported import in_float32, in_int32, needs_tensorflow, only_tensorflow
from keras import layers

import keras_mp
from keras_mp.export.litert import unrolled
from keras_mp.export.litert_file import LiteRTFile
from keras_mp.export.verification import ExportError, relative_difference

pytestmark = needs_tensorflow


def run(path, batch):
    """The outputs by name, in LiteRT's interpreter."""
    import tensorflow as tf

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        interpreter = tf.lite.Interpreter(str(path))
    run = interpreter.get_signature_runner("serving_default")
    names = sorted(run.get_input_details())
    return run(**dict(zip(names, keras.tree.flatten(batch), strict=True)))


# A recurrent one has hundreds of operators when unrolled.
@pytest.mark.parametrize(
    "name", ["functional", *(pytest.param(name, marks=pytest.mark.slow) for name in ("recurrent",))]
)
def test_every_kind_of_model(name, tmp_path):
    model, batch = zoo.build(name, "mixed_float16")
    batch = in_int32(batch)
    report = keras_mp.export.export_litert(model, tmp_path / "out.tflite", verify=batch)
    assert report.low_precision == 0 and report.max_difference <= 1e-5 and report.operators
    assert report.bytes == (tmp_path / "out.tflite").stat().st_size and os.listdir(tmp_path) == ["out.tflite"]
    assert not report.float_operators
    for size in (1, 7):
        again = keras.tree.map_structure(lambda x, size=size: np.resize(x, (size, *x.shape[1:])), batch)
        outputs = run(report.path, again)
        assert relative_difference([outputs[key] for key in sorted(outputs)], in_float32(model, again)) <= 1e-5


def test_recurrent_layers_are_unrolled_and_compute_the_same():
    cells = layers.StackedRNNCells([layers.LSTMCell(2), layers.GRUCell(2)])
    both = layers.Bidirectional(layers.LSTM(2, return_sequences=True))
    model, batch = (
        keras.Sequential([keras.Input((3, 2)), both, layers.RNN(cells), layers.Dense(1)]),
        zoo.normal(2, 3, 2),
    )
    flat = unrolled(model)
    recurrent = [layer for layer in flat._flatten_layers() if isinstance(layer, layers.RNN)]
    assert len(recurrent) == 3 and all(layer.unroll for layer in recurrent)  # the bidirectional one has two
    assert relative_difference(flat(batch), model(batch)) <= 1e-6
    assert unrolled(flat) is flat and not model.layers[-2].unroll
    dense = keras.Sequential([keras.Input((2,)), layers.Dense(2)])
    assert unrolled(dense) is dense


@only_tensorflow
def test_recurrent_layers_without_a_number_of_steps(tmp_path):
    model = keras.Sequential([keras.Input((None, 3)), layers.LSTM(2, name="memory")])
    with pytest.raises(ExportError, match="recurrent layers of model .* cannot be unrolled.*fixed number of steps"):
        keras_mp.export.export_litert(model, tmp_path / "out.tflite")


@only_tensorflow
def test_an_operation_that_litert_lacks_is_named(tmp_path):
    inputs = keras.Input((4,))
    inverse = layers.Lambda(lambda x: keras.ops.erfinv(x), name="inverse")
    model = keras.Model(inputs, inverse(layers.Dense(4)(inputs)), name="m")
    with pytest.raises(ExportError, match="model 'm' was not exported.*in layer 'inverse'.*no operator for tf.Erfinv"):
        keras_mp.export.export_litert(model, tmp_path / "out.tflite")
    assert os.listdir(tmp_path) == []


@only_tensorflow
def test_the_scan_finds_low_precision():
    import tensorflow as tf

    kernel = tf.constant(zoo.normal(64, 64))
    function = tf.function(lambda x: x @ kernel).get_concrete_function(tf.TensorSpec((1, 64), tf.float32))

    def file(**settings):
        converter = tf.lite.TFLiteConverter.from_concrete_functions([function])
        if settings:
            converter.optimizations = [tf.lite.Optimize.DEFAULT]
            converter.target_spec.supported_types = settings["types"]
        return LiteRTFile(converter.convert())

    plain, half, dynamic = file(), file(types=[tf.float16]), file(types=[])
    assert plain.low_precision() == []
    assert any("FLOAT16" in place for place in half.low_precision())
    assert any("FLOAT16" in place for place in half.low_precision(quantized=True))
    assert any("INT8" in place for place in dynamic.low_precision()) and dynamic.low_precision(quantized=True) == []
