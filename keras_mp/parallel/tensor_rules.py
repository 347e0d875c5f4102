"""Which axis of a weight is split in tensor parallelism: rules for the kit's GPT and ViT, by the paths of weights.

Shoeybi et al., "Megatron-LM", 2019 (arXiv:1909.08053), section 3: the first of two products is split by columns, the
second by rows, so that a branch needs one sum over the devices; the embedding is split by words.
"""

from __future__ import annotations

Rules = tuple[tuple[str, tuple[str | None, ...]], ...]

# The path of an optimizer's slot has "_" where a variable's has "/".
TRANSFORMER: Rules = (
    (r"attention[/_]query_key_value[/_]kernel", (None, "model")),
    (r"attention[/_]query_key_value[/_]bias", ("model",)),
    (r"attention[/_]output[/_]kernel", ("model", None)),
    (r"dense_1[/_]kernel", (None, "model")),
    (r"dense_1[/_]bias", ("model",)),
    (r"dense_2[/_]kernel", ("model", None)),
    (r"tokens_embedding[/_]embeddings", ("model", None)),
)
