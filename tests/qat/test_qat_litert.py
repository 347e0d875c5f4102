"""Training with the numbers of LiteRT's int8, and the file that has them."""

import warnings

import keras
import numpy as np
import pytest
import zoo
from keras import layers

import keras_mp
from keras_mp.export.litert_file import LiteRTFile
from keras_mp.export.verification import ExportError
from keras_mp.qat.litert_ranges import LITERT, plan, rescalable, round_weights
from keras_mp.rebuild.walk import treatments_of

TENSORFLOW = keras.backend.backend() == "tensorflow"
only_tensorflow = pytest.mark.skipif(not TENSORFLOW, reason="TensorFlow writes files; JAX goes its export's way")


def cnn(blocks=2):
    """Batch normalization, residuals, depthwise convolutions."""
    inputs = keras.Input((12, 12, 3), name="x")
    x = layers.Conv2D(8, 3, padding="same", use_bias=False, name="stem")(inputs)
    x = layers.ReLU(name="stem_relu")(layers.BatchNormalization(name="stem_norm")(x))
    for _ in range(blocks):
        y = layers.DepthwiseConv2D(3, padding="same", use_bias=False)(x)
        y = layers.ReLU(6.0)(layers.BatchNormalization()(y))
        y = layers.BatchNormalization()(layers.Conv2D(8, 1, use_bias=False)(y))
        x = keras.ops.relu(x + y)
    x = layers.GlobalAveragePooling2D(name="pool")(layers.MaxPooling2D()(x))
    return keras.Model(inputs, layers.Dense(5, name="head")(x))


def trained(model, quantize="qat_litert", epochs=3, optimizer="adam"):
    shape = model.inputs[0].shape[1:]
    x, y = zoo.normal(128, *shape), np.random.default_rng().integers(0, 5, 128)
    keras_mp.convert(model, quantize)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"])
    model.fit(x, y, batch_size=32, epochs=epochs, verbose=0)
    return model, x, y


def output(model, x):
    return keras.ops.convert_to_numpy(model(x, training=False)).astype("float64")


@pytest.mark.jax
def test_weights_are_rounded_as_float64_does():
    for shape, channels in (((3, 3, 4, 6), (-1,)), ((3, 3, 4, 2), (-2, -1)), ((2, 5, 4), (-2,)), ((7, 9), (-1,))):
        w = zoo.normal(*shape) * np.random.default_rng().uniform(1e-3, 10, shape[-1]).astype("float32")
        w.reshape(-1, shape[-1])[:, 0] = 0
        axes = tuple(axis for axis in range(w.ndim) if axis - w.ndim not in channels)
        scale = np.abs(w.astype("float64")).max(axis=axes, keepdims=True) / 127
        codes = np.divide(w, scale, out=np.zeros(w.shape), where=scale > 0)
        near = np.abs(np.abs(codes % 1) - 0.5) < 1e-3  # where float32 may round to the other side
        rounded = keras.ops.convert_to_numpy(round_weights(w, channels)).astype("float64")
        error = np.abs(rounded - np.round(codes) * scale)
        assert (error <= 1e-6 * scale * 127 + near * scale * 1.01).all()
        again = keras.ops.convert_to_numpy(round_weights(rounded, channels))
        np.testing.assert_allclose(again, rounded, rtol=1e-6)


@pytest.mark.jax
def test_a_dense_layer_is_that_of_float64():
    """Codes of inputs, weights and outputs by hand; the ranges are those of the first batch."""
    model = keras.Sequential([keras.Input((6,)), layers.Dense(4, "relu")])
    keras_mp.convert(model, "qat_litert")
    x = zoo.normal(16, 6)
    model(x, training=True)
    w, b = (keras.ops.convert_to_numpy(v).astype("float64") for v in model.layers[0].weights)

    def rounded(values):
        low, high = min(values.min(), 0), max(values.max(), 0)
        scale = (high - low) / 255
        zero = np.round(-low / scale)
        return (np.clip(np.round(values / scale) + zero, 0, 255) - zero) * scale

    scale = np.abs(w).max(axis=0) / 127
    raw = np.maximum(rounded(x.astype("float64")) @ (np.round(w / scale) * scale) + b, 0)
    step = (raw.max() - 0) / 255
    assert np.mean(np.abs(output(model, x) - rounded(raw)) < step / 100) > 0.95
    assert np.abs(output(model, x) - rounded(raw)).max() < 1.01 * step


def test_what_is_one_operator_is_rounded_once():
    model = cnn(1)
    planned = plan(model, {"bits": 8, "inputs": True})
    places = {step.node.operation.name: step.after for step in planned.steps}
    assert places["stem"] == places["stem_norm"] == [None] and places["stem_relu"] == [1]
    # Inputs, stem, depthwise, pointwise with its normalization, the sum with its relu, the mean, the head.
    assert len(planned.names) == 7
    tanh = keras.Sequential([keras.Input((4,)), layers.Dense(3, "tanh"), layers.Dropout(0.1), layers.Softmax()])
    steps = plan(tanh._functional, {"bits": 8, "inputs": True}).steps
    assert (steps[0].before, steps[0].after) == (1, [(-1.0, 127 / 128)])
    assert steps[1].after == [None] and steps[2].after == [(0.0, 255 / 256)]


@pytest.mark.jax
def test_what_is_concatenated_has_one_range():
    x = keras.Input((4,), name="x")
    parts = [layers.Dense(3, "relu", name="a")(x), layers.Dense(3, "sigmoid", name="b")(x), x]
    model = keras.Model(x, layers.Concatenate(name="c")([layers.Flatten()(parts[0]), *parts[1:]]))
    keras_mp.convert(model, "qat_litert")
    planned = plan(model, treatments_of(model)[LITERT])
    places = {step.node.operation.name: step.after for step in planned.steps}
    assert planned.inputs == places["a"] == places["c"] == [0] and planned.names == ["x", "b"]  # b's before its sigmoid
    assert places["b"] == [(0.0, 255 / 256)] and planned.finest == {0: 1 / 256}
    batch = zoo.normal(16, 4)
    values = keras.ops.convert_to_numpy(keras.Model(x, parts[0])(batch))
    model(batch, training=True)
    low, high = keras.ops.convert_to_numpy(model.litert_ranges)[0]
    np.testing.assert_allclose([low, high], [batch.min(), max(batch.max(), values.max())], rtol=0.05)


def test_a_fixed_range_is_rescaled_by_a_whole_number_of_256ths():
    generator = np.random.default_rng()
    lows, highs = -generator.uniform(0, 4, 50).astype("float32"), generator.uniform(0.1, 20, 50).astype("float32")
    for fixed in (1 / 256, 1 / 128):
        wide = [keras.ops.convert_to_numpy(ends).astype("float64") for ends in rescalable(lows, highs, fixed)]
        scale = (wide[1] - wide[0]) / 255
        for whole in (256 * fixed / scale, wide[0] / scale):
            np.testing.assert_allclose(whole, np.round(whole), atol=1e-3)
        assert (wide[0] <= lows + 0.501 * scale).all() and (highs <= wide[1] + 1e-3 * scale).all()
        assert (scale < (highs - lows) / 254 * (1 + scale / fixed / 128)).all()


@pytest.mark.jax
def test_train_save_load_and_revert(tmp_path):
    keras.config.set_dtype_policy("mixed_bfloat16")
    model, x, _ = trained(cnn(1))
    assert model.litert_ranges.shape == (7, 2) and np.ptp(model.litert_ranges, axis=1).min() > 0
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(output(loaded, x), output(model, x))
    before = [keras.ops.convert_to_numpy(v) for v in model.trainable_variables]
    loaded.fit(x, np.zeros(128, int), verbose=0)
    assert np.abs(np.subtract(loaded.litert_ranges, model.litert_ranges)).max() > 0
    plain = keras_mp.revert(model, "convert")
    assert type(plain) is type(cnn(1)) and not treatments_of(plain) and len(plain.weights) == len(cnn(1).weights)
    for old, variable in zip(before, plain.trainable_variables, strict=True):
        np.testing.assert_array_equal(old, variable)


@only_tensorflow
def test_the_file_computes_what_was_trained(tmp_path):
    """In units of the last code, run by LiteRT's interpreter; int8 goes in and comes out."""
    model, x, y = trained(cnn())
    verify = zoo.normal(400, 12, 12, 3)
    path = tmp_path / "out.tflite"
    report = keras_mp.export.export_litert(model, path, verify, integer_io=True, evaluate=(x, y))
    file = LiteRTFile(path.read_bytes())
    (scale,) = file.output_scales(["output_0"])
    codes = np.abs(file.runner(["output_0"])({"x": verify})[0] - output(model, verify)) / scale
    assert np.mean(codes < 1.001) >= 0.999 and report.within_one_code == pytest.approx(np.mean(codes < 1.001), abs=1e-3)
    assert not report.float_operators and not {"QUANTIZE", "DEQUANTIZE"} & report.operators.keys()
    assert report.operators["CONV_2D"] == 3 and "MUL" not in report.operators  # batch normalization is folded
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = file._interpreter().get_signature_runner("serving_default")
    assert run.get_input_details()["x"]["dtype"] == run.get_output_details()["output_0"]["dtype"] == np.int8
    # The scale of the input is that which was trained.
    low, high = keras.ops.convert_to_numpy(model.litert_ranges)[0]
    assert run.get_input_details()["x"]["quantization"][0] == pytest.approx((high - low) / 255, rel=1e-5)
    assert report.model_scores["loss"] == pytest.approx(report.file_scores["loss"], abs=0.05)
    assert report.file_scores["loss"] == pytest.approx(model.evaluate(x, y, verbose=0)[0], abs=0.05)
    assert "Training set the ranges." in str(report) and "within one code" in str(report)


KINDS = ("separable, pooled", "transposed", "nested", "concatenated", "with a sigmoid", "one dimension, mixed_float16")


def kinds(name):
    """Layers whose operators LiteRT has in int8, each once."""
    inputs = keras.Input((12, 12, 3), name="x")
    if name == "separable, pooled":
        x = layers.SeparableConv2D(8, 3, padding="same", activation="relu")(inputs)
        x = layers.AveragePooling2D(2)(x)
    elif name == "transposed":
        x = layers.Conv2DTranspose(4, 3, 2, padding="same", use_bias=False)(inputs)
        x = layers.ReLU()(layers.BatchNormalization()(x))
        x = layers.Conv2D(4, 1, activation="relu")(x)
    elif name == "concatenated":
        wide = keras.initializers.RandomNormal(stddev=0.7)
        narrow = layers.Conv2D(4, 3, padding="same", activation="silu")(inputs)
        parts = [narrow, layers.Dropout(0.1)(layers.Conv2D(4, 3, padding="same", kernel_initializer=wide)(inputs))]
        x = layers.Conv2D(4, 1, activation="relu")(layers.Concatenate()([*parts, inputs]))
        x = layers.Maximum()([x, layers.Conv2D(4, 1)(x)])
    elif name == "with a sigmoid":
        parts = [layers.Conv2D(4, 3, activation=activation)(inputs) for activation in ("sigmoid", "tanh", "linear")]
        x = layers.Conv2D(4, 1, activation="relu")(layers.Concatenate()(parts))
    elif name == "one dimension, mixed_float16":
        x = layers.Conv1D(6, 3, activation="relu")(layers.Reshape((48, 9))(inputs))
        x = layers.BatchNormalization()(layers.DepthwiseConv1D(3, use_bias=False)(x))
        x = layers.Reshape((4, 11, 6))(x)
    else:
        inner = keras.Sequential([keras.Input((12, 12, 3)), layers.Conv2D(4, 3, activation="silu"), layers.ReLU()])
        x = inner(inputs)
    return keras.Model(inputs, layers.Dense(5)(layers.GlobalAveragePooling2D()(x)))


@only_tensorflow
@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_layer(name, tmp_path):
    keras.config.set_dtype_policy("mixed_float16" if "float16" in name else "float32")
    model, _, _ = trained(kinds(name))
    report = keras_mp.export.export_litert(model, tmp_path / "out.tflite", zoo.normal(400, 12, 12, 3))
    assert report.within_one_code >= 0.995 and not report.float_operators


@only_tensorflow
@pytest.mark.slow
def test_16_bits(tmp_path):
    model, _, _ = trained(cnn(), "qat_litert_int16x8")
    verify = zoo.normal(100, 12, 12, 3)
    report = keras_mp.export.export_litert(model, tmp_path / "out.tflite", verify, integer_io=True)
    file = LiteRTFile((tmp_path / "out.tflite").read_bytes())
    difference = file.runner(["output_0"])({"x": verify})[0] - output(model, verify)
    # LiteRT multiplies sums of int16 by numbers of 16 bits.
    assert np.abs(difference).max() < 16 * file.output_scales(["output_0"])[0]
    assert report.format == "LiteRT int16x8" and not report.float_operators and report.max_difference < 1e-3


@only_tensorflow
def test_refused(tmp_path):
    model = keras.Sequential([keras.Input((4,), name="x"), layers.Dense(2, name="last")], name="m")
    with pytest.raises(ValueError, match="select is not for LiteRT"):
        keras_mp.convert(model, "qat_litert", lambda path, layer: True)
    keras_mp.convert(model, "qat_litert")
    assert treatments_of(model)[LITERT] == {"bits": 8, "inputs": True}
    with pytest.raises(ExportError, match="no range yet for the output of x, last: train it for some steps"):
        keras_mp.export.export_litert(model, tmp_path / "out.tflite")
    with pytest.raises(ExportError, match="was trained for quantize='int8', with ranges of its own"):
        keras_mp.export.export_litert(model, tmp_path / "out.tflite", calibrate=zoo.normal(9, 4))
    with pytest.raises(ExportError, match="evaluate needs the loss of model 'm': compile it"):
        keras_mp.export.export_litert(model, tmp_path / "out.tflite", evaluate=(zoo.normal(9, 4), np.zeros(9)))

    class Own(keras.Model):
        def call(self, inputs):
            return inputs

    own = Own(name="own")
    own.build((None, 4))
    with pytest.raises(ValueError, match="must be functional or sequential, so that it is known what reads what"):
        keras_mp.convert(own, "qat_litert")
