"""The page of an audit: a verdict for each layer and format by colour and word, each word explained."""

import re

import keras
import numpy as np

from keras_mp import audit


def audited(kernel_size, tmp_path):
    """The report of two Dense layers and a Softmax whose input grows with the kernel, and its page."""
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
    return report, report.to_html(tmp_path / "audit.html").read_text()


def rows(page):
    """The colour, the verdict and the figures of float16, bfloat16 and FP8, by the name of a layer."""
    (table,) = re.findall(r'<table class="stacked">(.*?)</table>', page)
    found = {}
    for row in re.findall(r"<tr>(.*?)</tr>", table)[1:]:
        (name,) = re.findall(r"<th>(.*?)</th>", row)
        cells = re.findall(r'<td(?: style="background: (#\w+)[^"]*")?>(.*?)</td>', row)
        found[name] = [(colour, *re.sub("</?strong>", "", text).split("<br>")) for colour, text in cells]
    return found


def test_each_layer_has_its_verdict_and_figures_in_pale_colours_where_it_fits(tmp_path):
    report, page = audited(0.5, tmp_path)
    assert report.suspects() == [] and list(rows(page)) == ["first", "second", "softmax"]
    assert page.count("does not compute in FP8") == 1
    assert all(f"<em>{word}</em>: " in page for word in ("dB", "overflow", "zeroed", "subnormal"))
    for layer, (float16, bfloat16, fp8) in zip(report.layers, rows(page).values(), strict=True):
        assert float16[0] == bfloat16[0] == "#0072b229" and float16[1] == bfloat16[1] == "fits"
        assert float16[2] == f"loss {100 * layer.damage['float16']:.2g}%"
        if layer.path == "softmax":  # the loss takes its logits: it has no gradient
            assert len(bfloat16) == 3 and fp8 == ("", "")
        else:
            assert bfloat16[3] == f"gradients {100 * layer.gradient_error['bfloat16']:.2g}%"
            gradients = f"gradients {100 * layer.gradient_error['E5M2']:.2g}%"
            assert fp8[1:] == ("fits", f"loss {100 * layer.input_damage['E4M3']:.2g}%", gradients)


def test_a_layer_that_overflows_stands_out(tmp_path):
    report, page = audited(1e5, tmp_path)
    loud = {name: cells[0][1] for name, cells in rows(page).items() if cells[0][0] in ("#b30000", "#d55e00b3")}
    unfit = {layer.path for layer in report.layers if not layer.verdicts["mixed_float16"].ok}
    assert "first" in unfit and set(loud) == unfit
    assert loud["first"].startswith("overflows: ") and rows(page)["first"][0][2] == "loss overflow"
