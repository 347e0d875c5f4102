"""A step of recomputed blocks on several replicas, in a process of its own; test_optimizer_replicas.py starts it."""

import keras
import numpy as np
import own_blocks
import pytest
from replicas import REPLICAS, scope

import keras_mp
from keras_mp.rebuild.walk import Walk

pytestmark = [pytest.mark.slow, pytest.mark.rare]


def trained(recompute, weights, x, y):
    """The weights after two steps; dropout and moving statistics would differ by replica, so there are none."""
    with scope():
        model = own_blocks.vit(blocks=2, rate=0.0)
        if weights is not None:
            model.set_weights(weights)
        if recompute:
            model = keras_mp.lean.make_lean(model, remat=True)
            assert sum(row.kind == "block" for row in keras_mp.lean.lean_model.lean_parts(Walk(model))) == 2
        start = model.get_weights()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.5), loss, jit_compile=keras.backend.backend() == "jax")
    model.fit(x, y, batch_size=REPLICAS, shuffle=False, verbose=0)
    return start, model.get_weights()


def test_replicas_make_the_step_of_plain_blocks():
    generator = np.random.default_rng()
    rows = 2 * REPLICAS
    x, y = generator.normal(size=(rows, 8, 8, 3)).astype("float32"), generator.integers(0, 3, rows)
    start, plain = trained(False, None, x, y)
    _, ours = trained(True, start, x, y)
    for a, b, before in zip(ours, plain, start, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * max(1e-2, np.abs(b - before).max()) + 2**-21)
    assert any(np.abs(b - before).max() > 1e-3 for b, before in zip(plain, start, strict=True))
