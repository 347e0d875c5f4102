"""Attention of Keras's and KerasHub's layers where Keras finds a TPU, against float64: minutes for each family."""

import keras
import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.jax,
    pytest.mark.skipif(keras.backend.backend() != "jax", reason="TensorFlow attends as it was asked on every chip"),
]

if keras.backend.backend() == "jax":
    from benchmarks.tpu_attention import CASES, WAYS, built, numbers, off, on_a_tpu, reference


@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", CASES if keras.backend.backend() == "jax" else ())
def test_layers_of_every_family(case, caplog):
    bounds = {"float32": 2e-5, "mixed_bfloat16": 3e-2}
    for length, policy, way, training, jit in (
        (128, "float32", "stabilized", True, True),
        (200, "float32", "stabilized", True, True),
        (200, "mixed_bfloat16", "lean", True, True),
        (256, "float32", "prepared", True, True),
        (256, "float32", "stabilized", False, True),
        (256, "mixed_bfloat16", "stabilized", True, False),
        (256, "mixed_bfloat16", "lean", True, True),
    ):
        exact = reference(case, length)  # where no TPU is found
        model, x = built(case, length, policy)
        WAYS[way](model)
        with on_a_tpu() as given:
            errors = off(numbers(model, x, training=training, jit=jit), exact)
        assert max(errors) < bounds[policy], (length, policy, way)
        assert bool(given) == (length % 128 == 0), (length, policy, way)
    assert "splash" not in caplog.text.lower()
