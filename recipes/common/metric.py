"""How the number that a training is judged by is written: accuracies in percent, all else as it is."""

from collections.abc import Sequence


def written(metric: str, value: float) -> str:
    """Writes a value: `98.87%` for a metric whose name ends in accuracy, else `2.0123`."""
    return f"{value:.2%}" if metric.endswith("accuracy") else f"{value:.4f}"


def difference(metric: str, values: Sequence[float]) -> str:
    """Words the largest difference: percentage points between accuracies, else a share of the smallest value."""
    gap = max(values) - min(values)
    if metric.endswith("accuracy"):
        return f"{100 * gap:.2f} percentage points"
    return f"{gap / min(values):.2%} of the smallest"
