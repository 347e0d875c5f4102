"""The constants of the prediction come from the published tables of products and bandwidth, and from nothing else."""

import sys
from pathlib import Path

import numpy as np
import pytest

from keras_mp.chips import CHIPS
from keras_mp.planner.advise import OUTCOMES
from keras_mp.planner.read.matmuls import peak_of
from keras_mp.planner.time.step_time import (
    EFFICIENCIES,
    INTERVALS,
    LINKS,
    OPERATIONS,
    Interval,
    StepTime,
    score,
    scoring_seconds,
)

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.planner import (  # noqa: E402
    fit_efficiency,
    intervals,
    predictions,
    published_fits,
    published_runs,
    trust_page,
)


@pytest.fixture(scope="module")
def tables():
    return fit_efficiency.read()


def test_constants_are_fitted_to_the_tables(tables):
    fitted = fit_efficiency.fit(tables)
    assert {name: constants for name, (constants, _) in fitted.items()} == dict(EFFICIENCIES)


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


def test_attention_on_a_tpu_takes_what_its_table_says(tables):
    """Of it the vector units decide: those of a v5p, forward as well as backward."""
    assert fit_efficiency.fit_operations(tables) == OPERATIONS
    chip = CHIPS["v5p"]
    for _, flops, features, seconds, _ in tables["attention"]:
        assert scoring_seconds(flops, features, chip) == pytest.approx(seconds, rel=0.2)
        assert flops / chip.peak["bfloat16"] < seconds


def test_no_constant_changes_when_a_scored_run_is_taken_out(tables, monkeypatch):
    """The fit reads the tables only: no run of the score, nor what was predicted of it, is among them."""
    before = fit_efficiency.fit(tables)
    monkeypatch.setattr(published_runs, "RUNS", {})
    monkeypatch.setattr(predictions, "KEPT", Path("not there"))
    assert fit_efficiency.fit(fit_efficiency.read()) == before
    source = Path(fit_efficiency.__file__).read_text().replace("docs/tables/predictions.md", "")
    assert "predictions" not in source and "published_runs" not in source


def test_the_intervals_in_reports_are_those_of_the_runs():
    expected = {name: tuple(interval) for name, interval in INTERVALS.items()}
    assert intervals.table(predictions.kept()) == expected


def test_nine_of_ten_times_are_in_their_interval_when_their_source_is_left_out():
    rows = intervals.scored(predictions.kept())
    held, known, _ = intervals.coverage(rows, intervals.left_out(rows))
    before, known_before, _ = intervals.coverage(rows, intervals.ranges_before(rows))
    assert known == len(rows) >= 45 and held / known >= 0.85 > before / known_before


def test_an_interval_holds_nine_of_ten_of_what_it_has_not_seen():
    """Of numbers of any distribution: here 2,000 times one more of skewed ones, after 9 and after 40."""
    rng = np.random.default_rng()
    for count in (9, 40):
        drawn = rng.lognormal(sigma=0.7, size=(2000, count + 1))
        ends = [intervals.interval(row[:-1]) for row in drawn]
        held = np.mean([least <= row[-1] <= most for row, (least, most) in zip(drawn, ends, strict=True)])
        assert 0.85 < held < 0.97


@pytest.mark.parametrize(
    ("chip", "products", "sentence"),
    [
        ("a100", 2.0, "like the 16 published ones that XLA compiled (GPUs of compute capability 8, mostly products)"),
        ("a100", 0.5, "like the 22 published ones that XLA compiled (NVIDIA's GPUs) take 0.90 to 1.50 times"),
        ("h100", 2.0, "like the 22 published ones"),
        ("v6e", 2.0, "like the 9 published ones that XLA compiled (TPUs) take 0.80 to 1.20 times their prediction."),
    ],
)
def test_a_report_says_the_interval_of_the_narrowest_class(chip, products, sentence, monkeypatch):
    kept = {
        "GPUs of compute capability 8, mostly products": Interval(0.8, 1.4, 16, 3, 15),
        "NVIDIA's GPUs": Interval(0.9, 1.5, 22, 5, 20),
        "TPUs": Interval(0.8, 1.2, 9, 2, 9),
    }
    monkeypatch.setattr("keras_mp.planner.time.step_time.INTERVALS", kept)
    assert sentence in score(CHIPS[chip], StepTime(products, 1.0, 0.0, 100))


def test_a_note_says_how_often_published_steps_ended_otherwise():
    assert trust_page.outcomes(predictions.kept()) == OUTCOMES
    out = [fit for fit in published_fits.FITS.values() if not fit.ran]
    assert len(out) >= 15 and len({fit.chip or fit.target.partition("x4")[0] for fit in out}) >= 5
    assert all(fit.source.startswith("https://") for fit in out)


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
