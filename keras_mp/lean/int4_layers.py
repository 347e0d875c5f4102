"""Layers of int4 weights that keep these for the backward pass, and not the kernel that they stand for."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import keras

from keras_mp import backend
from keras_mp.lean.phase import may_be_differentiated
from keras_mp.stability.quantized_product import (
    dequantized_kernel,
    group_count,
    keeps_float_inputs,
    quantized_kernel,
)


def is_int4(layer: Any) -> bool:
    """Whether a layer multiplies by weights that Keras quantized to int4."""
    products = (keras.layers.Dense, keras.layers.EinsumDense)
    return isinstance(layer, products) and layer.quantization_mode == "int4"


def why_not_int4(layer: Any, treatments: Collection[str] = ()) -> str:
    """Why an int4 layer cannot be lean; "" where it can.

    Args:
        layer: the layer.
        treatments: those that it has, by the names of `keras_mp.stability.stabilized`.
    """
    if "result" in treatments:
        return "it computes the model's output, which is in float32"
    if not keeps_float_inputs(layer):
        return "its inputs are quantized, too"
    return "" if group_count(layer) else "its int4 weights have no groups"


class LeanInt4:
    """Computes the kernel from its int4 weights in the forward pass, and again in the backward pass.

        y             = x . w + alpha / rank (x . a) . b           w dequantized, of a and b by LoRA
        gradient of x = upstream . w^T + that of LoRA

    As Keras has it, but Keras's own w lives from one pass to the other: the compiler sees that both compute the same.
    """

    def _int4_call(self, inputs: Any, training: bool | None = None) -> Any:
        if not may_be_differentiated(training) or why_not_int4(self):
            return super()._int4_call(inputs, training=training)  # type: ignore[misc]
        x = _product(self, inputs)
        if self.lora_enabled:  # type: ignore[attr-defined]
            low_rank = _forward(self, inputs, self.lora_kernel_a)  # type: ignore[attr-defined]
            low_rank = keras.ops.matmul(low_rank, self.lora_kernel_b)  # type: ignore[attr-defined]
            x = keras.ops.add(x, self.lora_alpha / self.lora_rank * low_rank)  # type: ignore[attr-defined]
            x = keras.ops.cast(x, self.compute_dtype)  # type: ignore[attr-defined]
        if self.bias is not None:  # type: ignore[attr-defined]
            x = keras.ops.add(x, self.bias)  # type: ignore[attr-defined]
        return x if self.activation is None else self.activation(x)  # type: ignore[attr-defined]


def _product(layer: Any, inputs: Any) -> Any:
    dtype = layer.compute_dtype

    @backend.custom_gradient
    def product(x: Any, *quantized: Any) -> Any:
        def gradient(upstream: Any) -> Any:
            again = backend.barrier(list(quantized), [upstream])
            to_x = _backward(layer, upstream, dequantized_kernel(layer, again, dtype))
            return (keras.ops.cast(to_x, x.dtype), *(None for _ in quantized))

        return _forward(layer, x, dequantized_kernel(layer, quantized, dtype)), gradient

    return product(backend.as_tensor(inputs), *map(keras.ops.convert_to_tensor, quantized_kernel(layer)))


def _forward(layer: Any, x: Any, kernel: Any) -> Any:
    if isinstance(layer, keras.layers.Dense):
        return keras.ops.matmul(x, kernel)
    return keras.ops.einsum(layer.equation, x, kernel)


def _backward(layer: Any, upstream: Any, kernel: Any) -> Any:
    if isinstance(layer, keras.layers.Dense):
        return keras.ops.matmul(upstream, keras.ops.transpose(kernel))
    return keras.ops.einsum(layer._custom_gradient_equation, upstream, kernel)
