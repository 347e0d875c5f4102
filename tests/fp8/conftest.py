import keras
import pytest


@pytest.fixture
def mixed_bfloat16():
    """Models are built in mixed_bfloat16; the policy is reset after each test, as everywhere."""
    keras.config.set_dtype_policy("mixed_bfloat16")
