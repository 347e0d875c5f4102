"""The page and the picture of an audit: calm where a layer fits, a verdict for each format, each word explained."""

import re
from xml.etree import ElementTree

import keras
import numpy as np

from keras_mp import audit
from keras_mp.reporting.table import plain_text
from tests.reporting.drawn import figure_of

SPACE = "{http://www.w3.org/2000/svg}"
PALE = 0.2  # of the ground that a cell covers


def audited(kernel_size, tmp_path):
    """The report of two Dense layers and a Softmax whose input grows with the kernel, and its picture."""
    rng = np.random.default_rng()
    kernel = keras.initializers.RandomNormal(stddev=kernel_size)
    layers = [
        keras.Input((8,)),
        keras.layers.Dense(8, name="first", kernel_initializer=kernel),
        keras.layers.Dense(4, name="second"),
        keras.layers.Softmax(name="softmax"),
    ]
    model = keras.Sequential(layers, name="small")
    model.compile("sgd", "sparse_categorical_crossentropy")
    report = audit(model, (rng.normal(size=(16, 8)).astype("float32"), rng.integers(0, 4, 16)))
    return report, ElementTree.parse(report.to_svg(tmp_path / "audit.svg")).getroot()


def cells(report):
    """How much of the ground each cell of the picture covers, by its layer: three formats forward, three backward."""
    (axes,) = figure_of(report._svg).axes
    (table,) = axes.tables
    covered = {name: [] for name in (layer.path for layer in report.layers)}
    for (row, column), cell in sorted(table.get_celld().items()):
        if row > 0 and column >= 0:
            covered[report.layers[row - 1].path].append(cell.get_facecolor()[3])
    return covered


def test_the_picture_is_calm_where_a_layer_fits(tmp_path):
    report, _ = audited(0.5, tmp_path)
    assert report.suspects() == []
    covered = cells(report)
    assert all(len(row) == 6 and max(row) < PALE for row in covered.values())


def test_a_cell_that_overflows_stands_out(tmp_path):
    report, _ = audited(1e5, tmp_path)
    loud = {name for name, (forward, *_, backward, _, _) in cells(report).items() if max(forward, backward) > 0.5}
    unfit = {layer.path for layer in report.layers if not layer.verdicts["mixed_float16"].ok}
    assert "first" in unfit and loud == unfit


def test_there_is_a_legend_and_a_verdict_for_each_format(tmp_path):
    report, picture = audited(0.5, tmp_path)
    words = [element.text for element in picture.iter(f"{SPACE}text")]
    for line in (
        f"float16: all 3 layers fit, at an initial loss scale of {report.loss_scale:g}",
        "bfloat16: all 3 layers fit",
        "FP8: 2 of 2 Dense and EinsumDense layers fit; no other layer computes in FP8",
    ):
        assert f"small, {line}" in words and f"{line}." in plain_text(report, 120).splitlines()
    assert {"fits", "fits with the loss scale", "does not fit", "overflows"} <= set(words)
    page = report.to_html(tmp_path / "audit.html").read_text()
    for format in ("float16", "bfloat16", "FP8"):
        assert re.search(f"<td>{format}</td><td>[^<]*layers fit", page)
    for word in ("dB", "overflow", "zeroed", "subnormal"):
        assert f"<em>{word}</em>: " in page
    assert "the first first" not in page
