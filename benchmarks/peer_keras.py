"""The kit, and plain Keras: training steps of the same model, as subjects of a benchmark."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import keras
from keras import layers
from peer_workloads import WORKLOADS, Workload, batch_of, details_of

import keras_mp
from keras_mp.bench.keras_step import check_can_run, of_model
from keras_mp.bench.subject import Subject
from models.gpt import gpt
from models.resnet import resnet_imagenet
from models.transformer import Size, add_positions, initializer
from models.vit import vit
from recipes.common.compiled import compiled


def kit(workload: str, precision: str, fp8: str = "current") -> Subject:
    """The kit's model, in a precision and compiled as its recipes are."""
    check_can_run(precision)
    chosen = WORKLOADS[workload]
    keras.utils.set_random_seed(0)
    choice = keras_mp.set_global_policy(precision)
    lean = chosen.kind == "gpt"
    loss = keras_mp.ChunkedCrossEntropy() if lean else _cross_entropy()
    model = compiled(kit_model(chosen), choice, _optimizer(), loss, fp8=fp8)
    return _subject(model, chosen, precision)


def plain(workload: str, policy: str, jit: bool | str = "auto", float8: bool = False) -> Subject:
    """The same model of Keras's layers alone, under a policy of Keras's; on request with Keras's own float8 layers."""
    chosen = WORKLOADS[workload]
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy(policy)
    model = plain_model(chosen)
    if float8:
        for layer in model._flatten_layers():
            if isinstance(layer, (layers.Dense, layers.EinsumDense)):
                layer.quantize("float8")
    model.compile(_optimizer(), _cross_entropy(), jit_compile=jit)
    return _subject(model, chosen, policy)


def kit_model(workload: Workload) -> keras.Model:
    """The model of `models/`."""
    if workload.kind == "gpt":
        *size, vocabulary, length = workload.sizes
        return gpt(Size(*size), vocabulary, length)
    if workload.kind == "vit":
        *size, classes, side, patch = workload.sizes
        return vit(Size(*size), classes, (side, side, 3), patch)
    return _resnet(*workload.sizes)


def plain_model(workload: Workload) -> keras.Model:
    """The model as it is written without the kit."""
    if workload.kind == "gpt":
        return plain_gpt(*workload.sizes)
    if workload.kind == "vit":
        return plain_vit(*workload.sizes)
    return _resnet(*workload.sizes)  # has nothing of the kit


def plain_gpt(layer_count: int, width: int, heads: int, vocabulary: int, length: int) -> keras.Model:
    """The GPT of models/gpt.py of Keras's layers alone."""
    embedding = layers.ReversibleEmbedding(vocabulary, width, embeddings_initializer=initializer())
    tokens = keras.Input((length,), dtype="int32")
    x = add_positions(embedding(tokens))
    for _ in range(layer_count):
        x = _block(x, width, heads, 1e-5, causal=True)
    logits = embedding(layers.LayerNormalization(epsilon=1e-5)(x), reverse=True)
    return keras.Model(tokens, layers.Activation("linear", dtype="float32")(logits))


def plain_vit(layer_count: int, width: int, heads: int, classes: int, side: int, patch: int) -> keras.Model:
    """The vision transformer of models/vit.py of Keras's layers alone."""
    images = keras.Input((side, side, 3))
    x = layers.Conv2D(width, patch, patch, kernel_initializer=initializer())(images)
    x = layers.Reshape((-1, width))(x)
    entry = keras.ops.zeros_like(x[:, :1, 0], dtype="int32")
    class_token = layers.Embedding(1, width, embeddings_initializer=initializer())(entry)
    x = add_positions(layers.Concatenate(axis=1)([class_token, x]))
    for _ in range(layer_count):
        x = _block(x, width, heads, 1e-6, causal=False)
    x = layers.LayerNormalization(epsilon=1e-6)(x)
    logits = layers.Dense(classes, kernel_initializer=initializer())(x[:, 0])
    return keras.Model(images, layers.Activation("linear", dtype="float32")(logits))


def _block(x: Any, width: int, heads: int, epsilon: float, causal: bool) -> Any:
    y = layers.LayerNormalization(epsilon=epsilon)(x)
    attention = layers.MultiHeadAttention(heads, width // heads, kernel_initializer=initializer())
    x = layers.Add()([x, attention(y, y, use_causal_mask=causal)])
    y = layers.LayerNormalization(epsilon=epsilon)(x)
    y = layers.Dense(4 * width, kernel_initializer=initializer())(y)
    y = keras.ops.gelu(y, approximate=True)
    return layers.Add()([x, layers.Dense(width, kernel_initializer=initializer())(y)])


def _resnet(depth: int, classes: int, side: int) -> keras.Model:
    return resnet_imagenet(depth, classes, (side, side, 3), stem="small" if side < 64 else "large")


def _optimizer() -> keras.optimizers.Optimizer:
    return keras.optimizers.AdamW(1e-4, weight_decay=0.01)


def _cross_entropy() -> keras.losses.Loss:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def _subject(model: keras.Model, workload: Workload, precision: str) -> Subject:
    subject = of_model(model, batch_of(workload), precision)
    return subject._replace(details=subject.details | details_of(workload))
