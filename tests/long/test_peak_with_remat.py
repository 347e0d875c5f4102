"""The peak memory of a real run with remat, and without."""

import json
import subprocess
import sys

import pytest

PROGRAM = """
import json, sys
import keras, numpy as np
import keras_mp
from keras_mp.system.host import peak_process_bytes
keras.utils.set_random_seed(0)
inputs = keras.Input((512, 64))
x = inputs
for index in range(8):
    inner = keras.Input((512, 64))
    y = inner
    for _ in range(6):
        y = keras.layers.Dense(64, activation="sigmoid")(y)
    block = keras.Model(inner, y)
    x = (keras_mp.lean.remat(block) if sys.argv[1] == "remat" else block)(x)
model = keras.Model(inputs, x)
# Not jitted: XLA's compiler for CPUs drops the barriers and then merges the recomputation with the forward pass.
model.compile("sgd", "mse", run_eagerly=keras.backend.backend() == "jax", jit_compile=False)
small, large = (np.zeros((n, 512, 64), "float32") for n in (1, 128))
model.train_on_batch(small, small)
before = peak_process_bytes()
model.train_on_batch(large, large)
print(json.dumps(peak_process_bytes() - before))
"""


@pytest.mark.slow
def test_the_peak_of_a_real_run_falls():
    peaks = {}
    for kind in ("plain", "remat"):
        done = subprocess.run([sys.executable, "-c", PROGRAM, kind], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-2000:]
        peaks[kind] = json.loads(done.stdout.splitlines()[-1])
    print({kind: f"{peak / 2**20:.0f} MiB" for kind, peak in peaks.items()})
    # Of 48 activations of 16 MiB, 8 and those of one block are left.
    assert peaks["remat"] < 0.7 * peaks["plain"]
