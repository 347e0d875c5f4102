"""Writes an ONNX file in float32, and proves it."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np

from keras_mp.export.deployment import Signature, check, compared, counted, float32_saved_model
from keras_mp.export.export_report import DeploymentReport
from keras_mp.export.verification import ExportError
from keras_mp.system.atomic_write import atomic_write, parents_made

# The newest that tf2onnx writes; onnxruntime runs it since 1.14, of February 2023.
OPSET = 18


def export_onnx(
    model: keras.Model,
    path: str | os.PathLike[str],
    verify: Any = None,
    *,
    tolerance: float = 1e-5,
    overwrite: bool = False,
) -> DeploymentReport:
    """Exports a model as an ONNX file in float32.

    It may have been trained in any precision on any backend; the file has no float of 16 or 8 bits. `export_float32`
    writes and checks a SavedModel, and tf2onnx converts it. Every tensor, constant and attribute of the result is
    inspected, onnx checks it, and then it is renamed to `path`. Exact GELU, whose Erfc tf2onnx does not know, is
    written with ONNX's Erf.

    The file's inputs have the names of the model's inputs, its outputs the names of the model's output dict, or
    `output_0`, `output_1`, ..., and the batch size is unknown.

    Args:
        model: a built Keras model.
        path: a file that does not exist yet, or is replaced with `overwrite`.
        verify: a batch of inputs, as for `export_float32`. When given, the file is loaded again, run with onnxruntime,
            also in batches of 1 and 7, and compared with the model run in float32.
        tolerance: the largest difference that `verify` allows, relative to max(1, the largest magnitude of each
            output).
        overwrite: whether an existing file is replaced, after the new one was checked.

    Returns:
        A `DeploymentReport`.

    Raises:
        ImportError: If TensorFlow, tf2onnx, onnx or onnxruntime is not installed.
        ExportError: As for `export_float32`; also if ONNX has no operator for an operation of a layer: the message
            names both.
    """
    path = Path(path)
    check(model, path, verify, ["tensorflow", "tf2onnx", "onnx", "onnxruntime"], overwrite)
    with float32_saved_model(model, verify, tolerance) as (folder, signature, notes):
        proto = _converted(folder, signature, model)
    remaining = onnx_low_precision(proto)
    if remaining:
        raise ExportError(f"model {model.name!r} was not exported: low precision would be left in {remaining[:5]}")
    with parents_made(path), atomic_write(path) as partial:
        partial.write_bytes(proto.SerializeToString())
        report = DeploymentReport(
            path, "ONNX", partial.stat().st_size, counted([node.op_type for node in _nodes(proto.graph)]), notes=notes
        )
        if verify is not None:
            report = compared(report, _runner(partial, signature), signature, model, verify, tolerance)
    return report


def onnx_low_precision(proto: Any) -> list[str]:
    """Finds floats of 16 bits or fewer, after inferring types."""
    import onnx

    kinds = onnx.TensorProto.DataType
    low = {value for name, value in kinds.items() if "FLOAT" in name and name != "FLOAT"}
    places: list[str] = []

    def visit(message: Any, where: str) -> None:
        if isinstance(message, onnx.NodeProto):
            where = f"node {message.name!r} ({message.op_type})"
        elif isinstance(message, (onnx.TensorProto, onnx.ValueInfoProto)):
            where = message.name or where
        # Cast's and the random operators' dtype is a plain integer.
        elif isinstance(message, onnx.AttributeProto) and message.name in ("to", "dtype") and message.i in low:
            places.append(f"{kinds.Name(message.i)} in {where}")
        for field, value in message.ListFields():
            if field.name in ("data_type", "elem_type") and value in low:
                places.append(f"{kinds.Name(value)} in {where}")
            if field.message_type is not None:
                for item in value if hasattr(value, "__len__") else [value]:
                    visit(item, where)

    visit(onnx.shape_inference.infer_shapes(proto, check_type=True, strict_mode=True), "the model")
    return places


def _converted(folder: Path, signature: Signature, model: keras.Model) -> Any:
    import onnx
    import tensorflow as tf
    import tf2onnx

    _let_functions_be_inlined(folder)
    loaded = tf.saved_model.load(str(folder))
    specs = keras.tree.flatten(signature.structure)

    @tf.function(input_signature=specs, autograph=False)
    def serve(*arrays: Any) -> dict[str, Any]:
        served = loaded.serve(keras.tree.pack_sequence_as(signature.structure, arrays))
        return dict(zip(signature.outputs, keras.tree.flatten(served), strict=True))

    # What is captured and no variable, such as the mean of a Normalization, tf2onnx makes inputs of.
    captures = {inner.name: outer for outer, inner in serve.get_concrete_function(*specs).graph.captures}
    logger = logging.getLogger("tf2onnx")
    level = logger.level
    try:
        logger.setLevel(logging.CRITICAL + 1)  # what it would say of, is raised
        proto, _ = tf2onnx.convert.from_function(serve, specs, opset=OPSET, custom_op_handlers={"Erfc": (_erfc, [])})
    except Exception as error:  # whatever a handler of its hundreds runs into
        raise ExportError(
            f"model {model.name!r} was not exported: tf2onnx failed with {type(error).__name__}: {error}"
        ) from error
    finally:
        logger.setLevel(level)
    unknown = _unknown(proto)
    if unknown:
        raise ExportError(
            f"model {model.name!r} was not exported: ONNX has no operator for {'; '.join(unknown[:5])}. Replace what "
            "computes it, or use export_float32"
        )
    for value in list(proto.graph.input):
        if value.name in captures:
            proto.graph.initializer.append(onnx.numpy_helper.from_array(captures[value.name].numpy(), value.name))
            proto.graph.input.remove(value)
    for value in [*proto.graph.input, *proto.graph.output]:
        shape = value.type.tensor_type.shape
        if shape.dim and not shape.dim[0].dim_value:
            shape.dim[0].dim_param = "batch"  # where tf2onnx writes a number of its own for each
    return proto


def _let_functions_be_inlined(folder: Path) -> None:
    """Takes from a SavedModel what keeps jitted functions calls."""
    from tensorflow.core.protobuf import saved_model_pb2

    file = folder / "saved_model.pb"
    proto = saved_model_pb2.SavedModel.FromString(file.read_bytes())
    for graph in proto.meta_graphs:
        for function in graph.graph_def.library.function:
            for holder in (function, *function.node_def):
                for name in ("_noinline", "_XlaMustCompile"):
                    holder.attr.pop(name, None)
    file.write_bytes(proto.SerializeToString())


def _erfc(graph: Any, node: Any, *_: Any) -> None:
    """1 - erf(x) in the place of erfc(x)."""
    dtype, shape = graph.get_dtype(node.output[0]), graph.get_shape(node.output[0])
    graph.remove_node(node.name)
    one = graph.make_const(f"{node.name}/one", np.array(1, "float32"))
    erf = graph.make_node("Erf", [node.input[0]], shapes=[shape], dtypes=[dtype])
    graph.make_node("Sub", [one.output[0], erf.output[0]], outputs=node.output, shapes=[shape], dtypes=[dtype])


def _nodes(graph: Any) -> Iterator[Any]:
    """The nodes of a graph, its loops and branches."""
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            for inner in [attribute.g, *attribute.graphs]:
                yield from _nodes(inner)


def _unknown(proto: Any) -> list[str]:
    """The nodes that tf2onnx left with an operator of TensorFlow."""
    import onnx

    versions = {opset.domain: opset.version for opset in proto.opset_import}
    return [
        f"{node.op_type} in node {node.name.replace('StatefulPartitionedCall/', '')!r}"
        for node in _nodes(proto.graph)
        if node.domain not in versions or not onnx.defs.has(node.op_type, versions[node.domain], node.domain)
    ]


def _runner(path: Path, signature: Signature) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return lambda feed: session.run(signature.outputs, feed)
