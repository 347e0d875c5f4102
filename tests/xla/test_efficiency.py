"""The constants of the prediction come from the published tables of products and bandwidth, and from nothing else."""

import sys
from pathlib import Path

import pytest

from keras_mp.chips import CHIPS
from keras_mp.xla.efficiency import EFFICIENCIES
from keras_mp.xla.estimate import peak_of
from keras_mp.xla.score import SPREADS

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks import fit_efficiency, predictions  # noqa: E402

pytestmark = pytest.mark.once


@pytest.fixture(scope="module")
def tables():
    return fit_efficiency.read()


def test_constants_are_fitted_to_the_tables(tables):
    fitted = fit_efficiency.fit(tables)
    assert {name: constants for name, (constants, _) in fitted.items()} == dict(EFFICIENCIES)


def test_a_table_with_other_figures_gives_other_constants(tables):
    slower = {
        name: [[*row[:-2], row[-2] * 2, row[-1]] if row[0] == "v7x" else row for row in rows]
        for name, rows in tables.items()
    }
    fitted = fit_efficiency.fit(slower)
    assert fitted["v7x"][0].products[16] == pytest.approx(EFFICIENCIES["v7x"].products[16] / 2, rel=0.01)
    assert fitted["9"][0] == EFFICIENCIES["9"]


def test_constants_meet_the_tables(tables):
    for row in [row for row in tables["products"] if row[0] == "v7x"]:
        seconds = fit_efficiency.predicted(row, EFFICIENCIES["v7x"])
        assert seconds == pytest.approx(fit_efficiency.measured(row), rel=0.05)


def test_no_constant_changes_when_a_scored_run_is_taken_out(tables, monkeypatch):
    """The fit reads the tables only: no run of the score, nor what was predicted of it, is among them."""
    before = fit_efficiency.fit(tables)
    monkeypatch.setattr(predictions, "RUNS", {})
    monkeypatch.setattr(predictions, "KEPT", Path("not there"))
    assert fit_efficiency.fit(fit_efficiency.read()) == before
    assert "predictions" not in Path(fit_efficiency.__file__).read_text().replace("docs/predictions.md", "")


def test_the_spread_in_reports_is_that_of_the_score():
    assert predictions.spreads(predictions.kept()) == {name: tuple(spread) for name, spread in SPREADS.items()}


def test_the_page_is_made_from_the_results():
    from benchmarks.predictions_page import page

    assert page(predictions.kept()) == (ROOT / "docs" / "predictions.md").read_text()


def test_an_error_is_as_large_for_half_of_the_time_as_for_twice_of_it():
    assert predictions.error(0.5) == predictions.error(2) == 1
    assert predictions.error(1) == 0


def test_int8_counts_at_its_own_rate_where_the_table_has_it():
    integers = ("int8", "int8")
    assert peak_of(integers, CHIPS["t4"]) == 130e12
    assert peak_of(integers, CHIPS["l4"]) == CHIPS["l4"].peak["bfloat16"]
    assert peak_of(("int8", "bfloat16"), CHIPS["v5e"]) == CHIPS["v5e"].peak["bfloat16"]
