"""make_lean and remat of a model with int4 weights and LoRA: the same training as without."""

import adapted_models
import keras
import numpy as np
import pytest
from marks import at_least

import keras_mp

pytestmark = pytest.mark.ci

ROUNDING = 1e-4  # of float32 losses after three updates, whose sums lean parts order in another way


def losses(model):
    """Of three updates, and the weights that trained."""
    model.compile(keras.optimizers.SGD(0.5), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    x, y = adapted_models.tokens(rows=2)
    trained = [model.train_on_batch(x, y, return_dict=True)["loss"] for _ in range(3)]
    return np.array(trained), [keras.ops.convert_to_numpy(weight) for weight in model.trainable_variables]


@pytest.mark.usefixtures("float32_policy")
@pytest.mark.parametrize("remat", at_least([False, True], True), ids=["lean", "with remat"])
def test_lora_on_int4_trains_the_same(remat):
    plain = adapted_models.gemma("float32", num_layers=2)
    lean = keras_mp.make_lean(adapted_models.gemma("float32", num_layers=2), remat=remat)
    kinds = [row.kind for row in keras_mp.lean_report(lean).rows if row.lean]
    assert kinds.count("block") == (2 if remat else 0)
    (expected, weights), (ours, our_weights) = losses(plain), losses(lean)
    assert expected[-1] < expected[0]
    np.testing.assert_allclose(ours, expected, rtol=ROUNDING)
    for weight, our_weight in zip(weights, our_weights, strict=True):
        np.testing.assert_allclose(our_weight, weight, atol=ROUNDING)
