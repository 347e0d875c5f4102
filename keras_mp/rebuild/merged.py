"""The weights of Keras's layers as one matrix of floats: dequantized, with LoRA's product added."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from keras_mp import backend
from keras_mp.rebuild.quantized_banks import quantized_banks

# The modes of `quantize` whose weights are known here.
MODES = ("int8", "int4")
CONVOLUTIONS = (keras.layers.Conv1D, keras.layers.Conv2D, keras.layers.Conv3D)
LAYERS = (keras.layers.Dense, keras.layers.EinsumDense, keras.layers.Embedding, *CONVOLUTIONS)

# Attributes, private ones of kernels: what holds the weights, and the number of columns of those that are packed.
_STORED = {"kernel": "_kernel", "embeddings": "_embeddings", "reverse_embeddings": "reverse_embeddings"}
_INT4_COLUMNS = {
    keras.layers.Dense: "_orig_output_dim",
    keras.layers.EinsumDense: "_int4_unpacked_column_size",
    keras.layers.Embedding: "output_dim",
}


def is_adapted(layer: keras.Operation) -> bool:
    """Whether a layer's weights are stored as integers, or have the product of Keras's own LoRA beside them."""
    mode = getattr(layer, "quantization_mode", None)
    has_lora = isinstance(layer, LAYERS) and layer.lora_enabled
    return (mode is not None and mode != "float8") or has_lora or bool(quantized_banks(layer))


def packed_weights(layer: keras.Operation) -> list[keras.Variable]:
    """The variables of a layer that hold two int4 weights a byte."""
    banks = quantized_banks(layer).values()
    if banks:
        return [bank.codes for bank in banks if bank.is_int4]
    if getattr(layer, "quantization_mode", None) != "int4":
        return []
    variables = [getattr(layer, name, None) for name in _STORED.values()]
    return [v for v in variables if isinstance(v, keras.Variable) and v.dtype == "int8"]


def why_not_merged(layer: keras.Operation) -> str:
    """Why a layer's weights cannot be made one matrix of floats; empty where they can."""
    mode = getattr(layer, "quantization_mode", None)
    if mode not in (None, *MODES):
        return f"it is quantized in the mode {mode!r}, and only {' and '.join(map(repr, MODES))} are known"
    if not isinstance(layer, LAYERS) and not quantized_banks(layer):
        return f"its class {type(layer).__name__} stores its weights in a way that is not known"
    columns = next((name for cls, name in _INT4_COLUMNS.items() if isinstance(layer, cls)), None)
    if mode == "int4" and columns and not hasattr(layer, columns):
        return f"Keras {keras.__version__} packs int4 otherwise than Keras 3.14 and later, which can be read"
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
        layer: a Dense, EinsumDense, Embedding, ReversibleEmbedding or Conv layer, or one whose banks are stored as
            integers, for which `why_not_merged` is empty.

    Returns:
        float32 arrays in the shapes that the layer has without quantization: "kernel", or "embeddings" and, where the
        two are not tied, "reverse_embeddings"; or all banks.
    """
    if banks := quantized_banks(layer):
        return {bank.codes.name: keras.ops.convert_to_numpy(bank.floats("float32")) for bank in banks.values()}
    is_embedding = isinstance(layer, keras.layers.Embedding)
    name = "embeddings" if is_embedding else "kernel"
    weights = {name: _floats(layer, name)}
    if layer.lora_enabled:
        a, b = (_float64(getattr(layer, f"lora_{name}_{side}")) for side in "ab")
        weights[name] = weights[name] + layer.lora_alpha / layer.lora_rank * (a @ b)
    if is_embedding and getattr(layer, "tie_weights", True) is False:
        weights["reverse_embeddings"] = _floats(layer, "reverse_embeddings")
    return {key: value.astype("float32") for key, value in weights.items()}


# The layouts below are private to Keras, which has no public way to a quantized layer's float weights.


def int4_weights(layer: Any, name: str = "kernel") -> tuple[Any, ...]:
    """What Keras keeps of a layer's int4 weights.

    Returns:
        Variables: two weights a byte, and scales; of weights in groups the zero points, too, and which group is whose.
    """
    groups = (getattr(layer, f"{name}_zero"), layer.g_idx) if hasattr(layer, f"{name}_zero") else ()
    return (getattr(layer, _STORED[name]), getattr(layer, f"{name}_scale"), *groups)


def int4_columns(layer: Any) -> int:
    """The number of a layer's int4 weights along the axis along which two are in a byte."""
    return getattr(layer, next(name for cls, name in _INT4_COLUMNS.items() if isinstance(layer, cls)))


def dequantized(codes: Any, scale: Any, groups: Sequence[Any], axis: int = 0) -> Any:
    """The numbers that int4 codes stand for.

        codes / scale                                            with a scale for each column
        (codes - zero of the group) . scale of the group         with groups along an axis

    Args:
        codes: floats, and so is the rest: tensors, or NumPy's arrays.
        scale: the scales, which broadcast to the codes; of groups, one for each along the axis.
        groups: empty; or zero points, shaped as the scales, and integers: the group of each place along the axis.
        axis: the axis along which the groups lie.
    """
    if not groups:
        return codes / scale
    take = np.take if isinstance(codes, np.ndarray) else keras.ops.take
    zero, group = groups
    return (codes - take(zero, group, axis=axis)) * take(scale, group, axis=axis)


def _floats(layer: Any, name: str) -> np.ndarray:
    """Weights of a layer in float64, in the shape that they have without quantization."""
    mode, stored = getattr(layer, "quantization_mode", None), getattr(layer, _STORED[name])
    if mode is None:
        return _float64(stored)
    by_row = name == "embeddings"  # these have scales for each row, others for each column
    if mode == "int8":
        scale = _float64(getattr(layer, f"{name}_scale"))
        if isinstance(layer, keras.layers.EinsumDense):
            scale = keras.ops.convert_to_numpy(layer._adjust_scale_for_dequant(layer.kernel_scale)).astype("float64")
        return _float64(stored) / (scale[:, None] if by_row else scale)
    packed, scale, *groups = map(backend.to_numpy, int4_weights(layer, name))
    codes = keras.quantizers.unpack_int4(packed, int4_columns(layer), axis=0 if name == "reverse_embeddings" else -1)
    codes, scale = keras.ops.convert_to_numpy(codes).astype("float64"), scale.astype("float64")
    if groups:
        groups = [groups[0].astype("float64"), groups[1].astype(int)]
    elif by_row:
        scale = scale[:, None]
    weights = dequantized(codes, scale, groups, axis=1 if by_row else 0)
    return weights.reshape(layer.original_kernel_shape) if isinstance(layer, keras.layers.EinsumDense) else weights


def _float64(variable: Any) -> np.ndarray:
    return backend.to_numpy(variable).astype("float64")
