"""Reads and runs LiteRT files: operators, tensors, values."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from keras_mp.system.quiet_import import quiet_stderr

_LOW_PRECISION = ("FLOAT16", "BFLOAT16", "FLOAT8")


class Tensor(NamedTuple):
    """A tensor of a file."""

    name: str  # as the converter called it
    type: str  # "FLOAT32", "INT8", ...
    scales: list[float]  # of a quantized tensor, one or one a channel; else empty


class Operator(NamedTuple):
    """An operator, with places of its inputs and outputs."""

    kind: str
    inputs: list[int]
    outputs: list[int]


class LiteRTFile:
    """A LiteRT file in memory."""

    def __init__(self, content: bytes) -> None:
        from tensorflow.lite.python import schema_py_generated as schema
        from tensorflow.lite.tools import flatbuffer_utils

        self.content = content
        file = flatbuffer_utils.convert_bytearray_to_object(bytearray(content))
        types, kinds = ({n: name for name, n in vars(e).items()} for e in (schema.TensorType, schema.BuiltinOperator))
        # Kinds past 127 did not fit into the first field.
        codes = [kinds[max(code.builtinCode, code.deprecatedBuiltinCode)] for code in file.operatorCodes]
        # The main one first.
        self.graphs: list[tuple[list[Tensor], list[Operator]]] = []
        for graph in file.subgraphs:
            operators = [
                Operator(codes[operator.opcodeIndex], list(operator.inputs), list(operator.outputs))
                for operator in graph.operators
            ]
            tensors = []
            for tensor in graph.tensors:
                scale = getattr(tensor.quantization, "scale", None)
                scales = [] if scale is None else scale.tolist()
                tensors.append(Tensor(tensor.name.decode(), types[tensor.type], scales))
            self.graphs.append((tensors, operators))

    def operators(self) -> list[str]:
        """The kind of each operator, over all graphs."""
        return [operator.kind for _, operators in self.graphs for operator in operators]

    def float_operators(self) -> list[str]:
        """Kinds of operators that compute in float32."""
        return [
            operator.kind
            for tensors, operators in self.graphs
            for operator in operators
            if operator.kind != "DEQUANTIZE" and any(tensors[place].type == "FLOAT32" for place in operator.outputs)
        ]

    def low_precision(self, quantized: bool = False) -> list[str]:
        """Names tensors of narrow floats and, unless allowed, integers."""
        return [
            f"{tensor.name!r} ({tensor.type})"
            for tensors, _ in self.graphs
            for tensor in tensors
            if tensor.type.startswith(_LOW_PRECISION) or (tensor.scales and not quantized)
        ]

    def with_integer_io(self, bits: int) -> LiteRTFile:
        """The same file with integers for inputs and outputs.

        Inputs that an operator in float32 reads, and outputs that one writes, stay float32.
        """
        import tensorflow as tf
        from tensorflow.lite.python import util  # a converter does this by an option, a QuantizationDebugger does not

        integer = {8: tf.int8, 16: tf.int16}[bits]
        with quiet_stderr():
            return LiteRTFile(bytes(util.modify_model_io_type(self.content, integer, integer)))

    def with_wide_biases(self) -> LiteRTFile:
        """The same file with int64 biases, for LiteRT's int16.

        TensorFlow's converter writes int32 where it is given the ranges and does not calibrate.

        Raises:
            OverflowError: a bias did not fit int32; the message names it.
        """
        from tensorflow.lite.python import schema_py_generated as schema
        from tensorflow.lite.tools import flatbuffer_utils

        file = flatbuffer_utils.convert_bytearray_to_object(bytearray(self.content))
        biases = [
            tensor
            for graph in file.subgraphs
            for tensor in graph.tensors
            if tensor.type == schema.TensorType.INT32 and tensor.quantization and tensor.quantization.scale is not None
        ]
        for tensor in biases:
            tensor.type = schema.TensorType.INT64
        for place, name in {tensor.buffer: tensor.name.decode() for tensor in biases}.items():
            bias = np.frombuffer(file.buffers[place].data.tobytes(), np.int32)
            if np.abs(bias.astype("int64")).max() >= 2**31 - 1:
                raise OverflowError(f"the bias {name!r} has no place in int32")
            file.buffers[place].data = np.frombuffer(bias.astype("int64").tobytes(), np.uint8)
        return LiteRTFile(bytes(flatbuffer_utils.convert_object_to_bytearray(file)))

    def float_io(self) -> list[str]:
        """The names of the inputs and outputs that are float32."""
        run = self._interpreter().get_signature_runner("serving_default")
        details = run.get_input_details() | run.get_output_details()
        return [name for name, detail in details.items() if detail["dtype"] == np.float32]

    def output_scales(self, outputs: Sequence[str]) -> list[float]:
        """Scales of outputs, dequantized ones too; else 0."""
        details = self._interpreter().get_signature_runner("serving_default").get_output_details()
        tensors, operators = self.graphs[0]
        last = {o.outputs[0]: tensors[o.inputs[0]] for o in operators if o.kind == "DEQUANTIZE"}
        ends = [last.get(details[name]["index"], tensors[details[name]["index"]]) for name in outputs]
        return [end.scales[0] if end.scales else 0.0 for end in ends]

    def runner(self, outputs: Sequence[str]) -> Callable[[Mapping[str, np.ndarray]], list[np.ndarray]]:
        """A function from arrays by name to these outputs.

        Floats for integer inputs are quantized, and integer outputs dequantized, by the file's scales.
        """
        run = _in_floats(self._interpreter())

        def call(feed: Mapping[str, np.ndarray]) -> list[np.ndarray]:
            served = run(feed)
            return [served[name] for name in outputs]

        return call

    def values(self, feed: Mapping[str, np.ndarray]) -> dict[int, np.ndarray]:
        """Values of the main graph's tensors, by plain kernels."""
        import tensorflow as tf

        # A delegate computes several operators at once, and keeps nothing of what is between.
        kernels = tf.lite.experimental.OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES
        interpreter = self._interpreter(experimental_preserve_all_tensors=True, experimental_op_resolver_type=kernels)
        _in_floats(interpreter)(feed)
        values = {}
        for place in range(len(self.graphs[0][0])):
            try:
                values[place] = interpreter.get_tensor(place)
            except ValueError:  # nothing was computed for it
                continue
        return values

    def _interpreter(self, **options: Any) -> Any:
        import tensorflow as tf

        with warnings.catch_warnings(), quiet_stderr():
            warnings.simplefilter("ignore")  # TensorFlow 2.20 was to be the last with an interpreter; 2.21 has it
            return tf.lite.Interpreter(model_content=self.content, **options)


def _in_floats(interpreter: Any) -> Callable[[Mapping[str, np.ndarray]], dict[str, np.ndarray]]:
    """The signature of a file as a function of floats."""
    run = interpreter.get_signature_runner("serving_default")
    takes, gives = run.get_input_details(), run.get_output_details()

    def quantized(x: np.ndarray, dtype: Any, scale: float, zero: int) -> np.ndarray:
        ends = np.iinfo(dtype)
        return np.clip(np.round(x / scale) + zero, ends.min, ends.max).astype(dtype)

    def call(feed: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        fed = {
            name: quantized(x, takes[name]["dtype"], *takes[name]["quantization"])
            if takes[name]["quantization"][0] and x.dtype == np.float32
            else x
            for name, x in feed.items()
        }
        return {
            name: (x.astype("float32") - gives[name]["quantization"][1]) * np.float32(gives[name]["quantization"][0])
            if gives[name]["quantization"][0]
            else x
            for name, x in run(**fed).items()
        }

    return call
