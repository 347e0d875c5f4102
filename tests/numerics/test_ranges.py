import math

import ml_dtypes
import numpy as np
import pytest
from arrays import DTYPES
from faults import measure

from keras_mp.numerics.ranges import Range, merged
from keras_mp.precision.formats import FORMATS, current_scale

HARD = [0.0, -0.0, np.inf, -np.inf, np.nan, 65504, 65519.99, 65520, -65520, 7e4, 2**-14, 2**-24, 2**-25, 1.01 * 2**-25]
HARD += [448, 464, 464.1, 480, 57344, 61439, 61440, 2**-9, 2**-10, 1e-45, 1e-38, 3.4e38, -1.0, 2**-16, 2**-17]


def reference(x, name, scale):
    """How many overflow and are zero, and the squares of values and errors; 8 bits saturate, 16 are infinite."""
    x = x[np.isfinite(x) & (x != 0)]
    with np.errstate(over="ignore", invalid="ignore"):
        scaled = x * np.float32(scale)
        rounded = scaled.astype(DTYPES[name]).astype("float64")
    overflow = ~np.isfinite(rounded)
    top = float(ml_dtypes.finfo(DTYPES[name]).max) if name.startswith("E") else np.inf
    rounded = np.where(overflow, np.copysign(np.where(np.isinf(scaled), np.inf, top), scaled), rounded)
    x = x.astype("float64")
    noise = np.sum((rounded / float(np.float32(scale)) - x) ** 2)
    return overflow.sum(), (rounded == 0).sum(), np.sum(x**2), noise


def check(x, name, scale=1.0):
    loss = measure(x, name, scale)
    overflow, zeroed, signal, noise = reference(x, name, scale)
    counts = [share * x.size for share in (loss.overflow, loss.zeroed)]
    assert counts == pytest.approx([overflow, zeroed])
    if not signal:
        assert math.isnan(loss.sqnr)
    elif not noise:
        assert loss.sqnr == math.inf
    else:
        assert loss.sqnr == pytest.approx(10 * math.log10(signal / noise) if noise < math.inf else -math.inf, abs=1e-3)


@pytest.mark.parametrize("name", FORMATS)
def test_losses_are_those_of_the_definition(name):
    random = np.random.default_rng()
    for shape in ((3, 5, 7), (1, 40), (40, 1), (1,)):
        for spread in (1, 30):
            x = (random.normal(size=shape) * np.exp2(random.uniform(-spread, spread, shape))).astype("float32")
            for scale in (1.0, 2.0**12, 0.37):
                check(x, name, scale)


@pytest.mark.parametrize("name", FORMATS)
def test_hard_values_one_by_one_and_together(name):
    with np.errstate(over="ignore"):
        hard = np.array(HARD, "float32")
    for value in hard:
        check(value[None], name)
    check(hard[np.isfinite(hard)], name)
    check(np.zeros((4, 4), "float32"), name)
    check(np.array([1e20, 1e-28], "float32"), name, 1e30)  # infinite once it is scaled, NaN in an 8-bit format


def test_an_empty_tensor_loses_nothing():
    loss = measure(np.zeros((0, 3)), "float16")
    assert (loss.overflow, loss.zeroed) == (0, 0) and math.isnan(loss.sqnr)


def test_parts_add_up_to_the_whole():
    x = np.random.default_rng().normal(size=4096).astype("float32") * 1e4
    parts, halves = Range(), []
    for part in np.split(x, 8):
        parts.update(part)
        halves.append(Range())
        halves[-1].update(part)
    whole = Range()
    whole.update(x)
    for other in (parts, merged(halves)):
        assert (other.lowest, other.highest, other.vanishing) == (whole.lowest, whole.highest, whole.vanishing)
        for name in FORMATS:
            assert vars(other.loss(name)) == pytest.approx(vars(whole.loss(name)))


def test_min_max_zeros_and_nonfinite():
    measured = Range()
    measured.update(np.array([[0.0, -3.0, np.inf], [np.nan, 2.0, 1e-9]], "float32"))
    assert (measured.lowest, measured.highest, measured.largest) == (-3.0, 2.0, 3.0)
    assert measured.share_vanishing == 1 / 3
    assert (measured.values, measured.zeros, measured.nonfinite) == (6, 1, 2)


def test_what_vanishes_is_what_float16_rounds_to_zero():
    x = np.append(np.exp2(np.random.default_rng().uniform(-40, 0, 1000)), [2.0**-25, -(2.0**-25), 1.0001 * 2.0**-25])
    measured = Range({"float16": 2.0**15})
    measured.update(np.append(x, [0.0, np.nan]))
    assert measured.share_vanishing == pytest.approx((x.astype("float16") == 0).mean())


def test_a_sample_knows_the_extremes_of_the_whole():
    measured = Range()
    measured.update(np.ones(10), size=1000, extremes=(-7e4, 1.0))
    assert (measured.lowest, measured.values) == (-7e4, 1000)
    assert measured.loss("float16").overflow == 1 / 1000 and measured.loss("float16").sqnr == -math.inf
    assert measured.loss("bfloat16").overflow == 0


def test_current_scaling_lets_nothing_overflow():
    x = np.random.default_rng().normal(size=1000).astype("float32") * 1e6
    loss = measure(x, "E4M3", None)
    assert loss.overflow == 0
    scale = np.float32(448 / np.abs(x).max())
    y = (x * scale).astype(ml_dtypes.float8_e4m3fn).astype("float64") / scale
    assert loss.sqnr == pytest.approx(
        10 * math.log10((x.astype("float64") ** 2).sum() / ((y - x) ** 2).sum()), abs=1e-3
    )
    assert current_scale(0.0, FORMATS["E4M3"]) == 1.0 and math.isfinite(current_scale(1e-45, FORMATS["E5M2"]))
