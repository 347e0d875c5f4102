"""The curves of a training as a picture."""

from pathlib import Path

from keras_mp.training import atomic_write
from recipes.common.metric import written
from recipes.common.require import require

TRAIN, TEST = "#9aa5b1", "#0b6e99"


def draw_curves(rows: list[dict[str, float]], title: str, path: Path) -> None:
    """Draws each metric over the epochs, train and test, as a PNG.

    Args:
        rows: the rows of the history, with `epoch` and the `train_` and `test_` columns of `loss` and other metrics.
        title: above the picture.
        path: the PNG file.
    """
    figure = require("matplotlib.figure", extra="plots")  # here, as inspect, audit and bench draw nothing
    metrics = sorted(name.removeprefix("test_") for name in rows[0] if name.startswith("test_"))
    metrics.sort(key="loss".__ne__)  # the loss first
    # A figure without pyplot draws with Agg: no window, no display, no global state.
    picture = figure.Figure(figsize=(5 * len(metrics), 4), layout="constrained")
    picture.suptitle(title, fontsize=13)
    epochs = [row["epoch"] for row in rows]
    for metric, axes in zip(metrics, picture.subplots(1, len(metrics), squeeze=False)[0], strict=True):
        for split, color in (("train", TRAIN), ("test", TEST)):
            values = [row[f"{split}_{metric}"] for row in rows]
            axes.plot(epochs, values, color=color, linewidth=2, label=split)
            axes.plot(epochs[-1], values[-1], "o", color=color)
        axes.set(xlabel="epoch", ylabel=metric)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
        axes.set_title(f"test {metric} at the end: {written(metric, values[-1])}", fontsize=10)
        if metric == "loss":
            axes.set_yscale("log")
        if metric == "accuracy":
            axes.set_ylim(top=1.005)
    with atomic_write(path) as partial:
        picture.savefig(partial, dpi=150, format="png")
