"""A treatment of one's own is one file, which docs/maintainers/architecture.md shows whole."""

from pathlib import Path

import keras
import numpy as np
import pytest
from own_treatment import clip

from keras_mp.rebuild.walk import treatments_of
from keras_mp.treatment.change import undo

pytestmark = pytest.mark.jax
PAGE = Path(__file__).parents[2] / "docs" / "maintainers" / "architecture.md"


def test_the_page_shows_it():
    code = Path(__file__).with_name("own_treatment.py").read_text().partition('"""\n\n')[2]
    assert f"```python\n{code}```" in PAGE.read_text()
    assert len(code.splitlines()) <= 60


def test_it_is_applied_saved_loaded_and_undone(tmp_path):
    keras.config.set_dtype_policy("mixed_float16")
    inputs = keras.Input((4,))
    x = keras.layers.Dense(4, kernel_initializer="ones", name="grows")(inputs)
    model = keras.Model(inputs, keras.layers.Activation("linear", dtype="float32")(x))
    x = np.full((2, 4), 30000, "float32")
    assert np.isinf(model.predict(x, verbose=0)).all()
    clip(model, [model.get_layer("grows")])
    assert (model.predict(x, verbose=0) == 60000).all()
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert treatments_of(loaded.get_layer("grows")) == {"clip": {"limit": 60000.0}}
    assert (loaded.predict(x, verbose=0) == 60000).all()
    undo(loaded, ("clip",))
    assert type(loaded.get_layer("grows")) is keras.layers.Dense and np.isinf(loaded.predict(x, verbose=0)).all()
