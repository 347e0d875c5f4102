"""Causal language models, and those with an encoder."""

from collections.abc import Callable
from typing import Any

import keras_hub.models as hub

from kerashub_tasks.task import LENGTH, VOCABULARY, Task, classes, inputs_of

_LAYERS = dict(vocabulary_size=VOCABULARY, num_layers=1, hidden_dim=16, intermediate_dim=32)
_HEADS = dict(**_LAYERS, num_heads=2)
_GROUPED = dict(**_LAYERS, num_query_heads=4, num_key_value_heads=2)
_LINEAR = dict(
    num_layers=2,
    layer_types=["linear_attention", "full_attention"],
    partial_rotary_factor=0.25,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=4,
    linear_value_head_dim=4,
    linear_conv_kernel_dim=4,
)


def _without(settings: dict[str, Any], *names: str) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if key not in names}


def _encoder_and_decoder(**settings: Any) -> dict[str, Any]:
    """Each setting once for the encoder and once for the decoder."""
    return {f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in settings.items()}


def _gemma3n() -> Any:
    return hub.Gemma3nBackbone(
        text_vocab_size=VOCABULARY, text_hidden_size=16, num_hidden_layers=1, pad_token_id=0, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, intermediate_size=[32], hidden_activation="gelu_approximate",
        layer_types=["full_attention"], sliding_window=4, rope_theta=10000.0, max_position_embeddings=LENGTH,
        vocab_size_per_layer_input=VOCABULARY, hidden_size_per_layer_input=4, altup_num_inputs=2, laurel_rank=2,
    )  # fmt: skip


def _smollm3() -> Any:
    return hub.SmolLM3Backbone(
        **_LAYERS, num_attention_heads=4, num_key_value_heads=2, attention_bias=False, attention_dropout=0.0,
        rope_layer_enabled_list=[True], layer_types=["attention"], mlp_bias=False,
        layer_norm_epsilon=1e-5, max_position_embeddings=LENGTH, rope_theta=10000.0, partial_rotary_factor=1.0,
    )  # fmt: skip


BACKBONES: dict[str, Callable[[], Any]] = {
    "Bloom": lambda: hub.BloomBackbone(**_HEADS),
    "Falcon": lambda: hub.FalconBackbone(**_LAYERS, num_attention_heads=2),
    "Gemma": lambda: hub.GemmaBackbone(**_GROUPED, head_dim=8),
    "Gemma3": lambda: hub.Gemma3Backbone(**_GROUPED, head_dim=8, image_size=16),
    "Gemma3n": _gemma3n,
    "Gemma4": lambda: hub.Gemma4Backbone(**_GROUPED, head_dim=8, image_size=16),
    "GPT2": lambda: hub.GPT2Backbone(**_HEADS, max_sequence_length=LENGTH),
    "GPTNeoX": lambda: hub.GPTNeoXBackbone(**_HEADS, max_sequence_length=LENGTH),
    "GptOss": lambda: hub.GptOssBackbone(**_GROUPED, num_experts=2),
    "Llama": lambda: hub.LlamaBackbone(**_GROUPED),
    "Llama3": lambda: hub.Llama3Backbone(**_GROUPED),
    "Mistral": lambda: hub.MistralBackbone(**_GROUPED),
    "Mixtral": lambda: hub.MixtralBackbone(**_GROUPED, num_experts=2),
    "OPT": lambda: hub.OPTBackbone(**_HEADS, max_sequence_length=LENGTH),
    "Phi3": lambda: hub.Phi3Backbone(**_GROUPED),
    "Qwen": lambda: hub.QwenBackbone(**_GROUPED),
    "Qwen3": lambda: hub.Qwen3Backbone(**_GROUPED, head_dim=8),
    "Qwen3_5": lambda: hub.Qwen3_5Backbone(**_without(_GROUPED, "num_layers"), head_dim=8, **_LINEAR),
    "Qwen3_5Moe": lambda: hub.Qwen3_5MoeBackbone(
        **_without(_GROUPED, "num_layers", "intermediate_dim"), head_dim=8, moe_intermediate_dim=16,
        shared_expert_intermediate_size=16, num_experts=4, top_k=2, router_aux_loss_coefficient=0.01, **_LINEAR,
    ),
    "Qwen3Moe": lambda: hub.Qwen3MoeBackbone(**_GROUPED, head_dim=8, moe_intermediate_dim=16, num_experts=4),
    "QwenMoe": lambda: hub.QwenMoeBackbone(
        **_GROUPED, moe_intermediate_dim=16, shared_expert_intermediate_dim=16, num_experts=4
    ),
    "RWKV7": lambda: hub.RWKV7Backbone(
        vocabulary_size=VOCABULARY, hidden_size=16, num_layers=2, head_size=4, intermediate_dim=32, gate_lora=8,
        mv_lora=4, aaa_lora=4, decay_lora=4,
    ),
    "SmolLM3": _smollm3,
}  # fmt: skip

SEQUENCE_TO_SEQUENCE: dict[str, Callable[[], Any]] = {
    "Bart": lambda: hub.BartBackbone(**_HEADS, max_sequence_length=LENGTH),
    "EdRec": lambda: hub.EdRecBackbone(
        vocab_size=VOCABULARY, num_layers_enc=1, num_layers_dec=1, num_heads=2, hidden_dim=16, intermediate_dim=32
    ),
    "T5": lambda: hub.T5Backbone(**_HEADS),
    "T5Gemma": lambda: hub.T5GemmaBackbone(
        vocabulary_size=VOCABULARY, tie_word_embeddings=False, query_pre_attn_scalar=1.0, attention_bias=False,
        hidden_activation="gelu_approximate", sliding_window=4, final_logit_softcapping=30.0,
        **_encoder_and_decoder(
            hidden_dim=16, intermediate_dim=32, num_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
            layer_types=["sliding_attention"],
        ),
    ),
    "T5Gemma2": lambda: hub.T5Gemma2Backbone(
        vocabulary_size=VOCABULARY, tie_word_embeddings=True, query_pre_attn_scalar=1.0, attention_bias=False,
        hidden_activation="gelu_approximate", cross_attention_hidden_size=16, use_query_key_norm=True,
        **_encoder_and_decoder(
            hidden_dim=16, intermediate_dim=32, num_layers=1, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
            layer_types=["full_attention"],
        ),
    ),
}  # fmt: skip


def _task(family: str, name: str, backbone: Callable[[], Any]) -> Task:
    def build() -> Any:
        return getattr(hub, name)(backbone=backbone(), preprocessor=None)

    return Task(family, build, classes, inputs_of())


TASKS = {
    **{f"{name}CausalLM": _task("causal language model", f"{name}CausalLM", make) for name, make in BACKBONES.items()},
    **{
        f"{name}Seq2SeqLM": _task("sequence to sequence", f"{name}Seq2SeqLM", make)
        for name, make in SEQUENCE_TO_SEQUENCE.items()
    },
}
