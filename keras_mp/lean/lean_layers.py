"""Layers that keep less for the backward pass."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import keras

from keras_mp import backend
from keras_mp.lean.blockwise_attention import attention
from keras_mp.lean.gelu import gelu
from keras_mp.lean.training_step import is_training, may_be_differentiated
from keras_mp.rebuild.quantized_policies import group_count
from keras_mp.rebuild.walk import package_of
from keras_mp.stability.quantized_product import called, keeps_float_inputs
from keras_mp.stability.sensitive import activation_of

engine = backend.engine_of(__package__)

# Attention layers of Keras and KerasHub that attend as `keras_mp.lean.attention` does while they train.


class AttentionCall(NamedTuple):
    """A layer's request to attention, besides query, key and value."""

    scale: float  # the factor of the scores
    mask: Any = None  # the mask as the layer has it; None for none
    causal: bool = False  # whether a row sees only the columns up to its own
    dropout: float = 0.0  # the share of the probabilities that is dropped
    dropout_layer: Any = None  # the layer that draws for the dropout
    kernel: bool = True  # whether the layer's own code computes by `keras.ops.dot_product_attention`


# What each kind of layer asks for, from the arguments of its `_compute_attention` but key and value; None where it
# attends in its own way.


def _ask_keras(
    layer: Any,
    query: Any,
    attention_mask: Any = None,
    training: bool | None = None,
    return_attention_scores: bool = False,
    use_causal_mask: bool = False,
) -> AttentionCall | None:
    if isinstance(layer, keras.layers.GroupQueryAttention):
        scale, dropout, scores = layer._inverse_sqrt_head_dim, layer.dropout, layer._return_attention_scores
    else:
        scale, dropout, scores = layer._inverse_sqrt_key_dim, layer._dropout, return_attention_scores
    if not may_be_differentiated(training) or scores or len(query.shape) != 4:
        return None
    rate = _rate(dropout, training)
    return AttentionCall(scale, attention_mask, use_causal_mask, rate, layer._dropout_layer, kernel=not dropout)


def _ask_llama(
    layer: Any, query: Any, attention_mask: Any = None, cache_update_index: Any = None, **options: Any
) -> AttentionCall | None:
    if not may_be_differentiated() or options or _has_window(layer, query.shape[1]):
        return None
    fused = getattr(layer, "_use_fused_attention_op", lambda: keras.backend.backend() == "jax")
    return AttentionCall(layer._inv_norm_factor, attention_mask, kernel=fused())


def _ask_neo_x(
    layer: Any, query: Any, attention_mask: Any = None, training: bool | None = None
) -> AttentionCall | None:
    if not may_be_differentiated(training):
        return None
    rate, kernel = _rate(layer.dropout, training), keras.backend.backend() == "jax" and not layer.dropout
    return AttentionCall(layer._inv_norm_factor, attention_mask, False, rate, layer._attn_dropout_layer, kernel)


def _ask_gemma(
    layer: Any, query: Any, attention_mask: Any, training: bool | None = False, cache_update_index: Any = 0
) -> AttentionCall | None:
    if not may_be_differentiated(training):
        return None
    width = layer.head_dim if layer.query_head_dim_normalize else layer.hidden_dim // layer.num_query_heads
    if layer.use_sliding_window_attention and attention_mask is not None:
        attention_mask = layer._mask_sliding_window(attention_mask, cache_update_index=cache_update_index)
    rate, kernel = _rate(layer.dropout, training), layer._use_fused_attention_op()
    return AttentionCall(float(width) ** -0.5, attention_mask, False, rate, layer.dropout_layer, kernel)


def _ask_joint(layer: Any, query: Any) -> AttentionCall | None:
    kernel = keras.backend.backend() == "jax"
    return AttentionCall(layer._inverse_sqrt_key_dim, kernel=kernel) if may_be_differentiated() else None


# By the class that defines `_compute_attention`: what it takes and returns is that class's own.
_ASK: dict[str, Callable[..., AttentionCall | None]] = {
    "keras.MultiHeadAttention": _ask_keras,
    "keras.GroupedQueryAttention": _ask_keras,
    "keras_hub.LlamaAttention": _ask_llama,
    "keras_hub.CachedMistralAttention": _ask_llama,
    "keras_hub.CachedMixtralAttention": _ask_llama,
    "keras_hub.Phi3Attention": _ask_llama,
    "keras_hub.QwenAttention": _ask_llama,
    "keras_hub.Qwen3Attention": _ask_llama,
    "keras_hub.Qwen3MoeAttention": _ask_llama,
    "keras_hub.Qwen3_5Attention": _ask_llama,
    "keras_hub.QwenMoeAttention": _ask_llama,
    "keras_hub.SmolLM3Attention": _ask_llama,
    "keras_hub.GPTNeoXAttention": _ask_neo_x,
    "keras_hub.CachedGemmaAttention": _ask_gemma,
    "keras_hub.CachedGemma3Attention": _ask_gemma,
    "keras_hub.MMDiTBlock": _ask_joint,
}


def _asker(cls: type) -> Callable[..., AttentionCall | None] | None:
    plain = [base for base in cls.__mro__ if package_of(base) != "keras_mp"]
    definer = next((base for base in plain if "_compute_attention" in vars(base)), None)
    return None if definer is None else _ASK.get(f"{package_of(definer)}.{definer.__name__}")


class LeanAttention:
    """Attends leanly while it trains, else in its own way."""

    def _compute_attention(self, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        ask = _asker(type(self))
        call = ask(self, query, *args, **kwargs)  # type: ignore[misc]
        if call is not None:
            mask, known = _by_query(call.mask)
            if known and not (call.kernel and engine.keras_has_kernel(query, key, value)):
                # Keras's operation returns the mean of the values where a row sees none; its softmax makes that 0.
                options: dict[str, Any] = {"unseen": "mean" if call.kernel else "zero"}
                if call.dropout:
                    options |= {"dropout": call.dropout, "seed": call.dropout_layer.seed_generator.next()}
                output = attention(query, key, value, mask, causal=call.causal, scale=call.scale, **options)
                if ask is _ask_joint:
                    shape = (keras.ops.shape(output)[0], -1, self.num_heads * self.head_dim)  # type: ignore[attr-defined]
                    return keras.ops.reshape(output, shape)
                return (output, None) if ask is _ask_keras else output
        return super()._compute_attention(query, key, value, *args, **kwargs)  # type: ignore[misc]


def attends(layer: Any) -> bool:
    """Whether a layer attends, as far as its class says."""
    if isinstance(layer, (keras.layers.Attention, keras.layers.AdditiveAttention)):
        return True
    return hasattr(type(layer), "_compute_attention") or type(layer).__name__.endswith("Attention")


def why_not_attention(layer: Any, cls: type) -> str:
    """Why an attention layer cannot be lean, or ""."""
    if _asker(cls) is None:
        return f"{cls.__name__} has its attention in its own code"
    if getattr(layer, "_flash_attention", False):
        return "flash attention was asked for"
    if getattr(layer, "_value_dim", None) != getattr(layer, "_key_dim", None):
        return "the features of its values are not as many as those of its keys"
    if len(getattr(layer, "_attention_axes", None) or (1,)) > 1:
        return "it attends over more than one axis"
    if getattr(layer, "logit_soft_cap", None):
        return "it caps its scores"
    return ""


def _has_window(layer: Any, length: int | None) -> bool:
    """Whether so many tokens pass a layer's sliding window.

    It is applied on some devices only.
    """
    window = getattr(layer, "sliding_window_size", None)
    if not window or not getattr(layer, "use_sliding_window_attention", True):
        return False
    return length is None or length > window


def _rate(dropout: float, training: bool | None) -> float:
    """Dropout of a call: only layers told to train drop."""
    return dropout if is_training(training) else 0.0


def _by_query(mask: Any) -> tuple[Any, bool]:
    """A mask as `(batch, rows, columns)`, and whether it fits."""
    if mask is None or len(mask.shape) == 3:
        return mask, True
    if len(mask.shape) == 2:
        return keras.ops.expand_dims(mask, 0), True
    return (keras.ops.squeeze(mask, 1), True) if len(mask.shape) == 4 and mask.shape[1] == 1 else (None, False)


# Layers whose GELU keeps only its input while they train.

_EXACT = functools.partial(gelu, approximate=False)
# KerasHub's GELU by tanh, which its models register under both names.
_BY_TANH = ("keras_hub>gelu_approximate", "keras_nlp>gelu_approximate")


def lean_gelu(activation: Any) -> Callable[[Any], Any] | None:
    """The same GELU with less memory, or None."""
    function, arguments, _, registered = activation_of(activation)
    by_tanh = {keras.activations.gelu: False, keras.ops.gelu: True}.get(function if registered else None)
    if by_tanh is not None and arguments.keys() <= {"approximate"}:
        return gelu if arguments.get("approximate", by_tanh) else _EXACT
    return gelu if registered in _BY_TANH and not arguments else None


class LeanGelu:
    """Has the lean GELU while it trains, else its own."""

    @property
    def activation(self) -> Any:
        plain = vars(self)["activation"]
        return (lean_gelu(plain) or plain) if may_be_differentiated() else plain

    @activation.setter
    def activation(self, function: Any) -> None:
        vars(self)["activation"] = function


# Layers of int4 weights that keep these for the backward pass, and not the kernel that they stand for.


def is_int4(layer: Any) -> bool:
    """Whether a layer multiplies by weights of int4."""
    products = (keras.layers.Dense, keras.layers.EinsumDense)
    return isinstance(layer, products) and layer.quantization_mode == "int4"


def why_not_int4(layer: Any, treatments: Collection[str] = ()) -> str:
    """Why an int4 layer cannot be lean, or ""."""
    if "result" in treatments:
        return "it computes the model's output, which is in float32"
    if not keeps_float_inputs(layer):
        return "its inputs are quantized, too"
    return "" if group_count(layer) else "its int4 weights have no groups"


class LeanInt4:
    """Computes the kernel from int4 weights in each pass.

    Keras's own lives from one pass to the other: the compiler sees that both compute the same.
    """

    def _int4_call(self, inputs: Any, training: bool | None = None) -> Any:
        if not may_be_differentiated(training) or why_not_int4(self):
            return super()._int4_call(inputs, training=training)  # type: ignore[misc]
        return called(self, inputs)
