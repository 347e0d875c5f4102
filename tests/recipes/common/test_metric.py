import pytest

from recipes.common.metric import difference, written


@pytest.mark.parametrize("metric, value, text", [("test accuracy", 0.98765, "98.77%"), ("loss", 2.01234, "2.0123")])
def test_only_accuracies_are_written_in_percent(metric, value, text):
    assert written(metric, value) == text


def test_differences_are_in_points_for_accuracies_and_else_relative():
    assert difference("test accuracy", [0.9, 0.95, 0.93]) == "5.00 percentage points"
    assert difference("bits per byte", [2.2, 2.0, 2.1]) == "10.00% of the smallest"
