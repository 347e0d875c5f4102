"""Look through a whole SavedModel for 16- and 8-bit floats."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

# Programs inside a node, in a form that a walk over nodes cannot see into.
OPAQUE_OPS = frozenset({"XlaCallModule"})


class LowPrecision(NamedTuple):
    """A place of a SavedModel with a narrow float."""

    node: str  # the node's name, as scopes joined with `/`, or the name of whatever else holds it
    op: str  # the operation of the node
    what: str  # the dtype and its place in the node, or the reason why the node cannot be looked into


def low_precision(path: str | os.PathLike[str]) -> list[LowPrecision]:
    """Finds narrow floats and opaque ops in a SavedModel.

    Looks at every field of every message in `saved_model.pb` (graph, functions and their signatures, attributes,
    constants, the object graph) and at every variable in the checkpoint.
    """
    import tensorflow as tf

    # Float dtypes of 16 bits and fewer, whatever this version of TensorFlow calls them.
    dtypes = [value for space in (tf.dtypes, tf.dtypes.experimental) for value in vars(space).values()]
    dtypes = [value for value in dtypes if isinstance(value, tf.DType) and value.is_floating and value.size <= 2]
    low = {dtype.as_datatype_enum for dtype in dtypes}
    low |= {dtype + 100 for dtype in low}  # reference types: tensorflow/core/framework/types.proto
    places = [place for graph in _graphs(path) for place in _places(graph, low, tf)]
    variables = Path(path) / "variables" / "variables"
    if variables.with_name("variables.index").exists():
        reader = tf.train.load_checkpoint(str(variables))
        for name, dtype in sorted(reader.get_variable_to_dtype_map().items()):
            if dtype.as_datatype_enum in low:
                places.append(LowPrecision(name, "variable", f"stored in {dtype.name}"))
    return places


def count_nodes(path: str | os.PathLike[str]) -> int:
    """Counts a SavedModel's nodes, in its graph and all functions."""
    return sum(
        len(graph.graph_def.node) + sum(len(function.node_def) for function in graph.graph_def.library.function)
        for graph in _graphs(path)
    )


def _graphs(path: str | os.PathLike[str]) -> Any:
    from tensorflow.core.protobuf import saved_model_pb2

    return saved_model_pb2.SavedModel.FromString((Path(path) / "saved_model.pb").read_bytes()).meta_graphs


def _places(graph: Any, low: set[int], tf: Any) -> Iterator[LowPrecision]:
    from tensorflow.core.framework import node_def_pb2

    def visit(message: Any, node: str, op: str, where: str) -> Iterator[LowPrecision]:
        if isinstance(message, node_def_pb2.NodeDef):
            node, op, where = message.name, message.op, ""
            if op in OPAQUE_OPS:
                yield LowPrecision(node, op, "holds a compiled program whose operations cannot be read")
        for field, value in message.ListFields():
            if field.name == "stripped_op_list":
                continue  # what the ops could take, not what these nodes do
            name = f"{where}.{field.name}" if where else field.name
            values = value if hasattr(value, "__len__") and not isinstance(value, (str, bytes)) else [value]
            if field.enum_type is not None and field.enum_type.full_name == "tensorflow.DataType":
                for number in values:
                    if number in low:
                        yield LowPrecision(node, op, f"{tf.dtypes.as_dtype(number % 100).name} in {name}")
            elif field.message_type is None:
                continue
            elif field.message_type.GetOptions().map_entry:
                for key, item in value.items():
                    if hasattr(item, "ListFields"):
                        yield from visit(item, node, op, f"{name}[{key}]")
            else:
                for item in values:
                    yield from visit(item, getattr(item, "name", "") or node if not op else node, op, name)

    yield from visit(graph, "", "", "")
