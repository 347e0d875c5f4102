"""A program that loads a preset, alone or as one of several processes, and compares its parts with the file.

python tests/parallel/loads_together.py FOLDER PRESET
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import jax
import keras
import keras_hub
import numpy as np

import keras_mp
from keras_mp.parallel import workers
from keras_mp.parallel.cluster import find_cluster

folder, preset = Path(sys.argv[1]), sys.argv[2]
with workers.join(find_cluster()):
    drawn = np.random.default_rng(os.getpid()).normal()  # nothing else about the processes is the same
    with keras_mp.parallel.distribute("fully_sharded"):
        assert jax.device_count() == workers.count() == 2
        backbone = keras_hub.models.GemmaBackbone.from_preset(preset)
        dropout = keras.layers.Dropout(0.5)  # its seed must be the same on all
    folder.mkdir(exist_ok=True)
    arrays = {}
    for index, variable in enumerate(backbone.variables):
        value = variable.value
        (shard,) = value.addressable_shards
        arrays[f"{index}"] = np.asarray(shard.data)
        arrays[f"{index}-from"] = [part.start or 0 for part in shard.index]
    arrays["seed"] = np.asarray(dropout.seed_generator.state.value)
    np.savez(folder / f"{workers.index()}.npz", **arrays, drawn=drawn)
