"""LiteRT files in int8: their ranges, what stays in float32, and what is left of each layer."""

import os

import keras
import numpy as np
import pytest
import zoo
from exported import in_float32, needs_tensorflow, only_tensorflow
from keras import layers

import keras_mp
from keras_mp.export.litert_file import LiteRTFile
from keras_mp.export.verification import ExportError
from keras_mp.system.packages import installed

TENSORFLOW_VERSION = tuple(map(int, installed(["tensorflow"]).get("tensorflow", "0.0").split(".")[:2]))
pytestmark = needs_tensorflow


def export(model, path, data, **options):
    return keras_mp.export.export_litert(model, path, calibrate=data, **options)


def sqnr(actual, expected):
    expected = keras.ops.convert_to_numpy(expected).astype("float64")
    return 10 * np.log10(np.sum(expected**2) / np.sum((actual - expected) ** 2))


@pytest.mark.jax
def test_the_ranges_are_those_of_all_records_in_inference(tmp_path):
    """One record of 300 is far out; dropout and the statistics of batches move nothing."""
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1), name="x"),
            layers.Conv2D(8, 3, dtype="mixed_bfloat16"),
            layers.BatchNormalization(moving_mean_initializer=keras.initializers.Constant(0.3)),
            layers.ReLU(),
            layers.Dropout(0.5),
            layers.Flatten(),
            layers.Dense(4),
        ]
    )
    x = zoo.normal(300, 8, 8, 1)
    x[177] *= 5
    report = export(model, tmp_path / "out.tflite", x, verify=x[:20])
    assert report.calibrated_on == 300 and os.listdir(tmp_path) == ["out.tflite"]
    expected = keras.ops.convert_to_numpy(*in_float32(model, x))
    file = LiteRTFile((tmp_path / "out.tflite").read_bytes())
    assert file.output_scales(["output_0"]) == [pytest.approx(np.ptp(expected) / 255, rel=1e-3)]
    assert sqnr(file.runner(["output_0"])({"x": x})[0], expected) > 20
    assert not report.float_operators and report.low_precision == 0
    assert 1e-4 < report.max_difference < 0.2
    text = str(report)
    assert "0 operators stay in float32" in text and "300 records set the ranges" in text


@only_tensorflow
def test_weights_and_activations_are_int8_and_inputs_and_outputs_float32(tmp_path):
    model, batch = zoo.build("dict_of_inputs", "mixed_float16")
    data = {"a": zoo.normal(50, 4), "b": zoo.normal(50, 6)}
    export(model, tmp_path / "out.tflite", data, verify=batch)
    file = LiteRTFile((tmp_path / "out.tflite").read_bytes())
    tensors, operators = file.graphs[0]
    floats = [tensor.name for tensor in tensors if tensor.type == "FLOAT32"]
    assert len(floats) == 4  # two inputs and two outputs
    products = [operator for operator in operators if operator.kind == "FULLY_CONNECTED"]
    assert len(products) == 3
    for product in products:
        x, kernel, bias = (tensors[place] for place in product.inputs)
        assert (x.type, kernel.type, bias.type) == ("INT8", "INT8", "INT32")


@only_tensorflow
@pytest.mark.skipif(TENSORFLOW_VERSION < (2, 21), reason="TensorFlow 2.20's XNNPACK takes it for what it is")
def test_xnnpack_takes_a_zero_point_for_zero(tmp_path):
    """Why BATCH_MATMUL stays in float32; when this fails, it need not any more."""
    import tensorflow as tf

    rng = np.random.default_rng()
    a, b = rng.uniform(-1, 1, (64, 4, 6, 8)).astype("float32"), rng.uniform(0, 2, (64, 4, 8, 6)).astype("float32")
    module = tf.Module()
    module.product = tf.function(lambda a, b: {"y": tf.matmul(a, b)}, autograph=False)
    specs = {"a": tf.TensorSpec((None, 4, 6, 8), name="a"), "b": tf.TensorSpec((None, 4, 8, 6), name="b")}
    tf.saved_model.save(module, str(tmp_path), signatures=module.product.get_concrete_function(**specs))
    converter = tf.lite.TFLiteConverter.from_saved_model(str(tmp_path), signature_keys=["serving_default"])
    converter.optimizations = [tf.lite.Optimize.DEFAULT]
    converter.representative_dataset = lambda: ({"a": a[i : i + 1], "b": b[i : i + 1]} for i in range(64))
    content = converter.convert()
    exact, kinds = a.astype("float64") @ b, tf.lite.experimental.OpResolverType

    def error(kernels):
        interpreter = tf.lite.Interpreter(model_content=content, experimental_op_resolver_type=kernels)
        outputs = interpreter.get_signature_runner("serving_default")(a=a, b=b)["y"]
        return np.abs(outputs - exact).max() / np.abs(exact).max()

    assert error(kinds.BUILTIN_WITHOUT_DEFAULT_DELEGATES) < 0.05
    assert error(kinds.AUTO) > 0.2


@only_tensorflow
@pytest.mark.parametrize("causal", [True, pytest.param(False, marks=pytest.mark.rare)])
@pytest.mark.slow
def test_attention_masked_or_not(causal, tmp_path):
    """Its two products stay in float32, and with a mask what is between, too."""
    inputs = keras.Input((10,), dtype="int32", name="tokens")
    keras.config.set_dtype_policy("mixed_bfloat16")
    x = layers.Embedding(50, 16, embeddings_initializer=keras.initializers.RandomNormal(stddev=1.0))(inputs)
    x = x + layers.MultiHeadAttention(2, 8, name="attention")(x, x, use_causal_mask=causal)
    x = layers.LayerNormalization()(x + layers.Dense(16, "gelu")(layers.LayerNormalization()(x)))
    model = keras.Model(inputs, layers.Dense(2, dtype="float32", name="last")(layers.GlobalAveragePooling1D()(x)))
    data = np.random.default_rng().integers(0, 50, (200, 10)).astype("int32")
    report = export(model, tmp_path / "out.tflite", data, verify=data[:20])
    assert report.float_operators["BATCH_MATMUL"] == 2 and ("SOFTMAX" in report.float_operators) == causal
    assert "FULLY_CONNECTED" not in report.float_operators
    served = LiteRTFile(report.path.read_bytes()).runner(["output_0"])({"tokens": data})
    assert sqnr(served[0], *in_float32(model, data)) > 15 and report.max_difference < 0.2


@only_tensorflow
@pytest.mark.parametrize(
    "data, message",
    [
        (np.full((3, 4), np.inf, "float32"), "calibrate holds NaN or infinity for input 'x'"),
        (np.ones((3, 5), "float32"), r"calibrate has the shape \(3, 5\) for input 'x', which takes \(None, 4\)"),
        (np.ones((0, 4), "float32"), "calibrate must hold as many records, 1 or more"),
        ({"x": np.ones((3, 4)), "y": np.ones(3)}, "calibrate must have the structure of the model's inputs"),
    ],
)
def test_calibration_data_that_does_not_fit(data, message, tmp_path):
    model = keras.Sequential([keras.Input((4,), name="x"), layers.Dense(2)])
    with pytest.raises(ExportError, match=message):
        export(model, tmp_path / "out.tflite", data)
    assert os.listdir(tmp_path) == []


def cnn():
    inputs = keras.Input((8, 8, 3), name="x")
    x = layers.Conv2D(8, 3, padding="same", use_bias=False)(inputs)
    x = layers.ReLU()(layers.BatchNormalization()(x))
    x = layers.ReLU()(x + layers.DepthwiseConv2D(3, padding="same")(x))
    x = layers.GlobalAveragePooling2D()(x)
    return keras.Model(inputs, layers.Dense(4, name="last")(x))


@only_tensorflow
@pytest.mark.parametrize("quantize, least", [("int8", 20), pytest.param("int16x8", 35, marks=pytest.mark.slow)])
def test_integer_inputs_and_outputs(quantize, least, tmp_path):
    """The file's own codes, by its scales, are the model's outputs; SQNR against float32, limited by the weights."""
    import tensorflow as tf

    model, x = cnn(), zoo.normal(200, 8, 8, 3)
    report = export(model, tmp_path / "out.tflite", x, quantize=quantize, integer_io=True, verify=x[:20])
    interpreter = tf.lite.Interpreter(str(report.path))
    run = interpreter.get_signature_runner("serving_default")
    (taken,), (given,) = run.get_input_details().values(), run.get_output_details().values()
    dtype = np.dtype(quantize[:-2] if quantize == "int16x8" else quantize)
    assert taken["dtype"] == given["dtype"] == dtype and not report.float_operators and not report.notes
    assert not {"QUANTIZE", "DEQUANTIZE"} & report.operators.keys()
    scale, zero = taken["quantization"]
    codes = np.clip(np.round(x / scale) + zero, *(getattr(np.iinfo(dtype), end) for end in ("min", "max")))
    scale, zero = given["quantization"]
    served = (run(x=codes.astype(dtype))["output_0"].astype("float64") - zero) * scale
    assert sqnr(served, model(x)) > least
    assert report.format == f"LiteRT {quantize}" and "200 records set the ranges" in " ".join(str(report).split())


@only_tensorflow
def test_16_bits_cannot_hold_an_attention_mask_beside_its_scores(tmp_path):
    inputs = keras.Input((5, 4), name="x")
    model = keras.Model(inputs, layers.MultiHeadAttention(1, 4)(inputs, inputs, use_causal_mask=True))
    with pytest.raises(ExportError, match="values of 1e.06 and above, such as an attention mask has.*'int8' can"):
        export(model, tmp_path / "out.tflite", zoo.normal(9, 5, 4), quantize="int16x8")
    assert os.listdir(tmp_path) == []


@only_tensorflow
def test_what_quantize_needs(tmp_path):
    model = keras.Sequential([keras.Input((4,), name="x"), layers.Dense(2)])
    with pytest.raises(ValueError, match="quantize='int4' must be one of"):
        export(model, tmp_path / "out.tflite", None, quantize="int4")
    with pytest.raises(ValueError, match="integer_io=True is for a quantized file"):
        export(model, tmp_path / "out.tflite", None, integer_io=True)
    with pytest.raises(ExportError, match="quantize='int8' needs calibrate, hundreds of inputs"):
        export(model, tmp_path / "out.tflite", None, quantize="int8")
