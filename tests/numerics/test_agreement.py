"""The audit's verdict on each layer, judged on float32 inputs, is that of the layer run in float16."""

import keras
import pytest
from overflowing import calls_in_float32, finite_in_float16, gpt2

from keras_mp import audit

# On JAX, Keras's fused attention in float16 has no kernel on a CPU: there the layers inside are judged alone.
SKIPPED = (keras.layers.MultiHeadAttention,) if keras.backend.backend() == "jax" else ()
OVERFLOWING = ("output", "input", "kernel", "scores", "before activation")


@pytest.mark.slow
def test_verdicts_agree_with_each_layer_run_in_float16():
    check_verdicts(gpt2)


def check_verdicts(build):
    """Checks each layer of a model; `tests/long` has large ones."""
    model, batch = build()
    judged = {}
    for each in audit(model, batch, sample=1024).layers:
        verdict = each.verdicts["mixed_float16"]
        overflow = not verdict.ok and verdict.tensor in OVERFLOWING and "past float16" in verdict.reason
        judged[each.path] = (not overflow, verdict)
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
