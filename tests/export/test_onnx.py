"""ONNX files: run with onnxruntime, and compared with numpy and with the model in float32."""

import importlib.util
import math
import os
import re

import keras
import numpy as np
import pytest
import zoo
from exported import in_float32, in_int32, only_tensorflow
from keras import layers

import keras_mp
from keras_mp.export.verification import ExportError, relative_difference
from keras_mp.system.packages import install_command

pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("tensorflow", "tf2onnx", "onnxruntime")),
    reason='an ONNX file is made by TensorFlow, tf2onnx and onnxruntime: pip install "keras-mp[export]"',
)


def run(path, batch):
    """The outputs by name, in onnxruntime."""
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path))
    flat = keras.tree.flatten(batch)
    feed = dict(zip([tensor.name for tensor in session.get_inputs()], flat, strict=True))
    return dict(zip([tensor.name for tensor in session.get_outputs()], session.run(None, feed), strict=True))


def test_the_numbers_are_those_of_float32_in_batches_of_any_size(tmp_path):
    model, batch = zoo.build("functional", "mixed_float16")
    batch = in_int32(batch)
    report = keras_mp.export.export_onnx(model, tmp_path / "out.onnx", verify=batch)
    assert report.low_precision == 0 and report.max_difference <= 1e-5 and report.operators
    assert report.bytes == (tmp_path / "out.onnx").stat().st_size and os.listdir(tmp_path) == ["out.onnx"]
    for size in (1, 7):
        again = keras.tree.map_structure(lambda x, size=size: np.resize(x, (size, *x.shape[1:])), batch)
        outputs = run(report.path, again)
        expected = in_float32(model, again)
        assert relative_difference([outputs[key] for key in sorted(outputs)], expected) <= 1e-5


@only_tensorflow
@pytest.mark.slow
def test_recurrent_layers_of_any_number_of_steps(tmp_path):
    keras.config.set_dtype_policy("mixed_float16")
    inputs = keras.Input((None, 3), name="steps")
    model = keras.Model(inputs, layers.GRU(4)(layers.LSTM(5, return_sequences=True)(inputs)))
    batch = zoo.normal(2, 6, 3)
    report = keras_mp.export.export_onnx(model, tmp_path / "out.onnx", verify=batch)
    longer = zoo.normal(3, 9, 3)
    expected = in_float32(model, longer)
    assert relative_difference([run(report.path, longer)["output_0"]], expected) <= 1e-5


@only_tensorflow
@pytest.mark.slow
def test_jitted_functions_are_inlined(tmp_path):
    """The kit's own attention has one, which tf2onnx would leave a call."""
    from models.text_classifier import text_classifier
    from models.transformer import Size

    keras.config.set_dtype_policy("mixed_bfloat16")
    model = text_classifier(Size(1, 16, 2), vocabulary=50, length=8)
    batch = np.random.default_rng().integers(0, 50, (4, 8)).astype("int32")
    report = keras_mp.export.export_onnx(model, tmp_path / "out.onnx", verify=batch)
    assert report.max_difference <= 1e-5


@only_tensorflow
def test_exact_gelu(tmp_path):
    """tf2onnx alone leaves an Erfc there, which onnxruntime refuses."""
    model = keras.Sequential([keras.Input((9,)), layers.Activation("gelu", dtype="mixed_float16")])
    x = np.array([[0.0, 1e-3, -1e-3, 1.0, -1.0, 5.0, -5.0, 60.0, -60.0]], "float32")
    keras_mp.export.export_onnx(model, tmp_path / "out.onnx")
    expected = [value / 2 * math.erfc(-value / math.sqrt(2)) for value in x[0].tolist()]
    np.testing.assert_allclose(run(tmp_path / "out.onnx", x)["output_0"][0], expected, rtol=1e-6, atol=2e-7)


@only_tensorflow
def test_names_of_inputs_and_outputs_and_the_unknown_batch_size(tmp_path):
    import onnx

    model, _ = zoo.build("dict_of_inputs", "mixed_bfloat16")
    keras_mp.export.export_onnx(model, tmp_path / "out.onnx")
    graph = onnx.load(tmp_path / "out.onnx").graph
    onnx.checker.check_model(str(tmp_path / "out.onnx"), full_check=True)
    shapes = {
        value.name: [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]
        for value in [*graph.input, *graph.output]
    }
    assert shapes == {"a": ["batch", 4], "b": ["batch", 6], "x": ["batch", 8], "y": ["batch", 2]}


@only_tensorflow
@pytest.mark.parametrize("value, dtype", [(math.nan, "int32"), (math.inf, "float32"), (1e39, "float32")])
def test_a_batch_that_is_not_finite_in_the_signatures_dtype_is_refused(value, dtype):
    import tensorflow as tf

    from keras_mp.export.deployment import Signature

    signature = Signature(tf.TensorSpec((None, 1), dtype, name="x"), ["x"], [])
    np.testing.assert_array_equal(signature.feed(np.array([[2.0]]))["x"], [[2]])
    with pytest.raises(ExportError, match=f"holds NaN or infinity for input 'x', in {dtype}"):
        signature.feed(np.array([[value]]))


@only_tensorflow
@pytest.mark.parametrize("named", [False, True])
def test_more_than_ten_outputs_keep_their_order_and_their_names(named, tmp_path):
    inputs = keras.Input((2,), name="x")
    outputs = [layers.Rescaling(float(factor))(inputs) for factor in range(12)]
    model = keras.Model(
        inputs, {f"output_{place}": output for place, output in enumerate(outputs)} if named else outputs
    )
    report = keras_mp.export.export_onnx(model, tmp_path / "out.onnx", verify=np.ones((3, 2), "float32"))
    served = run(report.path, np.ones((1, 2), "float32"))
    assert [served[f"output_{place}"][0, 0] for place in range(12)] == list(range(12))


@only_tensorflow
def test_an_operation_that_onnx_lacks_is_named(tmp_path):
    inputs = keras.Input((4,))
    model = keras.Model(inputs, layers.Lambda(lambda x: keras.ops.erfinv(x), name="inverse")(inputs), name="m")
    with pytest.raises(
        ExportError, match="model 'm' was not exported: ONNX has no operator for Erfinv in node '.*inver"
    ):
        keras_mp.export.export_onnx(model, tmp_path / "out.onnx")
    assert os.listdir(tmp_path) == []


def test_the_scan_finds_low_precision():
    import onnx
    from onnx import TensorProto, helper

    from keras_mp.export.onnx import onnx_low_precision

    def model(nodes, initializers=()):
        value = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 2])
        result = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 2])
        graph = helper.make_graph(nodes, "g", [value], [result], list(initializers))
        made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)])
        onnx.checker.check_model(made)
        return made

    assert onnx_low_precision(model([helper.make_node("Relu", ["x"], ["y"])])) == []
    for name, kind in (("FLOAT16", TensorProto.FLOAT16), ("FLOAT8E4M3FN", TensorProto.FLOAT8E4M3FN)):
        casts = [
            helper.make_node("Cast", ["x"], ["low"], name="down", to=kind),
            helper.make_node("Cast", ["low"], ["y"], name="up", to=TensorProto.FLOAT),
        ]
        places = onnx_low_precision(model(casts))
        assert any(name in place and "down" in place for place in places), places
        assert f"{name} in low" in places  # the tensor's type, which only inference tells
    constant = helper.make_tensor("c", TensorProto.BFLOAT16, [2], [1.0, 2.0])
    nodes = [
        helper.make_node("Cast", ["c"], ["wide"], to=TensorProto.FLOAT),
        helper.make_node("Add", ["x", "wide"], "y"),
    ]
    assert "BFLOAT16 in c" in onnx_low_precision(model(nodes, [constant]))
    # Inside a branch.
    inner = helper.make_graph(casts[:1] + [helper.make_node("Cast", ["low"], ["z"], to=TensorProto.FLOAT)], "b", [], [
        helper.make_tensor_value_info("z", TensorProto.FLOAT, ["batch", 2])])  # fmt: skip
    plain = helper.make_graph([helper.make_node("Identity", ["x"], ["w"])], "e", [], [
        helper.make_tensor_value_info("w", TensorProto.FLOAT, ["batch", 2])])  # fmt: skip
    true = helper.make_tensor("t", TensorProto.BOOL, [], [True])
    branch = helper.make_node("If", ["t"], ["y"], then_branch=inner, else_branch=plain)
    assert any("down" in place for place in onnx_low_precision(model([branch], [true])))


def test_what_is_not_installed_is_named(tmp_path, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if "onnx" in name else find(name))
    command = re.escape(install_command("export"))
    with pytest.raises(ImportError, match=f"tf2onnx, onnx, onnxruntime not installed.*{command}"):
        keras_mp.export.export_onnx(keras.Sequential([keras.Input((4,)), layers.Dense(2)]), tmp_path / "out.onnx")
    assert os.listdir(tmp_path) == []


@only_tensorflow
def test_a_file_too_large_for_the_format_is_refused_first(tmp_path, monkeypatch):
    monkeypatch.setattr("keras_mp.export.deployment.LARGEST_FILE", 100)
    model = keras.Sequential([keras.Input((4,)), layers.Dense(10)])
    with pytest.raises(ExportError, match="take 200 bytes, and one file holds at most 100: use export_float32"):
        keras_mp.export.export_onnx(model, tmp_path / "out.onnx")


@only_tensorflow
def test_a_result_that_differs_is_refused(tmp_path, monkeypatch):
    """The comparison can fail: a file with another weight does not come through."""
    import onnx

    from keras_mp.export import onnx as module

    converted = module._converted

    def other(*arguments):
        proto = converted(*arguments)
        weights = onnx.numpy_helper.to_array(proto.graph.initializer[0])
        proto.graph.initializer[0].CopyFrom(
            onnx.numpy_helper.from_array(weights + np.float32(1e-3), proto.graph.initializer[0].name)
        )
        return proto

    monkeypatch.setattr(module, "_converted", other)
    model = keras.Sequential([keras.Input((4,)), layers.Dense(3)])
    with pytest.raises(ExportError, match="the ONNX file of model .* differs from the model run in float32 by"):
        keras_mp.export.export_onnx(model, tmp_path / "out.onnx", verify=np.ones((2, 4), "float32"))
    assert os.listdir(tmp_path) == []
