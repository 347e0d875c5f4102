"""Files that version 0.1 saved name treated layers otherwise."""

import json
import zipfile

import keras
import numpy as np
import pytest
from keras import layers

import keras_mp

pytestmark = pytest.mark.ci


def saved_as_by_0_1(path, target):
    with zipfile.ZipFile(path) as archive, zipfile.ZipFile(target, "w") as older:
        for name in archive.namelist():
            content = archive.read(name)
            if name == "config.json":
                config = content.decode().replace("keras_mp>Treated", "keras_mp>Stabilized")
                config = config.replace("keras_mp.rebuild.treated", "keras_mp.stability.stabilized")
                assert "keras_mp>Stabilized" in json.dumps(json.loads(config))
                content = config.encode()
            older.writestr(name, content)


def test_a_stabilized_model_that_0_1_saved_loads_and_goes_on(tmp_path, float32_policy):
    keras_mp.set_global_policy("mixed_bfloat16")
    inputs = keras.Input((4,))
    outputs = layers.Dense(3, activation="softmax")(layers.LayerNormalization()(layers.Dense(8)(inputs)))
    model = keras_mp.stabilize(keras.Model(inputs, outputs))
    model.save(tmp_path / "new.keras")
    saved_as_by_0_1(tmp_path / "new.keras", tmp_path / "old.keras")
    loaded = keras.models.load_model(tmp_path / "old.keras")
    x = np.random.default_rng().normal(size=(2, 4)).astype("float32")
    for again in (loaded, keras_mp.stabilize(loaded)):
        np.testing.assert_array_equal(again.predict(x, verbose=0), model.predict(x, verbose=0))
        assert keras_mp.sensitive_layers(again) == []
