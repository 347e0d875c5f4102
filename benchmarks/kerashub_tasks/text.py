"""Encoders of text: classifiers, masked language models, embedders."""

from collections.abc import Callable
from typing import Any

import keras_hub.models as hub

from benchmarks.kerashub_tasks.task import CLASSES, LENGTH, VOCABULARY, Task, classes, inputs_of, like_outputs

_LAYERS = dict(num_layers=1, hidden_dim=16, intermediate_dim=32)
_SIZES = dict(vocabulary_size=VOCABULARY, num_heads=2, **_LAYERS)
_BOUNDED = dict(**_SIZES, max_sequence_length=LENGTH)

BACKBONES: dict[str, Callable[[], Any]] = {
    "Albert": lambda: hub.AlbertBackbone(**_BOUNDED, embedding_dim=16),
    "Bert": lambda: hub.BertBackbone(**_BOUNDED),
    "DebertaV3": lambda: hub.DebertaV3Backbone(**_BOUNDED, bucket_size=4),
    "DistilBert": lambda: hub.DistilBertBackbone(**_BOUNDED),
    "ESM": lambda: hub.ESMBackbone(**_SIZES),
    "FNet": lambda: hub.FNetBackbone(vocabulary_size=VOCABULARY, max_sequence_length=LENGTH, **_LAYERS),
    "Roberta": lambda: hub.RobertaBackbone(**_BOUNDED),
    "RoformerV2": lambda: hub.RoformerV2Backbone(**_SIZES, head_size=8),
    "XLMRoberta": lambda: hub.XLMRobertaBackbone(**_BOUNDED),
}
CLASSIFIERS = {**{family: f"{family}TextClassifier" for family in BACKBONES}, "ESM": "ESMProteinClassifier"}
MASKED = {**{family: f"{family}MaskedLM" for family in BACKBONES}, "ESM": "ESMMaskedPLM"}


def _classifier(family: str) -> Task:
    def build() -> Any:
        return getattr(hub, CLASSIFIERS[family])(backbone=BACKBONES[family](), num_classes=CLASSES)

    return Task("text classifier", build, classes, inputs_of())


def _masked(family: str) -> Task:
    def build() -> Any:
        return getattr(hub, MASKED[family])(backbone=BACKBONES[family](), preprocessor=None)

    return Task("masked language model", build, classes, inputs_of())


def _embedder(name: str, backbone: Callable[[], Any]) -> Task:
    def build() -> Any:
        return getattr(hub, name)(backbone=backbone(), preprocessor=None)

    return Task("text embedder", build, like_outputs, inputs_of(), {"loss": "mse"})


def _gemma3() -> Any:
    return hub.Gemma3Backbone(
        vocabulary_size=VOCABULARY, image_size=16, num_query_heads=2, num_key_value_heads=1, head_dim=8, **_LAYERS
    )


def _qwen3() -> Any:
    return hub.Qwen3Backbone(
        vocabulary_size=VOCABULARY, num_query_heads=2, num_key_value_heads=2, head_dim=8, **_LAYERS
    )


TASKS = {
    **{name: _classifier(family) for family, name in CLASSIFIERS.items()},
    **{name: _masked(family) for family, name in MASKED.items()},
    "BertTextEmbedder": _embedder("BertTextEmbedder", BACKBONES["Bert"]),
    "Gemma3TextEmbedder": _embedder("Gemma3TextEmbedder", _gemma3),
    "Qwen3TextEmbedder": _embedder("Qwen3TextEmbedder", _qwen3),
    "XLMRobertaTextEmbedder": _embedder("XLMRobertaTextEmbedder", BACKBONES["XLMRoberta"]),
}
