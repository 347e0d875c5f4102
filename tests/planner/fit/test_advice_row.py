"""What the notes of a row say of a step with little room left."""

from types import SimpleNamespace

import pytest

from keras_mp.lowering import Source
from keras_mp.planner.advise import compiled_row
from keras_mp.planner.chips.place import find_place
from keras_mp.planner.fit.measures import Measures
from keras_mp.planner.fit.schedule import Asked
from tests.planner.fit.made_reports import report


def row_of(place, measures, made):
    one = Asked(place, {measures: made}, {measures: place}, best=measures)
    return compiled_row(one, SimpleNamespace(rows=8, outline=SimpleNamespace(sees_batch=())), Source(lambda: None))


@pytest.mark.parametrize(
    ("chip", "share", "warned"), [("l4", 0.98, True), ("l4", 0.89, False), ("v5e", 0.98, False)]
)  # what a TPU's program may not use, its compiler keeps
def test_a_gpu_that_is_nearly_full_has_a_note(chip, share, warned):
    place, measures = find_place(chip), Measures("mixed_bfloat16")
    row = row_of(place, measures, report(1, peak=int(share * place.capacity)))
    assert row.fits
    assert ("It needs 98% of the memory" in " ".join(row.notes)) == warned


@pytest.mark.parametrize(
    ("chip", "share", "blocks", "warned"),
    [
        ("h100", 0.93, "4 and 8 of 48 blocks", True),
        ("h100", 0.5, "4 and 8 of 48 blocks", False),
        ("h100", 0.93, "", False),
        ("v5e", 0.93, "4 and 8 of 48 blocks", False),
    ],
)
def test_a_compiler_for_gpus_saves_memory_that_few_blocks_do_not_show(chip, share, blocks, warned):
    place, measures = find_place(chip), Measures("mixed_bfloat16")
    row = row_of(place, measures, report(1, peak=int(share * place.capacity), extrapolated=blocks))
    assert ("may need less" in " ".join(row.notes)) == warned
