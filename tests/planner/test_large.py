"""A model larger than memory, looked at from its shapes."""

import json
import subprocess
import sys
from pathlib import Path

import keras
import pytest

PROGRAM = """
import json, time
import keras
from keras_mp.backend import peak_memory_bytes
from keras_mp.backend.common.device import TracedChip
from keras_mp.lowering import Source, lower_step
from models.gpt import gpt
from models.transformer import Size

def build():
    keras.config.set_dtype_policy("mixed_bfloat16")
    model = gpt(Size(32, 4096, 32), 50257, 2048)
    model.compile(keras.optimizers.AdamW(1e-4), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model

started = time.monotonic()
model = Source(build).build()
tokens = keras.KerasTensor((1, 2048), "int32")
lower_step(model, (tokens, tokens), training=True, chip=TracedChip("tpu"))
print(json.dumps([model.count_params(), time.monotonic() - started, peak_memory_bytes()]))
"""


@pytest.mark.slow
@pytest.mark.jax
@pytest.mark.skipif(keras.backend.backend() != "jax", reason="TensorFlow allocates what it builds: 80 GB here")
def test_a_gpt_of_7_billion_parameters_lowers_in_2_gigabytes():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, cwd=Path(__file__).parents[2], check=True
    )
    parameters, seconds, peak = json.loads(done.stdout)
    assert parameters > 6.6e9
    assert peak < 2e9
    print(f"lowered in {seconds:.0f} s")
