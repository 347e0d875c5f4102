"""Tasks of KerasHub that train for Keras's int8 and int4: quantized, and saved, they give the bits of the training."""

import itertools

import keras
import numpy as np
import pytest

pytest.importorskip("keras_hub")
import causal_models

import keras_mp
from benchmarks.kerashub_tasks import TASKS
from keras_mp.precision.hardware import current_device

pytestmark = [pytest.mark.jax, pytest.mark.slow]
TENSORFLOW = keras.backend.backend() == "tensorflow"
JAX_ON_A_CPU = not TENSORFLOW and current_device().kind == "cpu"
TASK_NAMES = ("GemmaCausalLM", "LlamaCausalLM", "BertTextClassifier", "ViTImageClassifier")
POLICIES = ("float32", "mixed_bfloat16", "mixed_float16")
# In continuous integration each backend has some of the product that the other has not.
QUICK = {
    ("GemmaCausalLM", "qat_int4", "mixed_bfloat16", "LoRA"): TENSORFLOW,
    ("ViTImageClassifier", "qat_int8", "float32", "alone"): TENSORFLOW,
    ("LlamaCausalLM", "qat_int8", "mixed_bfloat16", "alone"): not TENSORFLOW,
    ("BertTextClassifier", "qat_int4", "float32", "LoRA"): not TENSORFLOW,
}
CASES = [
    pytest.param(*case, marks=[] if QUICK.get(case) else pytest.mark.rare)
    for case in itertools.product(TASK_NAMES, ("qat_int8", "qat_int4"), POLICIES, ("alone", "LoRA"))
    if case[1:3] != ("qat_int8", "mixed_float16")  # which Keras refuses
]


def predicted(model, x):
    model.make_predict_function(force=True)
    return [np.asarray(output).tobytes() for output in keras.tree.flatten(model.predict_on_batch(x))]


def loaded(model, path):
    """What a process finds in a file whose own policy is another."""
    model.save(path)
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("float32")
    try:
        return keras.saving.load_model(path)
    finally:
        keras.config.set_dtype_policy(before)


@pytest.mark.parametrize("name, mode, policy, lora", CASES)
def test_what_was_trained_is_what_is_served(name, mode, policy, lora, tmp_path):
    if name == "LlamaCausalLM" and policy == "mixed_float16" and JAX_ON_A_CPU:
        pytest.skip("JAX has no float16 attention on a CPU: run it on a GPU")
    keras.config.set_dtype_policy(policy)
    model = causal_models.build(name, num_layers=1) if name in causal_models.DECODERS else TASKS[name].build()
    x, y = TASKS[name].data(model)
    if lora == "LoRA":
        model.backbone.enable_lora(2)
    keras_mp.convert(model, mode)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    keras_mp.prepare(model, keras.optimizers.Adam(1e-2), loss)
    assert np.isfinite([model.train_on_batch(x, y) for _ in range(2)]).all()
    trained = predicted(model, x)
    assert predicted(loaded(model, tmp_path / "trained.keras"), x) == trained
    keras_mp.quantize(model, x)
    assert predicted(model, x) == trained
    assert predicted(loaded(model, tmp_path / "quantized.keras"), x) == trained
