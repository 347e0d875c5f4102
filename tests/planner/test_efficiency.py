"""The constants of the prediction come from the published tables of products and bandwidth, and from nothing else."""

import sys
from pathlib import Path

import pytest

from keras_mp.chips import CHIPS
from keras_mp.planner.read.matmuls import peak_of
from keras_mp.planner.time.step_time import CYCLES_A_SECOND, EFFICIENCIES, LINKS, SPREADS, Spread, score, spread_of

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.planner import fit_efficiency, predictions, published_runs  # noqa: E402


@pytest.fixture(scope="module")
def tables():
    return fit_efficiency.read()


def test_constants_are_fitted_to_the_tables(tables):
    fitted = fit_efficiency.fit(tables)
    assert {name: constants for name, (constants, _) in fitted.items()} == dict(EFFICIENCIES)


def test_cycles_pass_at_the_rate_of_the_tables(tables):
    """v5e is in no table: its rate is that of the peak, at 4 matrix units of 128 x 128 multiply-adds a cycle."""
    fitted = fit_efficiency.cycles_a_second(tables)
    assert fitted == {chip: rate for chip, rate in CYCLES_A_SECOND.items() if chip != "v5e"}
    assert CYCLES_A_SECOND["v5e"] == pytest.approx(CHIPS["v5e"].peak["bfloat16"] / (4 * 128 * 128 * 2), rel=0.01)


@pytest.mark.parametrize("chip", ["v100", "t4"])
def test_convolutions_reach_less_than_products(tables, chip):
    """By the median of the tables' rows; a third of them is within 20%."""
    constants = EFFICIENCIES[{"v100": "7.0", "t4": "7.5"}[chip]]
    rows = [row for row in tables["convolutions"] if row[0] == chip]
    ratios = sorted(fit_efficiency.predicted(row, constants) / fit_efficiency.measured(row) for row in rows)
    assert len(rows) == 3 * 78 and constants.convolution < 0.7
    assert ratios[len(ratios) // 2] == pytest.approx(1, abs=0.15)


def test_tf32_is_fitted_to_tables_of_its_own(tables):
    for generation, chips in (("8", ("a100-40gb", "a100-40gb-pcie")), ("9", ("h100",))):
        rows = [row for row in tables["products"] if row[0] in chips and row[1] == "tfloat32"]
        assert len(rows) >= 5 and 32 in EFFICIENCIES[generation].products


def test_a_table_with_other_figures_gives_other_constants(tables):
    slower = {
        name: [[*row[:-2], row[-2] * 1.25, row[-1]] if row[0] == "v7x" else row for row in rows]
        for name, rows in tables.items()
    }
    fitted = fit_efficiency.fit(slower)
    assert fitted["v7x"][0].products[16] == pytest.approx(EFFICIENCIES["v7x"].products[16] / 1.25, rel=0.01)
    assert fitted["9"][0] == EFFICIENCIES["9"]


def test_constants_meet_the_tables(tables):
    for row in [row for row in tables["products"] if row[0] == "v7x"]:
        seconds = fit_efficiency.predicted(row, EFFICIENCIES["v7x"])
        assert seconds == pytest.approx(fit_efficiency.measured(row), rel=0.05)


@pytest.mark.parametrize(("chip", "generation"), [("h100", "9"), ("b200", "10")])
def test_large_products_that_xla_compiled_take_what_its_table_says(tables, chip, generation):
    """By the median, for each dtype; those of PyTorch and of Transformer Engine are fitted with them."""
    for dtype in ("bfloat16", "tfloat32"):
        rows = [row for row in tables["products"] if (row[0], row[1], row[-1]) == (chip, dtype, "xla")]
        constants = EFFICIENCIES[generation]
        ratios = sorted(fit_efficiency.predicted(row, constants) / fit_efficiency.measured(row) for row in rows)
        assert len(rows) == 35 and ratios[17] == pytest.approx(1, abs=0.05)


def test_collectives_take_what_the_table_says(tables):
    links = fit_efficiency.fit_links(tables)
    assert LINKS == {"nvidia": links}
    large = [row for row in tables["collectives"] if row[3] >= 2**26]
    ratios = [fit_efficiency.collective_seconds(row, links) / fit_efficiency.measured(row) for row in large]
    assert len(large) == 24 and min(ratios) > 0.85 and max(ratios) < 1.25


def test_no_constant_changes_when_a_scored_run_is_taken_out(tables, monkeypatch):
    """The fit reads the tables only: no run of the score, nor what was predicted of it, is among them."""
    before = fit_efficiency.fit(tables)
    monkeypatch.setattr(published_runs, "RUNS", {})
    monkeypatch.setattr(predictions, "KEPT", Path("not there"))
    assert fit_efficiency.fit(fit_efficiency.read()) == before
    source = Path(fit_efficiency.__file__).read_text().replace("docs/tables/predictions.md", "")
    assert "predictions" not in source and "published_runs" not in source


def test_the_spread_in_reports_is_that_of_the_score():
    expected = {name: tuple(spread) for name, spread in SPREADS.items()}
    assert predictions.spreads(predictions.kept(), published_runs.XLA) == expected


@pytest.mark.parametrize(
    ("chip", "sentence"),
    [
        ("h100", "5 published runs that XLA compiled for this chip took 0.78 to 1.20 of the predicted time."),
        ("h200", "9 published runs that XLA compiled for chips of this generation took 0.70 to 1.30 of the predicted"),
        ("v5e", "One published run that XLA compiled for this chip, it took 0.70 of the predicted time."),
        ("v5p", "No published run that XLA compiled for a chip of this generation was compared with its prediction."),
    ],
)
def test_a_report_says_the_chips_own_spread_or_that_of_its_generation(chip, sentence, monkeypatch):
    spreads = {"h100": Spread(5, 0.78, 1.2), "9": Spread(9, 0.7, 1.3), "v5e": Spread(1, 0.7, 0.7)}
    monkeypatch.setattr("keras_mp.planner.time.step_time.SPREADS", spreads)
    assert score(CHIPS[chip]).startswith(sentence)
    assert spread_of(CHIPS[chip]) in (*spreads.values(), None)


def test_the_page_is_made_from_the_results():
    from benchmarks.planner.predictions_page import page

    assert page(predictions.kept()) == (ROOT / "docs" / "tables" / "predictions.md").read_text()


def test_an_error_is_as_large_for_half_of_the_time_as_for_twice_of_it():
    assert published_runs.error(0.5) == published_runs.error(2) == 1
    assert published_runs.error(1) == 0


def test_int8_counts_at_its_own_rate_where_the_table_has_it():
    integers = ("int8", "int8")
    assert peak_of(integers, CHIPS["t4"]) == 130e12
    assert peak_of(integers, CHIPS["l4"]) == CHIPS["l4"].peak["bfloat16"]
    assert peak_of(("int8", "bfloat16"), CHIPS["v5e"]) == CHIPS["v5e"].peak["bfloat16"]
