"""Products of weights that Keras quantized: what Keras's own lack."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import keras

from keras_mp import backend
from keras_mp.rebuild.merged import dequantized, quantized_weights
from keras_mp.rebuild.quantized_policies import CALIBRATED, logits_stop_gradients


def keeps_float_inputs(layer: Any) -> bool:
    """Whether only weights are quantized, which Keras then dequantizes."""
    mode = layer.quantization_mode
    return mode in CALIBRATED or (mode == "int4" and not layer.inputs_quantizer)


class ExactGroups:
    """Keeps the float32 numbers of int4's groups unrounded."""

    def quantized_call(self, *args: Any, **kwargs: Any) -> Any:
        self.g_idx._autocast = False  # type: ignore[attr-defined]  # private: Keras makes the variable without a choice
        return super().quantized_call(*args, **kwargs)  # type: ignore[misc]


class SavesLora:
    """LoRA's matrices in files, beside the weights.

    Keras adds LoRA's product to the weights as it saves them, and quantizes the sum: another model.
    """

    def enable_lora(self: Any, rank: int, lora_alpha: Any = None, *args: Any, **kwargs: Any) -> None:
        # Of a file Keras's Dense reads a scale that it does not hand over.
        lora_alpha = self.lora_alpha if lora_alpha is None else lora_alpha
        super().enable_lora(rank, lora_alpha, *args, **kwargs)  # type: ignore[misc]

    def save_own_variables(self: Any, store: Any) -> None:
        super().save_own_variables(store)  # type: ignore[misc]
        for name in _lora_of(self):
            store[name] = getattr(self, name)

    def load_own_variables(self: Any, store: Any) -> None:
        super().load_own_variables(store)  # type: ignore[misc]
        for name in _lora_of(self):
            if name in store.keys():
                getattr(self, name).assign(store[name])


def _lora_of(layer: Any) -> list[str]:
    names = ("lora_kernel_a", "lora_kernel_b", "lora_embeddings_a", "lora_embeddings_b")
    return [name for name in names if layer.built and hasattr(layer, name)]


class TakesLora(ExactGroups, SavesLora):
    """Gives LoRA to a layer quantized by GPTQ or AWQ.

    Keras refuses it there, or fails at it.

    y = activation(x . w + bias + alpha / rank (x . a) . b)     w dequantized by Keras
    """

    def enable_lora(self: Any, rank: int, lora_alpha: Any = None, *args: Any, **kwargs: Any) -> None:
        policy, shape = self._dtype_policy, getattr(self, "original_kernel_shape", None) or self.kernel_shape
        try:
            # As of a layer that is not quantized, of whose kernel Keras asks the shape.
            self._dtype_policy = keras.DTypePolicy("float32")
            vars(self)["_kernel"] = SimpleNamespace(shape=tuple(shape))
            super().enable_lora(rank, lora_alpha, *args, **kwargs)
        finally:
            self._dtype_policy = policy
            del vars(self)["_kernel"]

    def quantized_call(self: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        self.g_idx._autocast = False
        return called(self, inputs) if self.lora_enabled else super().quantized_call(inputs, *args, **kwargs)

    def _get_kernel_with_merged_lora(self: Any) -> tuple[Any, Any, Any]:
        return None, None, self.kernel_zero  # which Keras leaves out of the file, and then cannot load


class StraightThroughLogits:
    """Logits of quantized inputs, with gradients as in Keras's Dense.

    logits       = x8 . w8 / (scale of x . scale of w)
    gradient x   = gradient of logits . w^T, with w = w8 / scale of w
    """

    def quantized_call(self: Any, inputs: Any, reverse: bool = False) -> Any:
        if not reverse or not logits_stop_gradients(self):
            return super().quantized_call(inputs, reverse=reverse)  # type: ignore[misc]
        if self.quantization_mode == "int8":
            logits = self._int8_logits(inputs)
        else:
            logits = keras.ops.matmul(self._straight_through(inputs), dequantized_weights(self, inputs.dtype))
        cap = self.logit_soft_cap
        return logits if cap is None else cap * keras.ops.tanh(logits / cap)

    def _int8_logits(self, inputs: Any) -> Any:
        dtype = self.compute_dtype  # type: ignore[attr-defined]
        codes, scale = map(keras.ops.convert_to_tensor, quantized_weights(self, _of_logits(self)))
        codes = keras.ops.transpose(codes) if self.tie_weights else codes  # type: ignore[attr-defined]

        def dequantized() -> Any:
            return keras.ops.divide(keras.ops.cast(codes, dtype), scale)

        if backend.in_forward_mode([inputs]):
            return keras.ops.matmul(self._straight_through(inputs), dequantized())

        @backend.custom_gradient
        def product(x: Any, codes: Any, scale: Any) -> Any:
            x8, scale_of_x = self.inputs_quantizer(x)  # type: ignore[attr-defined]
            y = keras.ops.cast(keras.ops.matmul(x8, codes), dtype)

            def gradient(upstream: Any) -> Any:
                to_x = keras.ops.matmul(upstream, keras.ops.transpose(dequantized()))
                return keras.ops.cast(to_x, x.dtype), None, None

            return keras.ops.divide(y, keras.ops.multiply(scale_of_x, scale)), gradient

        return product(inputs, codes, scale)

    def _straight_through(self, inputs: Any) -> Any:
        x8, scale = self.inputs_quantizer(inputs)  # type: ignore[attr-defined]
        rounded = keras.ops.cast(x8, inputs.dtype) / keras.ops.cast(scale, inputs.dtype)
        return inputs + keras.ops.stop_gradient(rounded - inputs)


def _of_logits(layer: Any) -> str:
    if not isinstance(layer, keras.layers.ReversibleEmbedding):
        return "kernel"
    return "embeddings" if layer.tie_weights else "reverse_embeddings"


def dequantized_weights(layer: Any, dtype: str, weights: Sequence[Any] = ()) -> Any:
    """Dequantizes weights that a layer multiplies by, each rounded once.

    Args:
        layer: a Dense, EinsumDense, or ReversibleEmbedding layer; of the last, the weights that make logits.
        weights: the result of `quantized_weights` for the layer, by default read here.

    Returns:
        A tensor in the shape of the kernel; of a ReversibleEmbedding (features, vocabulary).
    """
    name = _of_logits(layer)
    values = dequantized(layer, weights or quantized_weights(layer, name), name)
    return keras.ops.cast(keras.ops.transpose(values) if name == "embeddings" else values, dtype)


def called(layer: Any, inputs: Any) -> Any:
    """Calls a quantized layer, keeping no dequantized kernel for gradients.

    y             = activation(x . w + alpha / rank (x . a) . b + bias)     w dequantized, of a and b by LoRA
    gradient of x = upstream . w^T + that of LoRA
    """
    x = _product(layer, inputs)
    if layer.lora_enabled:
        low_rank = keras.ops.matmul(_forward(layer, inputs, layer.lora_kernel_a), layer.lora_kernel_b)
        x = keras.ops.cast(keras.ops.add(x, layer.lora_alpha / layer.lora_rank * low_rank), layer.compute_dtype)
    if layer.bias is not None:
        x = keras.ops.add(x, layer.bias)
    return x if layer.activation is None else layer.activation(x)


def _product(layer: Any, inputs: Any) -> Any:
    dtype = layer.compute_dtype

    @backend.custom_gradient
    def product(x: Any, *weights: Any) -> Any:
        def gradient(upstream: Any) -> Any:
            again = backend.barrier(list(weights), [upstream])
            to_x = _backward(layer, upstream, dequantized_weights(layer, dtype, again))
            return (keras.ops.cast(to_x, x.dtype), *(None for _ in weights))

        return _forward(layer, x, dequantized_weights(layer, dtype, weights)), gradient

    return product(backend.as_tensor(inputs), *map(keras.ops.convert_to_tensor, quantized_weights(layer)))


def _forward(layer: Any, x: Any, kernel: Any) -> Any:
    if isinstance(layer, keras.layers.Dense):
        return keras.ops.matmul(x, kernel)
    return keras.ops.einsum(layer.equation, x, kernel)


def _backward(layer: Any, upstream: Any, kernel: Any) -> Any:
    if isinstance(layer, keras.layers.Dense):
        return keras.ops.matmul(upstream, keras.ops.transpose(kernel))
    return keras.ops.einsum(layer._custom_gradient_equation, upstream, kernel)
