import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import sys
from pathlib import Path

import keras
import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # the helpers beside the tests: zoo, fake_devices

# Files whose subject is the same code on both backends; see the marker `once`.
ONCE = (
    "bench/test_benchmark.py",
    "deploy/test_deploy_calibration.py",
    "deploy/test_deploy_from_file.py",
    "deploy/test_deploy_int8.py",
    "fp8/test_kerashub.py",
    "models/test_text_classifier.py",
    "models/test_vit.py",
    "numerics/test_agreement.py",
    "numerics/test_cli_audit.py",
    "numerics/test_compare_training.py",
    "numerics/test_search.py",
    "recipes/test_cifar10.py",
    "recipes/test_gpt2.py",
    "recipes/test_imagenet.py",
    "recipes/test_imdb.py",
    "recipes/test_parity.py",
    "test_cli_inspect.py",
    "test_columns.py",
    "test_docs_pages.py",
    "test_rebuild.py",
    "xla/test_hlo.py",
    "xla/test_large.py",
    "xla/test_lean_memory.py",
)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.relative_to(HERE).as_posix() in ONCE:
            item.add_marker("once")


@pytest.fixture(autouse=True)
def float32_policy():
    """Each test starts under float32 and leaves no other policy behind."""
    keras.config.set_dtype_policy("float32")
    yield
    keras.config.set_dtype_policy("float32")
