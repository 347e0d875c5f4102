"""What a row says of a step that fits with little room left."""

from types import SimpleNamespace

import pytest

from keras_mp.advice.asked import Asked
from keras_mp.advice.figures import Figures
from keras_mp.advice.measures import Measures
from keras_mp.advice.place import find_place
from keras_mp.advice.row import compiled_row
from keras_mp.advice.source import Source

pytestmark = pytest.mark.once


@pytest.mark.parametrize(
    ("chip", "share", "warned"), [("l4", 0.98, True), ("l4", 0.89, False), ("v5e", 0.98, False)]
)  # what a TPU's program may not use, its compiler keeps
def test_a_gpu_that_is_nearly_full_has_a_note(chip, share, warned):
    place, measures = find_place(chip), Measures("mixed_bfloat16")
    figures = Figures(weights=1, optimizer=0, peak=int(share * place.capacity), flops={})
    one = Asked(place, {measures: figures}, {measures: place}, best=measures)
    row = compiled_row(one, SimpleNamespace(rows=8, sees_batch=[]), Source(lambda: None))
    assert row.fits
    assert ("It needs 98% of the memory" in " ".join(row.notes)) == warned
