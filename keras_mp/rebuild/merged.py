"""Weights as floats: dequantized, LoRA's product added."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from keras_mp import backend
from keras_mp.backend.common.keras_private import dequantize_with_sz_map
from keras_mp.rebuild.quantized_banks import quantized_banks
from keras_mp.rebuild.quantized_policies import CALIBRATED, LAYERS, policy_of

# The modes whose weights are known here.
MODES = ("int8", "int4", *CALIBRATED)

# Attributes, private ones of kernels: what holds the weights, and the number of columns of those that are packed.
_STORED = {"kernel": "_kernel", "embeddings": "_embeddings", "reverse_embeddings": "reverse_embeddings"}
_COLUMNS = {
    "int4": {
        keras.layers.Dense: "_orig_output_dim",
        keras.layers.EinsumDense: "_int4_unpacked_column_size",
        keras.layers.Embedding: "output_dim",
    },
    "gptq": {keras.layers.Dense: "units", keras.layers.EinsumDense: "gptq_unpacked_column_size"},
    "awq": {keras.layers.Dense: "units", keras.layers.EinsumDense: "awq_unpacked_column_size"},
}


class Serves:
    """Marks layers that compute with other numbers than their weights."""

    def served(self) -> Any:
        """The layer whose weights are those numbers."""
        return self


def is_adapted(layer: keras.Operation) -> bool:
    """Whether a layer's weights are integers, or have LoRA."""
    mode = getattr(layer, "quantization_mode", None)
    has_lora = isinstance(layer, LAYERS) and layer.lora_enabled
    return (mode is not None and mode != "float8") or has_lora or bool(quantized_banks(layer))


def is_packed(layer: Any) -> bool:
    """Whether Keras stores two quantized weights a byte."""
    mode = getattr(layer, "quantization_mode", None)
    return mode in ("int4", "awq") or (mode == "gptq" and policy_of(layer).weight_bits == 4)


def packed_weights(layer: Any) -> list[keras.Variable]:
    """Variables of a layer with two weights a byte."""
    banks = quantized_banks(layer).values()
    if banks:
        return [bank.codes for bank in banks if bank.is_int4]
    if not is_packed(layer):
        return []
    variables = [getattr(layer, name, None) for name in (*_STORED.values(), "quantized_kernel")]
    return [v for v in variables if isinstance(v, keras.Variable) and v.dtype in ("int8", "uint8")]


def why_not_merged(layer: keras.Operation) -> str:
    """Why weights cannot be one matrix of floats, or ""."""
    mode = getattr(layer, "quantization_mode", None)
    if mode not in (None, *MODES):
        return f"it is quantized in the mode {mode!r}, and only {' and '.join(map(repr, MODES))} are known"
    if not isinstance(layer, LAYERS) and not quantized_banks(layer):
        return f"its class {type(layer).__name__} stores its weights in a way that is not known"
    if mode in CALIBRATED and hasattr(layer, "_kernel"):
        return f"Keras has not calibrated it for {mode!r} yet, as model.quantize({mode!r}, config) with a dataset does"
    columns = next((name for cls, name in _COLUMNS["int4"].items() if isinstance(layer, cls)), None)
    if mode == "int4" and columns and not hasattr(layer, columns):
        return f"Keras {keras.__version__} packs int4 otherwise than Keras 3.14 and later, which can be read"
    if mode and layer.lora_enabled and getattr(layer, "tie_weights", False):
        return (
            "its embeddings make the logits too and are quantized, where Keras adds LoRA's product to the embeddings "
            "and not to the logits: one matrix cannot be both"
        )
    return ""


def merged_weights(layer: Any) -> dict[str, np.ndarray]:
    """Float weights of a quantized layer or one with LoRA.

        weight = dequantized + alpha / rank . a . b        float64, then rounded once to float32

    Those of a layer that trains for a quantization are quantized so.

    Args:
        layer: a Dense, EinsumDense, Embedding, ReversibleEmbedding or Conv layer, or one whose banks are stored as
            integers, for which `why_not_merged` is empty.

    Returns:
        float32 arrays in the shapes that the layer has without quantization: "kernel", or "embeddings" and, where the
        two are not tied, "reverse_embeddings"; or all banks.
    """
    layer = layer.served() if isinstance(layer, Serves) else layer
    if banks := quantized_banks(layer):
        return {bank.codes.name: keras.ops.convert_to_numpy(bank.floats("float32")) for bank in banks.values()}
    is_embedding = isinstance(layer, keras.layers.Embedding)
    name = "embeddings" if is_embedding else "kernel"
    weights = {name: _floats(layer, name)}
    if layer.lora_enabled:
        a, b = (backend.to_numpy(getattr(layer, f"lora_{name}_{side}")).astype("float64") for side in "ab")
        weights[name] = weights[name] + layer.lora_alpha / layer.lora_rank * (a @ b)
    if is_embedding and getattr(layer, "tie_weights", True) is False:
        weights["reverse_embeddings"] = _floats(layer, "reverse_embeddings")
    return {key: value.astype("float32") for key, value in weights.items()}


def _floats(layer: Any, name: str) -> np.ndarray:
    if layer.quantization_mode is None:
        return backend.to_numpy(getattr(layer, _STORED[name])).astype("float64")
    values = dequantized(layer, list(map(backend.to_numpy, quantized_weights(layer, name))), name)
    return keras.ops.convert_to_numpy(values).astype("float64")


# The layouts below are private to Keras, which has no public way to a quantized layer's float weights.


def quantized_weights(layer: Any, name: str = "kernel") -> tuple[Any, ...]:
    """What Keras keeps of a layer's quantized weights.

    Returns:
        Variables: codes, of 4 bits two a byte, and scales; of weights in groups the zero points, too, and which group
        is whose; of AWQ the factors of the inputs.
    """
    codes = layer.quantized_kernel if layer.quantization_mode in CALIBRATED else getattr(layer, _STORED[name])
    others = [f"{name}_scale", *([f"{name}_zero", "g_idx", "awq_scales"] if hasattr(layer, f"{name}_zero") else [])]
    return (codes, *(getattr(layer, other) for other in others if hasattr(layer, other)))


def dequantized(layer: Any, weights: Sequence[Any], name: str = "kernel") -> Any:
    """Dequantizes a layer's weights by Keras's functions.

    Args:
        weights: the result of `quantized_weights`, as tensors or arrays.

    Returns:
        A float32 tensor in the shape that the weights have without quantization.
    """
    codes, scale, *groups = map(keras.ops.convert_to_tensor, weights)
    mode, scale = layer.quantization_mode, keras.ops.cast(scale, "float32")
    calibrated = mode in CALIBRATED  # their matrices are transposed
    if is_packed(layer):
        columns = getattr(layer, next(name for cls, name in _COLUMNS[mode].items() if isinstance(layer, cls)))
        axis = 0 if calibrated or name == "reverse_embeddings" else -1
        codes = keras.quantizers.unpack_int4(codes, columns, axis, "uint8" if calibrated else "int8")
    codes = keras.ops.cast(codes, "float32")
    if groups:
        # Of the others the groups lie along the last axis; Keras 3.13 has no name for that.
        along = {} if calibrated or name == "embeddings" else {"group_axis": 0}
        values = dequantize_with_sz_map(codes, scale, *groups[:2], **along)
    elif mode == "int8" and isinstance(layer, keras.layers.EinsumDense):
        values = keras.ops.divide(codes, layer._adjust_scale_for_dequant(scale))
    else:
        values = keras.ops.divide(codes, scale[:, None] if name == "embeddings" else scale)
    values = keras.ops.transpose(values) if calibrated else values
    if len(groups) > 2:
        values = keras.ops.divide(values, keras.ops.cast(groups[2], "float32")[:, None])
    shape = getattr(layer, "original_kernel_shape", None)
    return values if shape is None else keras.ops.reshape(values, shape)
