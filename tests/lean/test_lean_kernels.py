"""Where Keras would take cuDNN's flash attention, a lean layer takes it too: Keras's own check, told of a GPU."""

import keras
import numpy as np
import pytest
from keras import layers

import keras_mp
from keras_mp import backend
from keras_mp.backend.common.device import TracedChip

pytestmark = [
    pytest.mark.jax,
    pytest.mark.skipif(keras.backend.backend() != "jax", reason="TensorFlow has no fused attention"),
]


H100 = TracedChip("gpu", 9.0, "NVIDIA H100 80GB HBM3")


def program(policy="mixed_bfloat16", features=64, masked=False, **arguments):
    """The gradient of a training step of a lean attention layer, traced."""
    import jax

    keras.config.set_dtype_policy(policy)
    x = keras.Input((16, 32))
    attended = layers.MultiHeadAttention(2, features, **arguments)(x, x, use_causal_mask=masked)
    model = keras_mp.lean.make_lean(keras.Model(x, attended))

    def loss(weights, state, x):
        y, _ = model.stateless_call(weights, state, x, training=True)
        return y.astype("float32").sum()

    weights, state = (
        [variable.value for variable in variables]
        for variables in (model.trainable_variables, model.non_trainable_variables)
    )
    return str(jax.make_jaxpr(jax.grad(loss))(weights, state, np.ones((2, 16, 32), "float32")))


def kernels(text):
    return tuple(text.count(f"= dot_product_attention_{way}") for way in ("fwd", "bwd"))


def is_lean(text):
    return "optimization_barrier" in text  # behind which the scores are computed anew


@pytest.mark.parametrize("masked", [False, True])
def test_a_lean_layer_takes_the_flash_attention_that_keras_would(masked):
    text = program(masked=masked)
    assert kernels(text) == (0, 0) and is_lean(text)
    with backend.traced_for(H100):
        text = program(masked=masked)
    assert kernels(text) == (1, 1) and not is_lean(text)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("capability", "arguments"),
    [(9.0, {"policy": "float32"}), (9.0, {"features": 12}), (7.5, {}), (9.0, {"dropout": 0.1})],
)
def test_it_is_lean_where_keras_takes_none(capability, arguments):
    with backend.traced_for(H100._replace(capability=capability)):
        text = program(**arguments)
    assert kernels(text) == (0, 0) and is_lean(text)
