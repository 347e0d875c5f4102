"""What attention layers compute where Keras finds a TPU, plain and with the kit: python benchmarks/tpu_attention.py

No TPU is needed: the platform is said to be one, and JAX's Splash kernel is interpreted on the CPU. Printed are
norms of the errors of outputs / gradients of weights over their norms; the reference is the same model in float64.
"""

import os
import sys

if __name__ == "__main__":
    os.environ.update(KERAS_BACKEND="jax", JAX_PLATFORMS="cpu")
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import functools
import itertools
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import keras
import keras_hub.models as hub
import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel
from keras import layers
from keras_hub.src.models.stable_diffusion_3.mmdit import MMDiTBlock

import keras_mp
from keras_mp import backend
from keras_mp.backend.common.device import TracedChip

V5E = TracedChip("tpu", None, "TPU v5 lite")
WIDTH, BATCH = 64, 2
_SIZES = {"vocabulary_size": 40, "num_layers": 1, "hidden_dim": WIDTH, "intermediate_dim": WIDTH}
_HEADS = {**_SIZES, "num_heads": 4}
_GROUPED = {**_SIZES, "num_query_heads": 4, "num_key_value_heads": 2}
_GEMMA = {**_GROUPED, "head_dim": 32}


@contextmanager
def on_a_tpu() -> Iterator[list[str]]:
    """A scope in which Keras finds a TPU, whose kernel is interpreted; yields the masks that the kernel was given."""
    make, given = splash_attention_kernel.make_splash_mha, []

    def interpreted(*args: Any, **kwargs: Any) -> Any:
        mask = kwargs["mask"].masks[0]
        given.append(f"{type(mask).__name__}{getattr(mask, 'window_size', '')}")
        return make(*args, **kwargs, interpret=True)

    splash_attention_kernel.make_splash_mha = interpreted
    try:
        with backend.traced_for(V5E):
            yield given
    finally:
        splash_attention_kernel.make_splash_mha = make


def _attention(make: Callable[[], Any], *, padded: bool = False, **call: Any) -> Callable[[int], keras.Model]:
    def build(length: int) -> keras.Model:
        x = inputs = keras.Input((length, WIDTH), name="x")
        if not padded:
            return keras.Model(inputs, make()(x, x, **call))
        padding = keras.Input((length,), dtype="bool", name="padding_mask")
        mask = {"key_mask": padding} if isinstance(make(), layers.MultiHeadAttention) else {"value_mask": padding}
        return keras.Model({"x": inputs, "padding_mask": padding}, make()(x, x, **mask, **call))

    return build


def _vit(length: int) -> keras.Model:
    sizes = {"num_layers": 1, "num_heads": 4, "hidden_dim": WIDTH, "mlp_dim": WIDTH, "use_class_token": False}
    return hub.ViTBackbone(image_shape=(32, length // 2, 3), patch_size=(4, 4), **sizes)


def _joint(length: int) -> keras.Model:
    image, text, step = keras.Input((length - 64, WIDTH)), keras.Input((64, WIDTH)), keras.Input((WIDTH,))
    return keras.Model([image, text, step], MMDiTBlock(4, WIDTH, 4.0, use_context_projection=True)(image, text, step))


def _whisper(length: int) -> keras.Model:
    lengths = {"max_encoder_sequence_length": 2 * length, "max_decoder_sequence_length": length}
    return hub.WhisperBackbone(**_HEADS, num_mels=8, **lengths)


CASES: dict[str, Callable[[int], keras.Model]] = {
    "MultiHeadAttention": _attention(lambda: layers.MultiHeadAttention(4, 16)),
    "MultiHeadAttention, causal": _attention(lambda: layers.MultiHeadAttention(4, 16), use_causal_mask=True),
    "MultiHeadAttention, padded": _attention(lambda: layers.MultiHeadAttention(4, 16), padded=True),
    "MultiHeadAttention, causal, padded": _attention(
        lambda: layers.MultiHeadAttention(4, 16), padded=True, use_causal_mask=True
    ),
    "GroupQueryAttention": _attention(lambda: layers.GroupQueryAttention(16, 4, 2)),
    "GroupQueryAttention, causal": _attention(lambda: layers.GroupQueryAttention(16, 4, 2), use_causal_mask=True),
    "GroupQueryAttention, padded": _attention(lambda: layers.GroupQueryAttention(16, 4, 2), padded=True),
    "Llama": lambda length: hub.LlamaBackbone(**_GROUPED),
    "Gemma": lambda length: hub.GemmaBackbone(**_GEMMA),
    "Gemma 2, soft cap, window": lambda length: hub.GemmaBackbone(
        **_GEMMA, attention_logit_soft_cap=2.0, use_sliding_window_attention=True, sliding_window_size=40
    ),
    "Gemma 3, window": lambda length: hub.Gemma3Backbone(
        **_GEMMA, image_size=16, use_sliding_window_attention=True, sliding_window_size=40
    ),
    "BERT": lambda length: hub.BertBackbone(**_HEADS, dropout=0.0, max_sequence_length=length),
    "ViT": _vit,
    "Whisper": _whisper,
    "Stable Diffusion 3, joint": _joint,
}


def batch(model: keras.Model, length: int) -> Any:
    """Random inputs of a model, of which the last third of the second row is padding."""
    generator = np.random.default_rng()

    def of(tensor: Any) -> np.ndarray:
        shape = (BATCH, *(size or length for size in tensor.shape[1:]))
        if "mask" in tensor.name:
            padding = np.ones(shape, tensor.dtype)
            padding[1, 2 * length // 3 :] = 0
            return padding
        if "segment" in tensor.name:
            return np.zeros(shape, "int32")
        is_float = keras.backend.is_float_dtype(tensor.dtype)
        return generator.normal(size=shape).astype("float32") if is_float else generator.integers(1, 40, shape)

    return keras.tree.map_structure(of, model._inputs_struct)


def numbers(model: keras.Model, x: Any, *, training: bool = True, jit: bool = True) -> list[np.ndarray]:
    """The outputs of a model beside its padding, and gradients of its weights, from sums by fixed random numbers.

    Rows of padding are left out: where one sees no key, KerasHub's layers return another thing on a TPU than on a CPU.
    """
    padding = next((x[name] for name in x if "padding" in name), None) if isinstance(x, dict) else None

    def loss(weights: Any, state: Any) -> Any:
        outputs = jax.tree.leaves(model.stateless_call(weights, state, x, training=training)[0])
        if padding is not None:
            shown = [padding.astype(bool).reshape(*padding.shape, *(1,) * (y.ndim - 2)) for y in outputs]
            length = padding.shape[1]  # an encoder's outputs may have another
            outputs = [y * seen if y.shape[1] == length else y for y, seen in zip(outputs, shown, strict=True)]
        generator, total = np.random.default_rng(1), 0.0
        for output in outputs:
            total += (output.astype("float32") * generator.normal(size=output.shape).astype("float32")).sum()
        return total, outputs

    gradient = jax.value_and_grad(loss, has_aux=True)
    variables = (model.trainable_variables, model.non_trainable_variables)
    values = [[variable.value for variable in some] for some in variables]
    (_, outputs), gradients = (jax.jit(gradient) if jit else gradient)(*values)
    return [np.concatenate([np.ravel(np.asarray(x, "float64")) for x in some]) for some in (outputs, gradients)]


@functools.cache
def _weights(case: str, length: int) -> Any:
    with keras_mp.set_global_policy("float32"):
        model = CASES[case](length)
    generator = np.random.default_rng()
    x = batch(model, length)
    return [value + 0.05 * generator.normal(size=value.shape) for value in model.get_weights()], x


def built(case: str, length: int, policy: str) -> tuple[keras.Model, Any]:
    """A model with the same random weights in each policy, and its inputs."""
    weights, x = _weights(case, length)
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy)
    try:
        model = CASES[case](length)
    finally:
        keras.config.set_dtype_policy(before)
    model.set_weights(weights)
    return model, x


@functools.cache
def reference(case: str, length: int) -> list[np.ndarray]:
    """Outputs and gradients in float64."""
    with jax.enable_x64(True):
        model, x = built(case, length, "float64")
        return numbers(model, x, training=False, jit=False)


def off(found: list[np.ndarray], exact: list[np.ndarray]) -> list[float]:
    """The norms of the errors over the norms of what is right."""
    return [float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in zip(found, exact, strict=True)]


WAYS: dict[str, Callable[[keras.Model], Any]] = {
    "plain": lambda model: model,
    "stabilized": keras_mp.stabilize,
    "prepared": lambda model: keras_mp.prepare(model, "sgd", "mse"),
    "lean": keras_mp.lean.make_lean,
}


def main() -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    print("| layer or model | length | policy | plain Keras | `stabilize` | `make_lean` | computed by |")
    print("| --- | ---: | --- | ---: | ---: | ---: | --- |")
    for case, length in itertools.product(CASES, (256,)):
        exact = reference(case, length)
        for policy in ("float32", "mixed_bfloat16"):
            cells = []
            for way in ("plain", "stabilized", "lean"):
                model, x = built(case, length, policy)
                WAYS[way](model)
                with on_a_tpu() as given:
                    errors = off(numbers(model, x), exact)
                cells.append(" / ".join(f"{error:.0e}" for error in errors))
            cells.append("Splash" if given else "the kit's own form")
            print(f"| {case} | {length} | {policy} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
