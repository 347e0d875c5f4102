"""The product of an output layer whose weights Keras quantized, as float32."""

from __future__ import annotations

from typing import Any

import keras

# Private: Keras publishes how int4 is unpacked, and not how groups are dequantized.
from keras.src.quantizers.quantizers import dequantize_with_sz_map


def keeps_float_inputs(layer: Any) -> bool:
    """Whether only a layer's weights are quantized, to int4: Keras then multiplies inputs by dequantized weights."""
    return layer.quantization_mode == "int4" and not layer.inputs_quantizer


def dequantized_int4(layer: Any, dtype: str) -> Any:
    """The weights of an int4 layer without LoRA, as Keras's own call dequantizes them.

    Args:
        layer: a Dense, EinsumDense, or ReversibleEmbedding layer; of the last, the weights that make logits.
        dtype: of the result, to which each weight is rounded once.

    Returns:
        A tensor in the shape of the kernel; of a ReversibleEmbedding (features, vocabulary).
    """
    if isinstance(layer, keras.layers.ReversibleEmbedding):
        if layer.tie_weights:
            codes, scale, zero = layer._embeddings, layer.embeddings_scale, getattr(layer, "embeddings_zero", None)
            codes, scale = keras.ops.transpose(codes), keras.ops.transpose(scale)
            zero = None if zero is None else keras.ops.transpose(zero)
        else:
            codes, scale = layer.reverse_embeddings, layer.reverse_embeddings_scale
            zero = getattr(layer, "reverse_embeddings_zero", None)
        return _dequantized(layer, codes, scale, zero, layer.output_dim, 0, dtype)
    is_dense = isinstance(layer, keras.layers.Dense)
    columns = layer._orig_output_dim if is_dense else layer._int4_unpacked_column_size
    zero = getattr(layer, "kernel_zero", None)
    kernel = _dequantized(layer, layer._kernel, layer.kernel_scale, zero, columns, -1, dtype)
    return kernel if is_dense else keras.ops.reshape(kernel, layer.original_kernel_shape)


def _dequantized(layer: Any, packed: Any, scale: Any, zero: Any, size: int, axis: int, dtype: str) -> Any:
    codes = keras.quantizers.unpack_int4(packed, size, axis=axis)
    scale = keras.ops.cast(scale, "float32")
    if zero is None:
        kernel = keras.ops.divide(keras.ops.cast(codes, "float32"), scale)
    else:
        kernel = dequantize_with_sz_map(keras.ops.cast(codes, "float32"), scale, zero, layer.g_idx, group_axis=0)
    return keras.ops.cast(kernel, dtype)
