"""Layers that keep less for the backward pass: attention, GELU, products of int4 weights."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import keras

from keras_mp import backend
from keras_mp.lean.blockwise_attention import attention
from keras_mp.lean.gelu import gelu
from keras_mp.lean.training_step import is_training, may_be_differentiated
from keras_mp.stability.float32_layers import activation_of
from keras_mp.stability.quantized_product import called, group_count, keeps_float_inputs
from keras_mp.system.packages import package_of

engine = backend.engine_of(__package__)

# Attention layers of Keras and KerasHub that attend as `keras_mp.lean.attention` does while they train.


class AttentionCall(NamedTuple):
    """What a layer asks of attention, besides query, key and value.

    Attributes:
        scale: the factor of the scores.
        mask: the mask as the layer has it; None for none.
        causal: whether a row sees only the columns up to its own.
        dropout: the share of the probabilities that is dropped.
        dropout_layer: the layer that draws for the dropout.
        kernel: whether the layer's own code computes by `keras.ops.dot_product_attention`.
    """

    scale: float
    mask: Any = None
    causal: bool = False
    dropout: float = 0.0
    dropout_layer: Any = None
    kernel: bool = True


class LeanAttention:
    """Attends leanly while it trains, and in its own way else, so that inference returns what it did."""

    def _compute_attention(self, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        call = self._attention_call(query, *args, **kwargs)
        if call is not None:
            mask, known = _by_query(call.mask)
            if known and not (call.kernel and engine.keras_has_kernel(query, key, value)):
                return self._attention_result(_attend(query, key, value, mask, call))
        return super()._compute_attention(query, key, value, *args, **kwargs)  # type: ignore[misc]

    def _attention_call(self, query: Any, *args: Any, **kwargs: Any) -> AttentionCall | None:
        """What the layer asks for; None where it attends in its own way."""
        raise NotImplementedError

    def _attention_result(self, output: Any) -> Any:
        return output


class LeanMultiHeadAttention(LeanAttention):
    """Lean attention for `keras.layers.MultiHeadAttention` and what KerasHub derives from it."""

    def _attention_call(
        self,
        query: Any,
        attention_mask: Any = None,
        training: bool | None = None,
        return_attention_scores: bool = False,
        use_causal_mask: bool = False,
    ) -> AttentionCall | None:
        if not may_be_differentiated(training) or return_attention_scores or len(query.shape) != 4:
            return None
        rate, kernel = _rate(self._dropout, training), not self._dropout  # type: ignore[attr-defined]
        scale, layer = self._inverse_sqrt_key_dim, self._dropout_layer  # type: ignore[attr-defined]
        return AttentionCall(scale, attention_mask, use_causal_mask, rate, layer, kernel)

    def _attention_result(self, output: Any) -> Any:
        return output, None


class LeanGroupedQueryAttention(LeanAttention):
    """Lean attention for `keras.layers.GroupQueryAttention`, which repeats keys and values for each query head."""

    def _attention_call(
        self, query: Any, attention_mask: Any = None, training: bool | None = None, use_causal_mask: bool = False
    ) -> AttentionCall | None:
        if not may_be_differentiated(training) or self._return_attention_scores:  # type: ignore[attr-defined]
            return None
        rate, kernel = _rate(self.dropout, training), not self.dropout  # type: ignore[attr-defined]
        scale, layer = self._inverse_sqrt_head_dim, self._dropout_layer  # type: ignore[attr-defined]
        return AttentionCall(scale, attention_mask, use_causal_mask, rate, layer, kernel)

    def _attention_result(self, output: Any) -> Any:
        return output, None


class LeanDecoderAttention(LeanAttention):
    """Lean attention for KerasHub's Llama, and of the models that are written after it."""

    def _attention_call(
        self, query: Any, attention_mask: Any = None, cache_update_index: Any = None, **options: Any
    ) -> AttentionCall | None:
        if not may_be_differentiated() or options or _has_window(self, query.shape[1]):
            return None
        fused = getattr(self, "_use_fused_attention_op", lambda: keras.backend.backend() == "jax")
        return AttentionCall(self._inv_norm_factor, attention_mask, kernel=fused())  # type: ignore[attr-defined]


class LeanNeoXAttention(LeanAttention):
    """Lean attention for KerasHub's GPT-NeoX."""

    def _attention_call(
        self, query: Any, attention_mask: Any = None, training: bool | None = None
    ) -> AttentionCall | None:
        if not may_be_differentiated(training):
            return None
        rate, layer = _rate(self.dropout, training), self._attn_dropout_layer  # type: ignore[attr-defined]
        kernel = keras.backend.backend() == "jax" and not self.dropout  # type: ignore[attr-defined]
        return AttentionCall(self._inv_norm_factor, attention_mask, False, rate, layer, kernel)  # type: ignore[attr-defined]


class LeanGemmaAttention(LeanAttention):
    """Lean attention for KerasHub's Gemma and Gemma 3, whose windows are a part of the mask."""

    def _attention_call(
        self, query: Any, attention_mask: Any, training: bool | None = False, cache_update_index: Any = 0
    ) -> AttentionCall | None:
        if not may_be_differentiated(training):
            return None
        width = self.head_dim if self.query_head_dim_normalize else self.hidden_dim // self.num_query_heads  # type: ignore[attr-defined]
        if self.use_sliding_window_attention and attention_mask is not None:  # type: ignore[attr-defined]
            attention_mask = self._mask_sliding_window(attention_mask, cache_update_index=cache_update_index)  # type: ignore[attr-defined]
        rate, kernel = _rate(self.dropout, training), self._use_fused_attention_op()  # type: ignore[attr-defined]
        return AttentionCall(float(width) ** -0.5, attention_mask, False, rate, self.dropout_layer, kernel)  # type: ignore[attr-defined]


class LeanJointAttention(LeanAttention):
    """Lean attention for the blocks of KerasHub's Stable Diffusion 3, which attend over image and text together."""

    def _attention_call(self, query: Any) -> AttentionCall | None:
        kernel = keras.backend.backend() == "jax"
        return AttentionCall(self._inverse_sqrt_key_dim, kernel=kernel) if may_be_differentiated() else None  # type: ignore[attr-defined]

    def _attention_result(self, output: Any) -> Any:
        return keras.ops.reshape(output, (keras.ops.shape(output)[0], -1, self.num_heads * self.head_dim))  # type: ignore[attr-defined]


# By the class that defines `_compute_attention`: what it takes and returns is that class's own.
_MIXINS = {
    "keras.MultiHeadAttention": LeanMultiHeadAttention,
    "keras.GroupedQueryAttention": LeanGroupedQueryAttention,
    "keras_hub.LlamaAttention": LeanDecoderAttention,
    "keras_hub.CachedMistralAttention": LeanDecoderAttention,
    "keras_hub.CachedMixtralAttention": LeanDecoderAttention,
    "keras_hub.Phi3Attention": LeanDecoderAttention,
    "keras_hub.QwenAttention": LeanDecoderAttention,
    "keras_hub.Qwen3Attention": LeanDecoderAttention,
    "keras_hub.Qwen3MoeAttention": LeanDecoderAttention,
    "keras_hub.Qwen3_5Attention": LeanDecoderAttention,
    "keras_hub.QwenMoeAttention": LeanDecoderAttention,
    "keras_hub.SmolLM3Attention": LeanDecoderAttention,
    "keras_hub.GPTNeoXAttention": LeanNeoXAttention,
    "keras_hub.CachedGemmaAttention": LeanGemmaAttention,
    "keras_hub.CachedGemma3Attention": LeanGemmaAttention,
    "keras_hub.MMDiTBlock": LeanJointAttention,
}


def attention_mixin(cls: type) -> type[LeanAttention] | None:
    """The mixin for a class that attends; None where there is none."""
    plain = [base for base in cls.__mro__ if package_of(base) != "keras_mp"]
    definer = next((base for base in plain if "_compute_attention" in vars(base)), None)
    return None if definer is None else _MIXINS.get(f"{package_of(definer)}.{definer.__name__}")


def attends(layer: Any) -> bool:
    """Whether a layer is an attention layer, as far as its class says."""
    if isinstance(layer, (keras.layers.Attention, keras.layers.AdditiveAttention)):
        return True
    return hasattr(type(layer), "_compute_attention") or type(layer).__name__.endswith("Attention")


def why_not_attention(layer: Any, cls: type) -> str:
    """Why an attention layer cannot be lean; empty where it can.

    Args:
        cls: the layer's class, without treatments.
    """
    if attention_mixin(cls) is None:
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
    """Whether a layer has a sliding window, which it applies on some devices only, and which so many tokens pass."""
    window = getattr(layer, "sliding_window_size", None)
    if not window or not getattr(layer, "use_sliding_window_attention", True):
        return False
    return length is None or length > window


def _rate(dropout: float, training: bool | None) -> float:
    """The dropout of a call: only a layer that is told to train drops something."""
    return dropout if is_training(training) else 0.0


def _by_query(mask: Any) -> tuple[Any, bool]:
    """A mask as `(batch, rows or 1, columns)`, and whether it has that form."""
    if mask is None or len(mask.shape) == 3:
        return mask, True
    if len(mask.shape) == 2:
        return keras.ops.expand_dims(mask, 0), True
    return (keras.ops.squeeze(mask, 1), True) if len(mask.shape) == 4 and mask.shape[1] == 1 else (None, False)


def _attend(query: Any, key: Any, value: Any, mask: Any, call: AttentionCall) -> Any:
    # Keras's operation returns the mean of the values where a row sees none; its softmax layer makes that 0.
    options: dict[str, Any] = {"unseen": "mean" if call.kernel else "zero"}
    if call.dropout:
        options |= {"dropout": call.dropout, "seed": call.dropout_layer.seed_generator.next()}
    return attention(query, key, value, mask, causal=call.causal, scale=call.scale, **options)


# Layers whose GELU keeps only its input while they train.

_EXACT = functools.partial(gelu, approximate=False)
# KerasHub's GELU by tanh, which its models register under both names.
_BY_TANH = ("keras_hub>gelu_approximate", "keras_nlp>gelu_approximate")


def lean_gelu(activation: Any) -> Callable[[Any], Any] | None:
    """The same GELU with less memory; None for any other activation."""
    function, arguments, _, registered = activation_of(activation)
    by_tanh = {keras.activations.gelu: False, keras.ops.gelu: True}.get(function if registered else None)
    if by_tanh is not None and arguments.keys() <= {"approximate"}:
        return gelu if arguments.get("approximate", by_tanh) else _EXACT
    return gelu if registered in _BY_TANH and not arguments else None


class LeanGelu:
    """Has the lean GELU as its activation while it trains, and its own else."""

    @property
    def activation(self) -> Any:
        plain = vars(self)["activation"]
        return (lean_gelu(plain) or plain) if may_be_differentiated() else plain

    @activation.setter
    def activation(self, function: Any) -> None:
        vars(self)["activation"] = function


# Layers of int4 weights that keep these for the backward pass, and not the kernel that they stand for.


def is_int4(layer: Any) -> bool:
    """Whether a layer multiplies by weights that Keras quantized to int4."""
    products = (keras.layers.Dense, keras.layers.EinsumDense)
    return isinstance(layer, products) and layer.quantization_mode == "int4"


def why_not_int4(layer: Any, treatments: Collection[str] = ()) -> str:
    """Why an int4 layer cannot be lean; "" where it can.

    Args:
        treatments: the treatments that the layer has, by their names in `keras_mp.stability.stabilized`.
    """
    if "result" in treatments:
        return "it computes the model's output, which is in float32"
    if not keeps_float_inputs(layer):
        return "its inputs are quantized, too"
    return "" if group_count(layer) else "its int4 weights have no groups"


class LeanInt4:
    """Computes the kernel from its int4 weights in the forward pass, and again in the backward pass.

    Keras's own lives from one pass to the other: the compiler sees that both compute the same.
    """

    def _int4_call(self, inputs: Any, training: bool | None = None) -> Any:
        if not may_be_differentiated(training) or why_not_int4(self):
            return super()._int4_call(inputs, training=training)  # type: ignore[misc]
        return called(self, inputs)
