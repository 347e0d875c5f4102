"""KerasHub's models that end in logits over a vocabulary, of a few thousand weights each."""

from typing import Any

import numpy as np
import pytest

keras_hub = pytest.importorskip("keras_hub", reason="the models are KerasHub's: pip install keras-hub")

VOCABULARY = 40
_HEADS = {"vocabulary_size": VOCABULARY, "num_layers": 2, "num_heads": 2, "hidden_dim": 16, "intermediate_dim": 32}
_GROUPS = {
    "vocabulary_size": VOCABULARY, "num_layers": 2, "num_query_heads": 4, "num_key_value_heads": 2, "hidden_dim": 16,
    "intermediate_dim": 32,
}  # fmt: skip
_GEMMA = {**_GROUPS, "head_dim": 4}
_EXPERTS = {**_GROUPS, "num_experts": 2, "top_k": 1}
_LINEAR = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 4, "linear_value_head_dim": 4,
    "partial_rotary_factor": 0.5, "head_dim": 8,
}  # fmt: skip
_TWO_SIDES = {
    f"{side}_{name}": value
    for side in ("encoder", "decoder")
    for name, value in {
        "hidden_dim": 16, "intermediate_dim": 32, "num_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 4, "layer_types": ["full_attention", "sliding_attention"],
    }.items()
}  # fmt: skip
_FALCON = {key: value for key, value in _HEADS.items() if key != "num_heads"}

# By the name of the task: the name of the backbone and its arguments.
DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "BloomCausalLM": ("BloomBackbone", _HEADS),
    "FalconCausalLM": ("FalconBackbone", {**_FALCON, "num_attention_heads": 2}),
    "GPT2CausalLM": ("GPT2Backbone", {**_HEADS, "max_sequence_length": 8}),
    "GPTNeoXCausalLM": ("GPTNeoXBackbone", {**_HEADS, "max_sequence_length": 8}),
    "Gemma3CausalLM": ("Gemma3Backbone", {**_GEMMA, "image_size": None, "final_logit_soft_cap": 3.0}),
    "Gemma4CausalLM": ("Gemma4Backbone", {**_GEMMA, "image_size": None, "final_logit_soft_cap": 3.0}),
    "GemmaCausalLM": ("GemmaBackbone", {**_GEMMA, "final_logit_soft_cap": 3.0}),
    "GptOssCausalLM": ("GptOssBackbone", _EXPERTS),
    "Llama3CausalLM": ("Llama3Backbone", {**_GROUPS, "tie_word_embeddings": True}),
    "LlamaCausalLM": ("LlamaBackbone", _GROUPS),
    "MistralCausalLM": ("MistralBackbone", _GROUPS),
    "MixtralCausalLM": ("MixtralBackbone", _EXPERTS),
    "OPTCausalLM": ("OPTBackbone", {**_HEADS, "max_sequence_length": 8}),
    "Phi3CausalLM": ("Phi3Backbone", _GROUPS),
    "Qwen3CausalLM": ("Qwen3Backbone", {**_GROUPS, "head_dim": 4}),
    "Qwen3MoeCausalLM": ("Qwen3MoeBackbone", {**_EXPERTS, "head_dim": 4, "moe_intermediate_dim": 16}),
    "Qwen3_5CausalLM": ("Qwen3_5Backbone", {**_GROUPS, **_LINEAR}),
    "QwenCausalLM": ("QwenBackbone", _GROUPS),
    "QwenMoeCausalLM": (
        "QwenMoeBackbone", {**_EXPERTS, "moe_intermediate_dim": 16, "shared_expert_intermediate_dim": 16},
    ),
    "RWKV7CausalLM": (
        "RWKV7Backbone",
        {"hidden_size": 16, "head_size": 8, "num_layers": 2, "vocabulary_size": VOCABULARY, "intermediate_dim": 32},
    ),
    "SmolLM3CausalLM": (
        "SmolLM3Backbone",
        {"vocabulary_size": VOCABULARY, "hidden_dim": 16, "intermediate_dim": 32, "num_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "attention_bias": False, "attention_dropout": 0.0,
         "rope_layer_enabled_list": [True, True], "layer_types": ["full_attention"] * 2, "mlp_bias": False,
         "layer_norm_epsilon": 1e-6, "max_position_embeddings": 8, "rope_theta": 1e4, "partial_rotary_factor": 1.0},
    ),
}  # fmt: skip
TWO_SIDED: dict[str, tuple[str, dict[str, Any]]] = {
    "BartSeq2SeqLM": ("BartBackbone", {**_HEADS, "max_sequence_length": 8}),
    "T5Seq2SeqLM": ("T5Backbone", _HEADS),
    "T5GemmaSeq2SeqLM": ("T5GemmaBackbone", {"vocabulary_size": VOCABULARY, **_TWO_SIDES, "sliding_window": 4}),
}


def build(name: str, **changed: Any) -> Any:
    """The named task, with random weights, under the global policy; `changed` are arguments of its backbone."""
    backbone, arguments = (DECODERS | TWO_SIDED)[name]
    built = getattr(keras_hub.models, backbone)(**{**arguments, **changed})
    return getattr(keras_hub.models, name)(backbone=built, preprocessor=None)


def batch(model: Any) -> dict[str, np.ndarray]:
    """Four rows of eight tokens for each of the model's inputs."""
    random = np.random.default_rng()
    return {
        tensor.name: np.ones((4, 8), "int32") if "mask" in tensor.name else random.integers(1, VOCABULARY, (4, 8))
        for tensor in model.inputs
    }
