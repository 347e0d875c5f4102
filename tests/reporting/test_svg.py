"""The parts of a picture: where they lie, what they say, and that any text is text."""

import math
import random
import re
from xml.etree import ElementTree

import pytest

from keras_mp.reporting.svg import COLOURS, FRAME, Axes, Picture, colours_of, ticks

SPACE = "{http://www.w3.org/2000/svg}"
CHARACTER = 0.6  # the mean width of DejaVu Sans, of its size


def extents(element, size):
    """The left, top, right and bottom of an element, in pixels."""
    get = {name: float(value) for name, value in element.attrib.items() if re.fullmatch(r"-?[\d.]+", value)}
    tag = element.tag.removeprefix(SPACE)
    if tag == "rect":
        x, y = get.get("x", 0.0), get.get("y", 0.0)
        return x, y, x + get["width"], y + get["height"]
    if tag == "line":
        xs, ys = sorted((get["x1"], get["x2"])), sorted((get["y1"], get["y2"]))
        return xs[0], ys[0], xs[1], ys[1]
    if tag in ("polyline", "polygon"):
        points = [tuple(map(float, point.split(","))) for point in element.get("points").split()]
        xs, ys = zip(*points, strict=True) if points else ((0.0,), (0.0,))
        return min(xs), min(ys), max(xs), max(ys)
    assert tag == "text", tag
    width = CHARACTER * size * len(element.text)
    left = get["x"] - {"middle": width / 2, "end": width}.get(element.get("text-anchor"), 0.0)
    return left, get["y"] - size, left + width, get["y"]


def check_inside(svg):
    """Parses a picture, and checks that all of it lies inside; returns its elements."""
    root = ElementTree.fromstring(svg)
    _, _, width, height = map(float, root.get("viewBox").split())
    size = float(root.get("font-size"))
    elements = [element for element in root if element.tag.removeprefix(SPACE) != "style"]
    for element in elements:
        left, top, right, bottom = extents(element, size)
        assert -0.1 <= left <= right <= width + 0.1, (element.tag, element.attrib, element.text)
        assert -0.1 <= top <= bottom <= height + 0.1, (element.tag, element.attrib, element.text)
    return elements


@pytest.mark.parametrize("seed", range(20))
def test_ticks_are_round_numbers_within_the_range(seed):
    draw = random.Random(seed)
    low = draw.uniform(-10, 10) * 10 ** draw.randint(-6, 6)
    high = low + draw.random() * 10 ** draw.randint(-6, 6) + 1e-7 * abs(low)
    chosen = ticks(low, high)
    step = (chosen[-1] - chosen[0]) / (len(chosen) - 1) if len(chosen) > 1 else high - low
    assert 1 <= len(chosen) <= 6 and all(low - 1e-6 * step <= tick <= high + 1e-6 * step for tick in chosen)
    if len(chosen) > 1:
        digits = f"{step:.3e}".split("e")[0]
        assert float(digits) in (1.0, 2.0, 5.0), step


def test_ticks_of_known_ranges():
    assert ticks(0, 10) == [0, 2, 4, 6, 8, 10]
    assert ticks(0.13, 0.52) == pytest.approx([0.2, 0.3, 0.4, 0.5])
    assert ticks(3.0, 3.0) == [3.0]


def test_axes_place_data_at_their_edges():
    axes = Axes(10, 20, 110, 220, (1, 3), (-1, 1))
    assert axes.place(1, -1) == (10, 220) and axes.place(3, 1) == (110, 20) and axes.place(2, 0) == (60, 120)


def test_text_is_escaped_and_shortened_to_its_room():
    drawing = Picture(200, 60, font_size=10)
    drawing.text(10, 20, "<b>'&\"")
    drawing.text(10, 40, "model/" + "block/" * 20 + "dense", room=120)
    drawing.text(190, 55, "model/" + "block/" * 20 + "dense", anchor="end", room=120)
    _, plain, start, end = check_inside(drawing.svg())
    assert plain.text == "<b>'&\"" and len(plain) == 0
    assert start.text.startswith("model/") and start.text.endswith("…") and start[0].text.count("block") == 20
    assert end.text.startswith("…") and end.text.endswith("dense") and end[0].text.count("block") == 20


def test_a_stacked_bar_has_the_proportions_of_its_parts():
    drawing = Picture(200, 40)
    drawing.stacked_bar(20, 10, 150, 20, {"a": 1.0, "b": 2.0, "c": 0.0}, colours_of(["a", "b", "c"]))
    bars = check_inside(drawing.svg())[1:]
    assert [float(bar.get("width")) for bar in bars] == [50, 100, 0]
    assert [float(bar.get("x")) for bar in bars] == [20, 70, 170] and bars[1][0].text == "b: 2"


def test_a_legend_names_every_colour():
    names = [f"name {number}" for number in range(10)]
    drawing = Picture(800, 200)
    below = drawing.legend(10, 20, colours_of(names), columns=3)
    squares = check_inside(drawing.svg())[1::2]
    assert [square.get("fill") for square in squares] == [*COLOURS, *COLOURS[:2]]
    assert below == 100 > max(float(square.get("y")) + 12 for square in squares)


def test_a_curve_on_axes_lies_between_them():
    drawing = Picture(400, 300)
    axes = Axes(60, 30, 390, 250, (0, 100), (0.0, 1.0))
    drawing.axes(axes, "step", "loss")
    drawing.curve([axes.place(step, math.exp(-step / 30)) for step in range(101)], COLOURS[0])
    elements = check_inside(drawing.svg())
    words = [element.text for element in elements if element.tag == f"{SPACE}text"]
    assert {"step", "loss", "0.4", "80"} <= set(words)


def test_inside_html_there_is_no_name_space():
    assert "http" not in Picture(10, 10).svg(inside_html=True)


def test_a_picture_follows_the_dark_mode_and_is_light_where_css_is_not_known():
    drawing = Picture(100, 40)
    drawing.text(10, 20, "words")
    drawing.rule(0, 30, 100, 30)
    ground, words, rule = check_inside(drawing.svg())
    assert (ground.get("fill"), words.get("fill"), rule.get("stroke")) == ("#ffffff", None, FRAME)
    style = ElementTree.fromstring(drawing.svg()).find(f"{SPACE}style").text
    assert "prefers-color-scheme: dark" in style
    for element in (ground, rule):
        assert f".{element.get('class')} " in style
    assert "<style" not in drawing.svg(inside_html=True)  # the page's style has the rules


def test_control_characters_make_no_broken_xml():
    picture = Picture(100, 40)
    name = "".join(map(chr, [*range(32), 0xD800, 0xFFFE, 0x1F600])) + "<&>"
    picture.text(1, 1, name)
    picture.text(1, 20, name, room=20.0)
    text = "".join(ElementTree.fromstring(picture.svg()).itertext())
    assert "\ufffd" in text and "<&>" in text and "\U0001f600" in text
