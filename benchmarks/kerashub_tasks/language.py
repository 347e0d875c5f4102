"""Causal language models, and those with an encoder: those of `causal_models`, and some more."""

from typing import Any

import causal_models
import keras_hub.models as hub

from benchmarks.kerashub_tasks.task import LENGTH, VOCABULARY, Task, classes, inputs_of

_SIZES = dict(vocabulary_size=VOCABULARY, hidden_dim=16, num_query_heads=4, num_key_value_heads=2, head_dim=8)
_SIDE = dict(
    hidden_dim=16, intermediate_dim=32, num_layers=1, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
    layer_types=["full_attention"],
)  # fmt: skip
MORE: dict[str, tuple[str, dict[str, Any]]] = {
    "Gemma3nCausalLM": ("Gemma3nBackbone", dict(
        text_vocab_size=VOCABULARY, text_hidden_size=16, num_hidden_layers=1, pad_token_id=0, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, intermediate_size=[32], hidden_activation="gelu_approximate",
        layer_types=["full_attention"], sliding_window=4, rope_theta=10000.0, max_position_embeddings=LENGTH,
        vocab_size_per_layer_input=VOCABULARY, hidden_size_per_layer_input=4, altup_num_inputs=2, laurel_rank=2,
    )),
    "Qwen3_5MoeCausalLM": ("Qwen3_5MoeBackbone", dict(
        **_SIZES, moe_intermediate_dim=16, shared_expert_intermediate_size=16, num_experts=4, top_k=2, num_layers=2,
        router_aux_loss_coefficient=0.01, layer_types=["linear_attention", "full_attention"],
        partial_rotary_factor=0.25, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=4,
        linear_value_head_dim=4, linear_conv_kernel_dim=4,
    )),
    "EdRecSeq2SeqLM": ("EdRecBackbone", dict(
        vocab_size=VOCABULARY, num_layers_enc=1, num_layers_dec=1, num_heads=2, hidden_dim=16, intermediate_dim=32,
    )),
    "T5Gemma2Seq2SeqLM": ("T5Gemma2Backbone", dict(
        vocabulary_size=VOCABULARY, tie_word_embeddings=True, query_pre_attn_scalar=1.0, attention_bias=False,
        hidden_activation="gelu_approximate", cross_attention_hidden_size=16, use_query_key_norm=True,
        **{f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in _SIDE.items()},
    )),
}  # fmt: skip


def _task(name: str) -> Task:
    def build() -> Any:
        if name not in MORE:
            return causal_models.build(name)
        backbone, settings = MORE[name]
        return getattr(hub, name)(backbone=getattr(hub, backbone)(**settings), preprocessor=None)

    return Task("causal language model" if "Causal" in name else "sequence to sequence", build, classes, inputs_of())


TASKS = {name: _task(name) for name in (*causal_models.DECODERS, *causal_models.TWO_SIDED, *MORE)}
