"""The parts of a page: numbers under their names, bars in proportion, names that break."""

import re

from keras_mp.reporting.html import stacked_bar, table


def test_numbers_stand_under_their_names():
    text = table(("what", "size"), [("weights", "3.2 MiB")], numbers=(1,))
    assert '<th>what</th><th class="number">size</th>' in text
    assert '<td>weights</td><td class="number">3.2 MiB</td>' in text


def test_a_table_without_names_has_no_header():
    assert "<th" not in table(("", ""), [("a", "b")])


def test_a_path_breaks_after_each_of_its_names_and_is_escaped():
    assert table(("layer",), [("block_1/<b>",)]).count("block_<wbr>1/<wbr>&lt;b&gt;") == 1


def test_a_bar_has_the_proportions_of_its_parts_and_names_each():
    text = stacked_bar({"a": 1.0, "b": 3.0}, "{:.1f} MiB".format)
    assert re.findall(r"width: ([\d.]+)%", text) == ["25.000", "75.000"]
    bar, legend = re.findall(r"background: (#\w+)", text)[:2], re.findall(r"background: (#\w+)", text)[2:]
    assert bar == legend and len(set(bar)) == 2 and "a: 1.0 MiB" in text and "b: 3.0 MiB" in text
