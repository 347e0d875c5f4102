"""A sample of the sweep over all architectures; `make sweep` runs them all."""

import keras
import pytest

if keras.backend.backend() != "tensorflow":
    pytest.skip("the sweep runs on TensorFlow; what JAX adds is in test_export.py", allow_module_level=True)
import sweep


@pytest.mark.slow
def test_sample():
    row = sweep.row("applications.MobileNetV2")
    assert row.low_precision_ops == 0 and row.max_difference <= 1e-5 and row.keras_places > 0
    assert row.sensitive > 0 and row.left == 0
    if row.precision_gap < 5e-3:  # a deep network with random weights may blow the rounding of 16 bits up
        assert row.stabilized_gap < 1e-2


def test_every_application_is_found():
    assert {"applications.ResNet50", "applications.NASNetLarge"} <= sweep.applications().keys()
    assert len(sweep.applications()) >= 38
