"""The product of an output layer whose weights Keras quantized, as float32."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import keras

from keras_mp import backend
from keras_mp.rebuild.merged import dequantized, int4_columns, int4_weights


def keeps_float_inputs(layer: Any) -> bool:
    """Whether only a layer's weights are quantized, to int4: Keras then multiplies inputs by dequantized weights."""
    return layer.quantization_mode == "int4" and not layer.inputs_quantizer


def group_count(layer: Any) -> int:
    """The number of groups of an int4 layer's weights; 0 where it has none."""
    size = getattr(layer, "_int4_block_size", None) or -1
    return math.ceil(layer.g_idx.shape[0] / size) if layer.quantization_mode == "int4" and size > 0 else 0


class ExactGroups:
    """The numbers of groups of int4 weights, which Keras keeps in float32, are not rounded to the compute dtype."""

    def quantized_call(self, *args: Any, **kwargs: Any) -> Any:
        self.g_idx._autocast = False  # type: ignore[attr-defined]  # private: Keras makes the variable without a choice
        return super().quantized_call(*args, **kwargs)  # type: ignore[misc]


def logits_stop_gradients(layer: Any) -> bool:
    """Whether a layer's logits are of inputs that Keras rounds to integers, without a gradient for them."""
    if not isinstance(layer, keras.layers.ReversibleEmbedding) or layer.quantization_mode not in ("int8", "int4"):
        return False
    return bool(layer.inputs_quantizer)


class StraightThroughLogits:
    """Logits of quantized inputs, whose gradient is that of the inputs before: as Keras has it in its Dense layer.

    logits       = x8 . w8 / (scale of x . scale of w)
    gradient x   = gradient of logits . w^T, with w = w8 / scale of w
    """

    def quantized_call(self, inputs: Any, reverse: bool = False) -> Any:
        if not reverse or not logits_stop_gradients(self):
            return super().quantized_call(inputs, reverse=reverse)  # type: ignore[misc]
        logits = self._int8_logits(inputs) if self.quantization_mode == "int8" else self._int4_logits(inputs)  # type: ignore[attr-defined]
        cap = self.logit_soft_cap  # type: ignore[attr-defined]
        return logits if cap is None else cap * keras.ops.tanh(logits / cap)

    def _int8_logits(self, inputs: Any) -> Any:
        dtype = self.compute_dtype  # type: ignore[attr-defined]
        codes, scale = map(keras.ops.convert_to_tensor, int8_weights(self))

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

    def _int4_logits(self, inputs: Any) -> Any:
        return keras.ops.matmul(self._straight_through(inputs), dequantized_int4(self, inputs.dtype))

    def _straight_through(self, inputs: Any) -> Any:
        x8, scale = self.inputs_quantizer(inputs)  # type: ignore[attr-defined]
        rounded = keras.ops.cast(x8, inputs.dtype) / keras.ops.cast(scale, inputs.dtype)
        return inputs + keras.ops.stop_gradient(rounded - inputs)


def int8_weights(layer: Any) -> tuple[Any, Any]:
    """The codes of a Dense layer, or those that make the logits of a ReversibleEmbedding, and a scale for each output.

    Returns:
        Integers in the shape (features, outputs), and floats: a weight is its code divided by its scale.
    """
    if not isinstance(layer, keras.layers.ReversibleEmbedding):
        return layer._kernel, layer.kernel_scale
    if layer.tie_weights:
        return keras.ops.transpose(layer._embeddings), layer.embeddings_scale
    return layer.reverse_embeddings, layer.reverse_embeddings_scale


def dequantized_head(layer: Any, dtype: str) -> Any:
    """The weights of a quantized Dense or ReversibleEmbedding layer that makes logits, each rounded once to a dtype.

    Returns:
        A tensor in the shape (features, outputs).
    """
    if layer.quantization_mode == "int4":
        return dequantized_int4(layer, dtype)
    codes, scale = (keras.ops.cast(x, "float32") for x in int8_weights(layer))
    return keras.ops.cast(keras.ops.divide(codes, scale), dtype)


def dequantized_int4(layer: Any, dtype: str) -> Any:
    """The weights of an int4 layer without LoRA, as Keras's own call dequantizes them.

    Args:
        layer: a Dense, EinsumDense, or ReversibleEmbedding layer; of the last, the weights that make logits.
        dtype: the dtype of the result, to which each weight is rounded once.

    Returns:
        A tensor in the shape of the kernel; of a ReversibleEmbedding (features, vocabulary).
    """
    if not isinstance(layer, keras.layers.ReversibleEmbedding):
        return dequantized_kernel(layer, int4_weights(layer), dtype)
    if not layer.tie_weights:
        return _dequantized(layer, int4_weights(layer, "reverse_embeddings"), 0, dtype)
    codes, scale, *groups = int4_weights(layer, "embeddings")
    codes, scale = keras.ops.transpose(codes), keras.ops.transpose(scale)
    if groups:
        groups = [keras.ops.transpose(groups[0]), groups[1]]
    return _dequantized(layer, (codes, scale, *groups), 0, dtype)


def dequantized_kernel(layer: Any, weights: Sequence[Any], dtype: str) -> Any:
    """The kernel of a Dense or EinsumDense layer, in its shape, from what `int4_weights` returns."""
    kernel = _dequantized(layer, weights, -1, dtype)
    is_dense = isinstance(layer, keras.layers.Dense)
    return kernel if is_dense else keras.ops.reshape(kernel, layer.original_kernel_shape)


def _dequantized(layer: Any, weights: Sequence[Any], packed_axis: int, dtype: str) -> Any:
    packed, scale, *groups = weights
    codes = keras.ops.cast(keras.quantizers.unpack_int4(packed, int4_columns(layer), axis=packed_axis), "float32")
    if groups:
        groups = [keras.ops.cast(groups[0], "float32"), keras.ops.cast(groups[1], "int32")]
    return keras.ops.cast(dequantized(codes, keras.ops.cast(scale, "float32"), groups), dtype)
