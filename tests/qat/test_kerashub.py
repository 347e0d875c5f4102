"""Tasks of KerasHub that train for Keras's int8 and int4: quantized, and saved, they give the bits of the training."""

import keras
import numpy as np
import pytest

pytest.importorskip("keras_hub")
from kerashub_tasks import TASKS

import keras_mp

pytestmark = [pytest.mark.jax, pytest.mark.slow]
# In continuous integration one backend has a language model in int4 and a classifier in int8, the other the reverse.
RARE = [[pytest.mark.rare] * (keras.backend.backend() == backend) for backend in ("jax", "tensorflow")]
CASES = [
    pytest.param("GemmaCausalLM", "qat_int4", marks=RARE[0]),
    pytest.param("LlamaCausalLM", "qat_int8", marks=RARE[1]),
    pytest.param("BertTextClassifier", "qat_int4", marks=RARE[1]),
    pytest.param("ViTImageClassifier", "qat_int8", marks=RARE[0]),
]


def predicted(model, x):
    return [np.asarray(each).tobytes() for each in keras.tree.flatten(model.predict_on_batch(x))]


@pytest.mark.parametrize("name, mode", CASES)
def test_what_was_trained_is_what_is_served(name, mode, tmp_path):
    keras.config.set_dtype_policy("mixed_bfloat16")
    config = TASKS[name]
    model = config.build()
    x, y = config.data(model)
    keras_mp.convert(model, mode)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    keras_mp.prepare(model, keras.optimizers.Adam(1e-3), loss)
    assert np.isfinite([model.train_on_batch(x, y) for _ in range(3)]).all()
    trained = predicted(model, x)
    keras_mp.quantize(model, x)
    assert predicted(model, x) == trained
    if not name.endswith("CausalLM"):
        return  # Keras cannot load a quantized classifier of KerasHub, without the kit either
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    for one, other in zip(model.variables, loaded.variables, strict=True):
        np.testing.assert_array_equal(keras.ops.convert_to_numpy(one), keras.ops.convert_to_numpy(other))
    # In int4 Keras writes policies of KerasHub as "int4/128_from_None", which loaded compute in another dtype.
    if mode == "qat_int8":
        assert predicted(loaded, x) == trained
