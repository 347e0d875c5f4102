import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import sys
from pathlib import Path

import keras
import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # the helpers beside the tests: zoo, fake_devices


@pytest.fixture(autouse=True)
def float32_policy():
    """Each test starts under float32 and leaves no other policy behind."""
    keras.config.set_dtype_policy("float32")
    yield
    keras.config.set_dtype_policy("float32")
