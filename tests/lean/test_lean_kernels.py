"""Where Keras would take cuDNN's flash attention, a lean layer takes it too: Keras's own check, told of a GPU."""

from types import SimpleNamespace

import keras
import numpy as np
import pytest
from keras import layers

import keras_mp

pytestmark = [
    pytest.mark.jax,
    pytest.mark.skipif(keras.backend.backend() != "jax", reason="TensorFlow has no fused attention"),
]


@pytest.fixture
def on_gpu(monkeypatch):
    """Tells JAX of an NVIDIA GPU of a given compute capability, where Keras, the kit and JAX's attention ask for it."""
    import jax
    from jax._src.cudnn import fused_attention_stablehlo

    devices = jax.devices

    def present(capability="9.0"):
        gpu = SimpleNamespace(compute_capability=capability, device_kind="NVIDIA H100 80GB HBM3")
        runtime = SimpleNamespace(
            get_backend=lambda: SimpleNamespace(platform_version="cuda 13"), local_devices=lambda backend: [gpu]
        )
        monkeypatch.setattr(fused_attention_stablehlo, "xla_bridge", runtime)
        cudnn = SimpleNamespace(cudnn_get_version=lambda: 91000)
        monkeypatch.setattr(fused_attention_stablehlo, "cuda_versions", cudnn)
        monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
        monkeypatch.setattr(jax, "devices", lambda platform=None: [gpu] if platform == "gpu" else devices(platform))

    return present


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
def test_a_lean_layer_takes_the_flash_attention_that_keras_would(masked, on_gpu):
    text = program(masked=masked)
    assert kernels(text) == (0, 0) and is_lean(text)
    on_gpu()
    text = program(masked=masked)
    assert kernels(text) == (1, 1) and not is_lean(text)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("capability", "arguments"),
    [("9.0", {"policy": "float32"}), ("9.0", {"features": 12}), ("7.5", {}), ("9.0", {"dropout": 0.1})],
)
def test_it_is_lean_where_keras_takes_none(capability, arguments, on_gpu):
    on_gpu(capability)
    text = program(**arguments)
    assert kernels(text) == (0, 0) and is_lean(text)
