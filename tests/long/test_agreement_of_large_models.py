"""The audit's verdicts on three large models, of which a third of the layers overflow, are those of float16 itself."""

import keras
import numpy as np
import pytest
from keras import layers

from keras_mp import audit
from keras_mp.numerics.observe import layers_and_operations
from models.gpt import gpt
from models.transformer import Size

CROSS_ENTROPY = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


# On JAX, Keras's fused attention in float16 has no kernel on a CPU: there the layers inside are judged alone.
SKIPPED = (keras.layers.MultiHeadAttention,) if keras.backend.backend() == "jax" else ()
OVERFLOWING = ("output", "input", "kernel", "scores", "before activation")
SHAPE = (32, 32, 3)
IMAGES = {"weights": None, "input_shape": SHAPE, "classes": 10, "classifier_activation": None}


def resnet50():
    return _scaled(keras.applications.ResNet50(**IMAGES))


def mobilenet():
    return _scaled(keras.applications.MobileNetV3Small(**IMAGES, dropout_rate=0.0))


def _scaled(model):
    """Every fifth normalization multiplies by a number that float16 cannot hold; what follows shares it."""
    random = np.random.default_rng()
    model.compile("sgd", CROSS_ENTROPY)
    found = [layer for layer in model.layers if isinstance(layer, layers.BatchNormalization)]
    for place, layer in enumerate(found):
        if place % 5 == 1:
            layer.gamma.assign(np.full(layer.gamma.shape, 1e6, "float32"))
    x = random.uniform(0, 255, (4, *SHAPE)).astype("float32")
    return model, (x, random.integers(0, 10, 4))


def gpt12(length=16):
    random = np.random.default_rng()
    model = gpt(Size(12, 32, 2), 64, length)
    model.compile("sgd", CROSS_ENTROPY)
    for layer in model.layers:
        if isinstance(layer, layers.Dense) and layer.name.endswith("dense_1"):
            index = int(layer.name.removeprefix("block").partition("_")[0])
            if index % 2:
                layer.kernel.assign(layer.kernel * 1e7)
    tokens = random.integers(0, 64, (4, length))
    return model, (tokens, tokens)


def calls_in_float32(model, x):
    """What each layer and operation of a functional model was called with, by a wrapper of its own."""
    calls = {}
    parts = layers_and_operations(model)

    def recorder(path, layer, function):
        def call(*args, **kwargs):
            calls.setdefault(path, (layer, []))[1].append((args, kwargs))
            return function(*args, **kwargs)

        return call

    for path, layer in parts.items():
        vars(layer)["call"] = recorder(path, layer, layer.call)
    try:
        model(x, training=True)
    finally:
        for layer in parts.values():
            del vars(layer)["call"]
    return calls


def finite_in_float16(layer, calls):
    """Whether a layer, run in float16 on float32 inputs, puts out finite numbers only."""
    finite = True
    for args, kwargs in calls:
        if isinstance(layer, keras.layers.Layer):
            before = [(each, each.dtype_policy) for each in layer._flatten_layers()]
            for each, _ in before:
                each.dtype_policy = "mixed_float16"
            try:
                result = layer(*args, **kwargs)
            finally:
                for each, policy in before:
                    each.dtype_policy = policy
        else:
            low = [keras.ops.cast(x, "float16") if _is_float(x) else x for x in keras.tree.flatten(args)]
            result = layer.call(*keras.tree.pack_sequence_as(args, low), **kwargs)
        for each in keras.tree.flatten(result):
            if _is_float(each):
                finite &= bool(np.isfinite(np.asarray(keras.ops.cast(each, "float32"))).all())
    return finite


def _is_float(x):
    return keras.ops.is_tensor(x) and keras.backend.is_float_dtype(keras.backend.standardize_dtype(x.dtype))


@pytest.mark.slow
@pytest.mark.parametrize("build", [resnet50, mobilenet, gpt12])
def test_verdicts_agree_with_each_layer_run_in_float16(build):
    model, batch = build()
    judged = {}
    for layer in audit(model, batch, sample=1024).layers:
        verdict = layer.verdicts["mixed_float16"]
        overflow = not verdict.ok and verdict.tensor in OVERFLOWING and "past float16" in verdict.reason
        judged[layer.path] = (not overflow, verdict)
    wrong, unsafe = [], 0
    for path, (layer, calls) in calls_in_float32(model, batch[0]).items():
        if path not in judged or isinstance(layer, SKIPPED):
            continue
        finite = finite_in_float16(layer, calls)
        unsafe += not finite
        if finite != judged[path][0]:
            wrong.append(f"{path} ({type(layer).__name__}): finite {finite}, judged {judged[path][1]}")
    assert not wrong, "\n".join(wrong[:20])
    assert 0.15 < unsafe / len(judged) < 0.7
    print(f"{model.name}: {unsafe} of {len(judged)} layers overflow, all judged right")
