"""The weights of Keras's layers as one matrix of floats: dequantized, with LoRA's product added."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from keras_mp import backend

# The modes of `quantize` whose weights are known here.
MODES = ("int8", "int4")
CONVOLUTIONS = (keras.layers.Conv1D, keras.layers.Conv2D, keras.layers.Conv3D)
LAYERS = (keras.layers.Dense, keras.layers.EinsumDense, keras.layers.Embedding, *CONVOLUTIONS)

# Private attributes: the number of columns of the weights that are packed.
_INT4_COLUMNS = {keras.layers.Dense: "_orig_output_dim", keras.layers.EinsumDense: "_int4_unpacked_column_size"}


def is_adapted(layer: keras.Operation) -> bool:
    """Whether a layer's weights are quantized to integers, or have the product of Keras's own LoRA beside them."""
    mode = getattr(layer, "quantization_mode", None)
    return (mode is not None and mode != "float8") or (isinstance(layer, LAYERS) and layer.lora_enabled)


def packed_weights(layer: keras.Operation) -> list[keras.Variable]:
    """The variables of a layer that hold two int4 weights a byte."""
    if getattr(layer, "quantization_mode", None) != "int4":
        return []
    names = ("_kernel", "_embeddings", "reverse_embeddings")
    variables = [getattr(layer, name, None) for name in names]
    return [v for v in variables if isinstance(v, keras.Variable) and v.dtype == "int8"]


def why_not_merged(layer: keras.Operation) -> str:
    """Why a layer's weights cannot be made one matrix of floats; empty where they can."""
    mode = getattr(layer, "quantization_mode", None)
    if mode not in (None, *MODES):
        return f"it is quantized in the mode {mode!r}; {' and '.join(map(repr, MODES))} are the modes that are known"
    if not isinstance(layer, LAYERS):
        return f"its class {type(layer).__name__} keeps its weights in a way of its own"
    columns = next((name for cls, name in _INT4_COLUMNS.items() if isinstance(layer, cls)), None)
    if mode == "int4" and columns and not hasattr(layer, columns):
        return f"Keras {keras.__version__} packs int4 in another way than Keras from 3.14, which it takes"
    if mode and layer.lora_enabled and getattr(layer, "tie_weights", False):
        return (
            "its embeddings make the logits too and are quantized, where Keras adds LoRA's product to the embeddings "
            "and not to the logits: one matrix cannot be both"
        )
    return ""


def merged_weights(layer: Any) -> dict[str, np.ndarray]:
    """The float weights of a layer that is quantized or has LoRA, by the names that they have in the layer without.

        weight = dequantized + alpha / rank . a . b        float64, then rounded once to float32

    Args:
        layer: a Dense, EinsumDense, Embedding, ReversibleEmbedding or Conv layer, for which `why_not_merged` is empty.

    Returns:
        float32 arrays in the shapes that the layer has without quantization: "kernel", or "embeddings" and, where the
        two are not tied, "reverse_embeddings".
    """
    is_embedding = isinstance(layer, keras.layers.Embedding)
    name = "embeddings" if is_embedding else "kernel"
    weights = {name: _dequantized_embeddings(layer) if is_embedding else _dequantized_kernel(layer)}
    if layer.lora_enabled:
        a, b = (_float64(getattr(layer, f"lora_{name}_{side}")) for side in "ab")
        weights[name] = weights[name] + layer.lora_alpha / layer.lora_rank * (a @ b)
    if is_embedding and getattr(layer, "tie_weights", True) is False:
        weights["reverse_embeddings"] = _dequantized_reverse(layer)
    return {key: value.astype("float32") for key, value in weights.items()}


# The layouts below are private to Keras, which has no public way to a quantized layer's float weights.


def _dequantized_kernel(layer: Any) -> np.ndarray:
    stored = _float64(layer._kernel)
    if getattr(layer, "quantization_mode", None) is None:
        return stored
    if isinstance(layer, keras.layers.Dense):
        if layer.quantization_mode == "int8":
            return stored / _float64(layer.kernel_scale)
        return _of_rows(layer, _unpacked(layer._kernel, layer._orig_output_dim))
    if layer.quantization_mode == "int8":
        return stored / keras.ops.convert_to_numpy(layer._adjust_scale_for_dequant(layer.kernel_scale)).astype(
            "float64"
        )
    rows = _of_rows(layer, _unpacked(layer._kernel, layer._int4_unpacked_column_size))
    return rows.reshape(layer.original_kernel_shape)


def _of_rows(layer: Any, codes: np.ndarray) -> np.ndarray:
    """Codes of shape (rows, columns) and scales a column, or a group of rows and a column."""
    scale = _float64(layer.kernel_scale)
    if not _grouped(layer):
        return codes / scale
    group = _float64(layer.g_idx).astype(int)
    return (codes - _float64(layer.kernel_zero)[group]) * scale[group]


def _dequantized_embeddings(layer: Any) -> np.ndarray:
    if layer.quantization_mode is None:
        return _float64(layer._embeddings)
    scale = _float64(layer.embeddings_scale)
    if layer.quantization_mode == "int8":
        return _float64(layer._embeddings) / scale[:, None]
    codes = _unpacked(layer._embeddings, layer.output_dim)
    if not _grouped(layer):
        return codes / scale[:, None]
    group = _float64(layer.g_idx).astype(int)
    return (codes - _float64(layer.embeddings_zero)[:, group]) * scale[:, group]


def _dequantized_reverse(layer: Any) -> np.ndarray:
    if layer.quantization_mode is None:
        return _float64(layer.reverse_embeddings)
    scale = _float64(layer.reverse_embeddings_scale)
    if layer.quantization_mode == "int8":
        return _float64(layer.reverse_embeddings) / scale
    codes = _unpacked(layer.reverse_embeddings, layer.output_dim, axis=0)
    if not _grouped(layer):
        return codes / scale
    group = _float64(layer.g_idx).astype(int)
    return (codes - _float64(layer.reverse_embeddings_zero)[group]) * scale[group]


def _grouped(layer: Any) -> bool:
    return getattr(layer, "_int4_block_size", None) not in (None, -1)


def _unpacked(packed: Any, size: int, axis: int = -1) -> np.ndarray:
    """int4 codes of two a byte: the even ones in the lower half, the odd ones in the upper, both signed."""
    stored = np.moveaxis(backend.to_numpy(packed).astype("int8"), axis, -1)
    low, high = ((stored << 4).astype("int8") >> 4), (stored >> 4)
    codes = np.stack([low, high], -1).reshape(*stored.shape[:-1], -1)[..., :size]
    return np.moveaxis(codes, -1, axis).astype("float64")


def _float64(variable: Any) -> np.ndarray:
    return backend.to_numpy(variable).astype("float64")
