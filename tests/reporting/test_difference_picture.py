"""The picture of a comparison with a reference: a line a precision, and the noise of the seeds as a band."""

import math
import re

import numpy as np
import pytest

from keras_mp.reporting.pictures import difference_picture
from tests.reporting.test_svg import SPACE, check_inside


def drawn(curves, **options):
    svg = difference_picture(curves, "float32", x_title="step", y_title="less float32", **options)
    return check_inside(svg)


def points(element):
    return [tuple(map(float, point.split(","))) for point in element.get("points").split()]


def scale_of_y(elements):
    """Pixels for one of the data, from two numbers of the axis."""
    ticks = [
        (float(element.text), float(element.get("y")))
        for element in elements
        if element.tag == f"{SPACE}text" and element.get("text-anchor") == "end" and re.match(r"-?[\d.]", element.text)
    ]
    (low, down), (high, up) = ticks[0], ticks[-1]
    return (down - up) / (high - low), down - 4 + low * (down - up) / (high - low)


def test_a_line_is_the_mean_of_the_differences_and_the_band_the_spread_of_the_seeds():
    rng = np.random.default_rng()
    base = rng.normal(size=(3, 20))
    curves = {"float32": base, "low": base + rng.normal(size=(3, 20)), "same": base}
    elements = drawn(curves)
    low, same = (points(element) for element in elements if element.tag == f"{SPACE}polyline")
    (band,) = (points(element) for element in elements if element.tag == f"{SPACE}polygon")
    scale, zero = scale_of_y(elements)
    expected = zero - scale * (curves["low"] - base).mean(0)
    assert [y for _, y in low] == pytest.approx(expected, abs=1.0)
    assert [y for _, y in same] == pytest.approx([zero] * 20, abs=1.0)
    highest = zero - scale * (base.max(0) - base.mean(0))
    inside = highest > 61  # a rare extreme of the band is cut at the frame
    assert np.array([y for _, y in band[:20]])[inside] == pytest.approx(highest[inside], abs=1.0)


def test_one_seed_has_no_band_and_what_is_not_finite_no_point():
    elements = drawn({"float32": [[3.0, 2.0, 1.0]], "bad": [[3.0, math.nan, math.nan]]})
    assert not [element for element in elements if element.tag == f"{SPACE}polygon"]
    (line,) = (points(element) for element in elements if element.tag == f"{SPACE}polyline")
    assert len(line) == 1


def test_the_axes_and_the_band_are_named():
    elements = drawn({"float32": [[1.0, 2.0], [2.0, 3.0]], "low": [[1.0, 2.0], [2.0, 3.5]]}, first=4)
    words = {element.text for element in elements if element.tag == f"{SPACE}text"}
    assert {"step", "less float32", "low", "4", "5"} <= words
    assert "0 is float32; grey: how far its own 2 seeds lie from their mean" in words
