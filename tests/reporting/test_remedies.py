"""The lines of code that reports name are on the page about NaN, too."""

from pathlib import Path

from keras_mp.reporting import remedies

PAGE = Path(__file__).parents[2] / "docs" / "nan.md"


def test_the_page_about_nan_has_the_lines_of_the_reports():
    page = PAGE.read_text()
    for line in (remedies.STABILIZE, remedies.SCALE_LOSS, remedies.KEEP_STATISTICS, remedies.FLOAT32_LAYER):
        assert f"`{line}`" in page
