"""Quantized models with LoRA on several devices, and training for one; test_distribute.py starts the process."""

import contextlib
import functools

import keras
import numpy as np
import pytest
from adapted_models import gemma
from devices import TENSORFLOW

import keras_mp

STEPS, ROWS = 12, 4
CASES = [("data", 2, "int8", "float32"), ("data", 2, "int4", "mixed_bfloat16")]
if not TENSORFLOW:
    CASES = [("fully_sharded", 4, "int4", "float32"), ("fully_sharded", 4, "int8", "mixed_bfloat16")]


def trained(mode, policy, layout=None, devices=1):
    """A tiny Gemma after some steps: its loss at each, and its weights before and after."""
    random = np.random.default_rng(5)
    text = random.integers(1, 24, (STEPS * ROWS, 11))
    scope = contextlib.nullcontext() if layout is None else keras_mp.parallel.distribute(layout, devices)
    losses = []
    with scope:
        model = gemma(policy, mode)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        optimizer = keras_mp.LossScaleOptimizer(keras.optimizers.SGD(0.5), keras_mp.LossScale.none())
        model = keras_mp.prepare(model, optimizer, loss)
        before = weights_of(model)
        x = {"token_ids": text[:, :-1], "padding_mask": np.ones((len(text), 10), "int32")}
        note = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: losses.append(logs["loss"]))
        keras.Model.fit(model, x, text[:, 1:], batch_size=ROWS, shuffle=False, verbose=0, callbacks=[note])
    return losses, before, model


def weights_of(model):
    return {variable.path: keras.ops.convert_to_numpy(variable) for variable in model.weights}


def distance(weights, others):
    return np.sqrt(sum(np.square(weights[path] - others[path]).sum() for path in weights))


on_one_device = functools.cache(trained)


@pytest.mark.slow
@pytest.mark.parametrize("layout, devices, mode, policy", [CASES[0], pytest.param(*CASES[1], marks=pytest.mark.rare)])
def test_lora_trains_as_on_one_device(layout, devices, mode, policy):
    losses, before, one = on_one_device(mode, policy)
    shared, same, several = trained(mode, policy, layout, devices)
    after, others = weights_of(one), weights_of(several)
    trains = [variable.path for variable in one.trainable_variables]
    for path, value in before.items():
        np.testing.assert_array_equal(same[path], value, err_msg=path)
        if path not in trains:
            np.testing.assert_array_equal(others[path], value, err_msg=path)
    before, after, others = ({path: weights[path] for path in trains} for weights in (before, after, others))
    moved, apart = distance(before, after), distance(after, others)
    if policy == "float32":
        # The sum over devices has another order: that is all that differs.
        assert apart < 1e-5 * moved
        np.testing.assert_allclose(shared, losses, rtol=1e-5)
    else:
        # Several devices round to 16 bits as often as one does.
        exact = weights_of(on_one_device(mode, "float32")[2])
        exact = {path: exact[path] for path in trains}
        assert 0 < distance(others, exact) < 1.5 * distance(after, exact) < 0.1 * moved
    if layout == "fully_sharded":
        codes = [v for v in several.weights if v.dtype in ("int8", "uint8") and "kernel" in v.path]
        assert codes
        for variable in codes:
            parts = variable.value.addressable_shards
            assert len(parts) == 4 and sum(part.data.nbytes for part in parts) == variable.value.nbytes, variable.path


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["qat_int8", "qat_int4", "qat_litert"])
def test_training_for_a_quantization_is_as_on_one_device(mode):
    random = np.random.default_rng()
    x, y = (random.normal(size=(32, width)).astype("float32") for width in (7, 3))
    losses = []
    for scope in (contextlib.nullcontext(), keras_mp.parallel.distribute("data", 2)):
        with scope:
            keras.utils.set_random_seed(3)
            layers = [keras.layers.Dense(19, "relu"), keras.layers.Dense(3)]
            model = keras_mp.convert(keras.Sequential([keras.Input((7,)), *layers]), mode)
            model.compile(keras.optimizers.SGD(0.1), "mse")
            losses.append(model.fit(x, y, 8, epochs=3, shuffle=False, verbose=0).history["loss"])
            if mode != "qat_litert":
                keras_mp.quantize(model, x)
    # Of TensorFlow's replicas each has ranges of LiteRT of its own rows, whose mean is kept.
    np.testing.assert_allclose(losses[1], losses[0], rtol=0.1 if mode == "qat_litert" else 1e-5)
