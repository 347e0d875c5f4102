"""Numerics on the chip: each check measures here and compares with float64, or with a run that needs no such chip."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
from fp8_sqnr import decibels

import keras_mp
from benchmarks.gpu_minutes.process import emit
from keras_mp import backend
from keras_mp.conversion.other_precision import in_precision
from keras_mp.fp8 import Scalings, matmul
from keras_mp.lean.blockwise_attention import attention
from models.gpt import gpt
from models.transformer import Size

engine = backend.engine_of("keras_mp.lean")

Row = dict[str, Any]
PRODUCTS = ("forward, dB", "input gradient, dB", "kernel gradient, dB")


def main(tiny: bool) -> None:
    """Runs the checks in the order of worth; one that fails says why, and the next begins."""
    for check in (sqnr, fused_attention, planted_overflows, audit_against_float16, remat_gradients):
        try:
            for row in check(tiny):
                emit({"check": check.__name__.replace("_", " ")} | row)
        except Exception as error:
            emit({"check": check.__name__.replace("_", " "), "problem": f"{type(error).__name__}: {error}"[:500]})


def sqnr(tiny: bool) -> Iterator[Row]:
    """FP8 products on this chip and, emulated, on the CPU: signal to quantization noise against float64."""
    size, rng = (64 if tiny else 2048), np.random.default_rng()
    x, w, g = (rng.normal(size=(size, size)).astype("float32") for _ in range(3))
    exact = [a.astype("float64") @ b.astype("float64") for a, b in ((x, w), (g, w.T), (x.T, g))]
    recipes = {
        "current": Scalings.named("current"),
        "delayed": Scalings.named("delayed"),
        "rowwise": Scalings.named("rowwise"),
    }
    for place, device in {"chip": jax.devices()[0], "CPU": jax.devices("cpu")[0]}.items():
        on_device = jax.device_put((x, w, g), device)
        for name, recipe in recipes.items():
            length = recipe.kept
            history = jnp.stack([jnp.full((length,), np.abs(a).max()) for a in (x, w, g)]) if length else None

            @jax.jit
            def products(x, w, g, history, recipe=recipe):
                y, pullback = jax.vjp(lambda x, w: matmul(x, w, recipe, history=history), x, w)
                return (y, *pullback(g))

            results = products(*on_device, jax.device_put(history, device))
            noise = [decibels(np.asarray(ours, "float64"), true) for ours, true in zip(results, exact, strict=True)]
            yield {"case": f"{name}, {place}"} | dict(zip(PRODUCTS, map(float, noise), strict=True))


def fused_attention(tiny: bool) -> Iterator[Row]:
    """cuDNN's attention and the kit's own: the largest error against float64, as a share of the largest value."""
    rows, rng = (32 if tiny else 1024), np.random.default_rng()
    for dtype in ("bfloat16", "float16"):
        query, key, value, upstream = (
            jnp.asarray(rng.normal(size=(1, rows, heads, 64)), dtype) for heads in (4, 2, 2, 4)
        )
        exact = _attention_in_float64(*(np.asarray(array, "float64") for array in (query, key, value, upstream)))
        scale = query.shape[-1] ** -0.5

        def fused(query, key, value, scale=scale):
            return engine.fused_attention(query, key, value, None, causal=True, scale=scale)

        def own(query, key, value):
            unmasked = jnp.ones((1, rows), bool)  # with a mask, the kit takes its own
            return attention(query, key, value, unmasked, causal=True)

        ways = {"the kit's own": own} | ({"cuDNN": fused} if fused(query, key, value) is not None else {})
        for name, function in ways.items():
            step = jax.jit(lambda q, k, v, g, f=function: (lambda y, back: (y, *back(g)))(*jax.vjp(f, q, k, v)))
            compiled = step.lower(query, key, value, upstream).compile()
            errors = [
                float(np.abs(np.asarray(ours, "float64") - true).max() / np.abs(true).max())
                for ours, true in zip(compiled(query, key, value, upstream), exact, strict=True)
            ]
            row = {"case": f"{name}, {dtype}", "kernels of cuDNN": (compiled.as_text() or "").count("__cudnn$fmha")}
            yield row | dict(zip(("output", "of query", "of key", "of value"), errors, strict=True))
        if len(ways) == 1:
            yield {"case": f"cuDNN, {dtype}", "problem": "not on this device"}


def planted_overflows(tiny: bool) -> Iterator[Row]:
    """float16 with loss scaling: two of eight batches overflow, both are skipped, and neither moves a weight."""
    rng, planted = np.random.default_rng(), (2, 5)
    keras_mp.set_global_policy("mixed_float16")
    model = keras.Sequential([keras.Input((16,)), keras.layers.Dense(32, activation="gelu"), keras.layers.Dense(1)])
    # A scale that no ordinary gradient of this model overflows with.
    optimizer = keras_mp.LossScaleOptimizer(keras.optimizers.AdamW(1e-3), initial_scale=256.0)
    model = keras_mp.prepare(model, optimizer, "mse")
    before, moved = model.get_weights(), []
    for step in range(8):
        x = rng.normal(size=(8, 16)).astype("float32") * (1e30 if step in planted else 1.0)
        model.train_on_batch(x, rng.normal(size=(8, 1)).astype("float32"))
        after = model.get_weights()
        moved.append(any((old != new).any() for old, new in zip(before, after, strict=True)))
        before = after
    skipped = int(model.optimizer.skipped_steps)
    right = skipped == len(planted) and moved == [step not in planted for step in range(8)]
    yield {"case": "8 steps, 2 planted", "skipped": skipped, "steps that moved weights": sum(moved), "holds": right}


def audit_against_float16(tiny: bool) -> Iterator[Row]:
    """Layers for which `audit` foresees an overflow, and those whose float16 output on this chip is infinite."""
    rng = np.random.default_rng()
    keras_mp.set_global_policy("float32")
    layers: list[Any] = [keras.Input((64,))]
    for index, deviation in enumerate(np.exp(rng.uniform(np.log(1e2), np.log(1e6), 12))):
        initializer = keras.initializers.RandomNormal(stddev=float(deviation), seed=index)
        layers.append(keras.layers.Dense(64, kernel_initializer=initializer, name=f"dense{index}"))
        layers.append(keras.layers.LayerNormalization(name=f"normalization{index}"))
    model = keras.Sequential(layers)
    model.compile("sgd", "mse")
    x, y = (rng.normal(size=(32, 64)).astype("float32") for _ in range(2))
    report = keras_mp.audit(model, (x, y), sample=None)
    foreseen = {suspect.path for suspect in report.suspects("mixed_float16") if not suspect.safe}
    seen = set()
    low = in_precision(model, "mixed_float16")
    for layer, exact in zip(low.layers, model.layers, strict=True):
        # Every layer gets what it would in float32, so that an infinity does not hide those behind it.
        if not np.isfinite(np.asarray(layer(x), "float32")).all():
            seen.add(layer.path)
        x = np.asarray(exact(x))
    yield {"case": "12 dense layers", "foreseen": len(foreseen), "seen": len(seen), "in both": len(foreseen & seen)}


def remat_gradients(tiny: bool) -> Iterator[Row]:
    """The gradients of a GPT with recomputed blocks, beside those without."""
    size, length = (Size(2, 32, 2), 16) if tiny else (Size(4, 512, 8), 256)
    tokens, targets = np.random.default_rng().integers(0, 64, (2, 2, length))
    for precision in ("float32", "mixed_bfloat16"):
        keras_mp.set_global_policy(precision)
        plain, lean = gpt(size, 64, length), gpt(size, 64, length, remat=True)
        lean.set_weights(plain.get_weights())
        ours, exact = (_gradients(model, tokens, targets) for model in (lean, plain))
        error = max(
            float(jnp.abs(a - b).max() / jnp.maximum(jnp.abs(b).max(), 1e-30)) for a, b in zip(ours, exact, strict=True)
        )
        yield {"case": f"GPT, {precision}", "largest difference": error}


def _gradients(model: keras.Model, tokens: Any, targets: Any) -> list[Any]:
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    fixed = [variable.value for variable in model.non_trainable_variables]

    def value(values: list[Any]) -> Any:
        logits, _ = model.stateless_call(values, fixed, tokens, training=True)
        return loss(targets, logits)

    return jax.jit(jax.grad(value))([variable.value for variable in model.trainable_variables])


def _attention_in_float64(query: Any, key: Any, value: Any, upstream: Any) -> list[Any]:
    """Output and the gradients of query, key and value: softmax(Q K^T / sqrt(d)) V, causal, with grouped heads."""
    groups, rows = query.shape[2] // key.shape[2], query.shape[1]
    key_a, value_a = (np.repeat(array, groups, 2) for array in (key, value))
    scores = np.einsum("bqhd,bkhd->bhqk", query, key_a) / np.sqrt(query.shape[-1])
    scores = np.where(np.tril(np.ones((rows, rows), bool)), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    output = np.einsum("bhqk,bkhd->bqhd", weights, value_a)
    of_weights = np.einsum("bqhd,bkhd->bhqk", upstream, value_a)
    of_scores = weights * (of_weights - (weights * of_weights).sum(-1, keepdims=True)) / np.sqrt(query.shape[-1])

    def of_groups(gradient: Any) -> Any:
        batch, length, heads, features = gradient.shape
        return gradient.reshape(batch, length, heads // groups, groups, features).sum(3)

    return [
        output,
        np.einsum("bhqk,bkhd->bqhd", of_scores, key_a),
        of_groups(np.einsum("bhqk,bqhd->bkhd", of_scores, query)),
        of_groups(np.einsum("bhqk,bqhd->bkhd", weights, upstream)),
    ]
