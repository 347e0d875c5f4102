"""The picture of a comparison with a reference: a line a precision, and the noise of the seeds as a band."""

import math
from functools import partial
from xml.etree import ElementTree

import numpy as np

from benchmarks.svg_pictures import difference_picture
from tests.reporting.drawn import figure_of

picture = partial(difference_picture, reference="float32", x_title="step", y_title="less float32")


def axes_of(curves):
    (axes,) = figure_of(lambda: picture(curves)).axes
    return axes, {line.get_label(): line.get_ydata() for line in axes.lines}


def test_a_line_is_the_mean_of_the_differences_and_the_band_the_spread_of_the_seeds():
    rng = np.random.default_rng()
    base = rng.normal(size=(3, 20))
    curves = {"float32": base, "low": base + rng.normal(size=(3, 20)), "same": base}
    axes, lines = axes_of(curves)
    np.testing.assert_allclose(lines["low"], (curves["low"] - base).mean(0), atol=1e-12)
    np.testing.assert_allclose(lines["same"], 0, atol=1e-12)
    (band,) = axes.collections
    (path,) = band.get_paths()
    apart = base - base.mean(0)
    for step, low, high in zip(range(1, 21), apart.min(0), apart.max(0), strict=True):
        edges = path.vertices[path.vertices[:, 0] == step, 1]
        np.testing.assert_allclose([edges.min(), edges.max()], [low, high], atol=1e-12)


def test_one_seed_has_no_band_and_what_is_not_finite_no_point():
    axes, lines = axes_of({"float32": [[3.0, 2.0, 1.0]], "bad": [[3.0, math.nan, math.inf]]})
    assert not axes.collections and np.isfinite(lines["bad"]).tolist() == [True, False, False]


def test_the_axes_and_the_band_are_named_and_any_name_is_xml():
    curves = {"float32": [[1.0, 2.0], [2.0, 3.0]], "$low$ <b>&\x00": [[1.0, 2.0], [2.0, 3.5]]}
    words = {
        element.text for element in ElementTree.fromstring(picture(curves)).iter("{http://www.w3.org/2000/svg}text")
    }
    assert {"step", "less float32", "$low$ <b>&\ufffd"} <= words
    assert "0 is float32; grey: how far its own 2 seeds lie from their mean" in words
