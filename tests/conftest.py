import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import sys
from pathlib import Path

import keras
import pytest

sys.path.insert(0, str(Path(__file__).parent))  # the helpers beside the tests: zoo, without


@pytest.fixture(autouse=True)
def fresh_keras():
    """Each test starts under float32 and leaves no policy, graph or name counter behind."""
    keras.config.set_dtype_policy("float32")
    yield
    keras.config.set_dtype_policy("float32")
    keras.backend.clear_session()
