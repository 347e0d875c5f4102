"""KerasHub's blocks of experts: the chosen ones alone."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import keras
from keras import ops

from keras_mp import backend
from keras_mp.backend.common.keras_private import AutocastScope
from keras_mp.lean.experts import chosen_experts, wide
from keras_mp.lean.training_step import may_be_differentiated
from keras_mp.rebuild.quantized_banks import QuantizedBank, quantized_banks
from keras_mp.rebuild.walk import original_class, package_of, treatments_of

EXPERTS = "lean experts"
# Of blocks that have one: the expert that every token has, and its gate.
_SHARED = (("shared_expert_dense", "shared_expert_gate_dense"), ("shared_expert", "_shared_expert_gate"))


class LeanExperts:
    """Chosen experts alone, in training: Mixtral's and Qwen's blocks."""

    def call(self, hidden_states: Any, attention_mask: Any = None, training: bool | None = None) -> Any:
        if not _computes_chosen(training):
            return super().call(hidden_states, attention_mask=attention_mask, training=training)  # type: ignore[misc]
        block: Any = self
        x = ops.reshape(hidden_states, (-1, block.hidden_dim))
        router = block._router_gate if hasattr(block, "_router_gate") else block._sparse_feedforward_gate_dense
        logits = wide(router(x))
        weights, chosen = ops.top_k(ops.softmax(logits, axis=-1), block.top_k)
        if getattr(block, "norm_top_k_prob", True):
            weights = weights / ops.sum(weights, axis=-1, keepdims=True)
        result = _of_bank(block.expert_bank, x, chosen, weights)
        for name, gate in _SHARED:
            if hasattr(block, name):
                result = result + getattr(block, name)(x) * ops.sigmoid(getattr(block, gate)(x))
        if training:
            balance = sys.modules[_definer(block).__module__].compute_load_balancing_loss
            loss = balance(logits, block.num_experts, block.top_k, attention_mask=attention_mask)
            # Mixtral has a shorter name for it.
            factor = getattr(block, "router_aux_loss_coef", None)
            block.add_loss((block.router_aux_loss_coefficient if factor is None else factor) * loss)
        return ops.reshape(result, ops.shape(hidden_states)), logits


class LeanGptOssExperts:
    """Chosen experts alone, in training: GPT-OSS's block.

    Its router returns a weight for each expert.
    """

    def call(self, hidden_states: Any) -> Any:
        if not _computes_chosen():
            return super().call(hidden_states)  # type: ignore[misc]
        block: Any = self
        x = ops.reshape(hidden_states, (-1, block.hidden_dim))
        scores = block.router(x)
        weights, chosen = ops.top_k(scores, block.top_k)
        return ops.reshape(_of_bank(block.experts, x, chosen, weights), ops.shape(hidden_states)), scores


class LeanGemma4Experts:
    """Chosen experts alone, in training: Gemma 4's bank.

    It is given a weight for each expert.
    """

    def call(self, x: Any, dispatch_weights: Any) -> Any:
        if not _computes_chosen():
            return super().call(x, dispatch_weights)  # type: ignore[misc]
        weights, chosen = ops.top_k(dispatch_weights, treatments_of(self)[EXPERTS]["chosen"])
        return _of_bank(self, x, chosen, weights)


def _computes_chosen(training: bool | None = None) -> bool:
    # Where the compiler divides a step over devices, it would gather all tokens to sort them.
    return may_be_differentiated(training) and backend.is_on_one_device()


def _of_bank(bank: Any, x: Any, chosen: Any, weights: Any) -> Any:
    """Sums what a layer's chosen experts make of each token."""
    names, expert = _of_family(_BANKS, bank)(bank)
    variables, integers = [getattr(bank, name) for name in names], quantized_banks(bank)
    values = [
        QuantizedBank(*map(_value, integers[name])) if name in integers else _value(variable)
        for name, variable in zip(names, variables, strict=True)
    ]
    return chosen_experts(x, chosen, weights, values, expert, [variable.trainable for variable in variables])


def has_banks(cls: type) -> bool:
    """Whether a class, without treatments, holds banks of experts."""
    return _of_family(_BANKS, cls) is not None


def bank_names(layer: Any) -> list[str]:
    """Names a layer's attributes with a matrix for each expert."""
    bank = _of_family(_BANKS, layer)
    return [name for name in bank(layer)[0] if len(getattr(layer, name).shape) == 3] if bank else []


def _value(variable: Any) -> Any:
    """Reads a weight in its own dtype; gathers 16 bits."""
    # So the backward pass needs no copy of it.
    with AutocastScope(None):
        value, part = backend.part_of(variable)
    return value if part is None else backend.as_tensor(variable)


# The weights of each family's bank. One of its experts, or all with an axis in front, as KerasHub writes it, times a
# factor for each row.


def _mixtral(bank: Any) -> tuple[list[str], Callable[..., Any]]:
    def expert(x: Any, scale: Any, gate: Any, up: Any, down: Any) -> Any:
        hidden = ops.matmul(x, up) * _in_wide(bank.activation, ops.matmul(x, gate))
        return ops.matmul(hidden * scale, down)

    names = ("gate", "intermediate", "output")
    return [f"_expert_feedforward_{name}_dense" for name in names], expert


def _qwen(bank: Any) -> tuple[list[str], Callable[..., Any]]:
    # Qwen 3.5 has no attribute for its activation, which is in float32.
    activation = getattr(bank, "activation", lambda x: _in_wide(ops.silu, x))

    def expert(x: Any, scale: Any, gate_up: Any, down: Any) -> Any:
        gate, up = ops.split(ops.matmul(x, gate_up), 2, axis=-1)
        return ops.matmul(up * activation(gate) * scale, down)

    return ["_expert_feedforward_gate_dense", "_expert_feedforward_output_dense"], expert


def _gpt_oss(bank: Any) -> tuple[list[str], Callable[..., Any]]:
    def expert(x: Any, scale: Any, gate_up: Any, gate_up_bias: Any, down: Any, down_bias: Any) -> Any:
        both = ops.matmul(x, gate_up) + ops.expand_dims(gate_up_bias, -2)
        gate, up = ops.minimum(both[..., ::2], bank.limit), ops.clip(both[..., 1::2], -bank.limit, bank.limit)
        hidden = (up + 1) * (gate * ops.sigmoid(gate * bank.alpha))
        return ops.matmul(hidden * scale, down) + scale * ops.expand_dims(down_bias, -2)

    return ["gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias"], expert


def _gemma4(bank: Any) -> tuple[list[str], Callable[..., Any]]:
    def expert(x: Any, scale: Any, gate: Any, up: Any, down: Any, factor: Any) -> Any:
        hidden = _in_wide(lambda gate: keras.activations.gelu(gate, approximate=True), ops.matmul(x, gate))
        factor = ops.reshape(factor, (*factor.shape, 1, 1)) if len(factor.shape) else factor
        return ops.matmul(hidden * ops.matmul(x, up) * (scale * factor), down)

    return ["gate_proj", "up_proj", "down_proj", "per_expert_scale"], expert


def _in_wide(function: Callable[[Any], Any], x: Any) -> Any:
    return ops.cast(function(wide(x)), x.dtype)


_BANKS = {
    "MixtralMoeExperts": _mixtral,
    "QwenMoeExperts": _qwen,
    "Qwen3MoeExperts": _qwen,
    "Qwen3_5MoeExperts": _qwen,
    "GptOssExperts": _gpt_oss,
    "Gemma4MoEBlock": _gemma4,
}
# By the class that defines `call`: what it takes and returns is that class's own.
_MIXINS: dict[str, type] = {
    "MixtralSparseMoeBlock": LeanExperts,
    "QwenSparseMoeBlock": LeanExperts,
    "Qwen3SparseMoeBlock": LeanExperts,
    "Qwen3_5MoeSparseMoeBlock": LeanExperts,
    "GptOssSparseMoeBlock": LeanGptOssExperts,
    "Gemma4MoEBlock": LeanGemma4Experts,
}


def _definer(layer_or_class: Any) -> Any:
    """The class, without treatments, that defines `call`."""
    cls = layer_or_class if isinstance(layer_or_class, type) else original_class(layer_or_class)
    return next(base for base in cls.__mro__ if "call" in vars(base))


def _of_family(table: dict[str, Any], layer_or_class: Any) -> Any:
    """A table's entry for KerasHub's class, or None."""
    definer = _definer(layer_or_class)
    return table.get(definer.__name__) if package_of(definer) == "keras_hub" else None


def experts_mixin(cls: type) -> Any:
    """Finds the mixin of a class that chooses experts."""
    return _of_family(_MIXINS, cls)


def experts_of(layer: Any) -> tuple[Any, str, Any]:
    """Finds the experts that a layer chooses from, or None.

    It is the layer that `EXPERTS` treats; with it come the reason why that would not pay, or "", and the options.
    """
    if getattr(layer, "enable_moe_block", False) and hasattr(layer, "moe_expert_bank"):  # Gemma 4's decoder
        chosen, part = layer.num_experts_per_token, layer.moe_expert_bank
        options = {"chosen": chosen}
    elif _of_family(_MIXINS, layer) is not None and hasattr(layer, "top_k"):
        chosen, part, options = layer.top_k, layer, None
    else:
        return None, "", None
    reason = ""
    if getattr(layer, "router_jitter_noise", 0.0):
        reason = "its router adds noise"
    if 5 * chosen >= 2 * layer.num_experts:  # 1.25 times as many rows are computed, and again in the backward pass
        reason = f"a token chooses {chosen} of its {layer.num_experts} experts, so computing all costs no more"
    return part, reason, options
