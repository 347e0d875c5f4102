"""MXFP8: what is not finite, where it is available, and which layers it is for."""

import keras
import numpy as np
import pytest
from reference import compiled, normal, tensors, to_numpy, with_gradients
from test_cost import network

import keras_mp
from keras_mp import convert
from keras_mp.chips import CHIPS
from keras_mp.fp8 import matmul
from keras_mp.fp8.convert import decisions
from keras_mp.precision.hardware import Device, support


@pytest.mark.jax
@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4"])
def test_zeros_and_what_is_not_finite(recipe):
    """Of a gradient with an overflow, both gradients have one, so that its step is skipped."""
    run = compiled(with_gradients(lambda x, w: matmul(x, w, recipe)))
    for bad in (np.inf, np.nan):
        x, w, g = normal(40, 64), normal(64, 8), normal(40, 8)
        x[0], g[35, 3] = 0, bad
        y, dx, dw = map(to_numpy, run(*tensors(x, w, g)))
        assert np.all(y[0] == 0) and np.isfinite(y).all()
        assert np.isnan(dx[35]).all() and np.isfinite(np.delete(dx, 35, 0)).all()
        assert np.isnan(dw[:, 3]).all() and np.isfinite(np.delete(dw, 3, 1)).all()


@pytest.mark.jax
def test_where_it_is_available():
    def ok(name, architecture):
        return support("mxfp8", Device("gpu", name, architecture, CHIPS.get(name)))

    assert not ok("h100", "9.0").ok and "10.0 is the first" in ok("h100", "9.0").reason
    assert ok("b200", "10.0").ok == ok("rtx5090", "12.0").ok == (keras.backend.backend() == "jax")
    assert not support("mxfp8", Device("tpu", "v7x", "v7x", CHIPS["v7x"])).ok
    assert not support("mxfp8").ok  # the tests run on CPUs


def test_on_an_older_gpu_convert_warns(monkeypatch):
    old = Device("gpu", "NVIDIA H100 80GB HBM3", "9.0", CHIPS["h100"])
    monkeypatch.setattr(keras_mp.precision.hardware, "list_devices", lambda: [old])
    model = keras.Sequential([keras.Input((16,)), keras.layers.Dense(16, dtype="mixed_bfloat16")], name="small")
    with pytest.warns(UserWarning, match="does not multiply MXFP8 operands.* use 'delayed'"):
        convert(model, "mxfp8", select=lambda path, layer: True)


@pytest.mark.jax
def test_layers_are_chosen_for_chips_that_multiply_blocks():
    model = network()
    with pytest.raises(ValueError, match="target='h100': H100 SXM5 has no MXFP8 units.*With: .*b200"):
        convert(model, "mxfp8", target="h100")
    if keras.backend.backend() == "tensorflow":
        with pytest.raises(ValueError, match="KERAS_BACKEND to 'jax'"):
            convert(model, "mxfp8", target="b200")
        return
    rows = {row.path: row for row in decisions(model, target="b200", scaling="mxfp8")}
    assert rows["up"].float8 and not rows["narrow"].float8
    chip, (m, k, n) = CHIPS["b200"], (8 * 512, 2048, 8192)
    rate, bandwidth = (each / chip.devices for each in (chip.peak["fp8"], chip.bandwidth))
    x, w, g = m * k, k * n, m * n
    products = [max(2 * m * k * n / rate, moved / bandwidth) for moved in (x + w + 2 * g, g + w + 2 * x, x + g + 4 * w)]
    # Each number is read for two amaxes and for the copies, and written twice.
    quantization = (x + g) * (3 * 2 + 2) + w * (3 * 4 + 2)
    np.testing.assert_allclose(rows["up"].cost.fp8, sum(products) + quantization / bandwidth)
