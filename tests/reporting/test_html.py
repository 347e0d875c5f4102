"""The parts of a page: numbers under their names, names that break."""

from keras_mp.reporting.html import table


def test_numbers_stand_under_their_names():
    text = table(("what", "size"), [("weights", "3.2 MiB")], numbers=(1,))
    assert '<th>what</th><th class="number">size</th>' in text
    assert '<td>weights</td><td class="number">3.2 MiB</td>' in text


def test_a_path_breaks_after_each_of_its_names_and_is_escaped():
    assert table(("layer",), [("block_1/<b>",)]).count("block_<wbr>1/<wbr>&lt;b&gt;") == 1
