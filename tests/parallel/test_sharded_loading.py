"""Presets loaded over several processes; over several devices they are in loading_on_devices.py."""

from pathlib import Path

import keras
import numpy as np
import pytest
import test_workers

pytestmark = [
    pytest.mark.slow,
    pytest.mark.jax,
    pytest.mark.skipif(keras.backend.backend() != "jax", reason="TensorFlow has data parallelism only"),
]
HERE = Path(__file__).parent


def test_two_processes_load_a_preset_in_parts(tmp_path, monkeypatch):
    keras_hub = pytest.importorskip("keras_hub")
    backbone = keras_hub.models.GemmaBackbone(2560, 1, 4, 4, 160, 64, 40)
    preset = str(tmp_path / "gemma")
    backbone.save_to_preset(preset)
    monkeypatch.setattr(test_workers, "PROGRAM", HERE / "loads_together.py")
    test_workers.run(tmp_path / "loaded", preset)
    first, second = (np.load(tmp_path / "loaded" / f"{index}.npz") for index in range(2))
    assert first["drawn"] != second["drawn"]
    np.testing.assert_array_equal(first["seed"], second["seed"])
    split = 0
    for index, variable in enumerate(backbone.variables):
        value = np.asarray(variable.value)
        for part in (first, second):
            loaded, start = part[f"{index}"], part[f"{index}-from"]
            inside = tuple(slice(begin, begin + size) for begin, size in zip(start, loaded.shape, strict=True))
            np.testing.assert_array_equal(loaded, value[inside])
        split += 2 * loaded.size == value.size
    assert split == len(backbone.variables)
