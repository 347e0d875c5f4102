"""The curves of a training as a picture."""

from pathlib import Path

from recipes.common.require import require
from recipes.common.run_folder import written_beside

figure = require("matplotlib.figure", extra="plots")

TRAIN, TEST = "#9aa5b1", "#0b6e99"


def draw_curves(rows: list[dict[str, float]], title: str, path: Path) -> None:
    """Draws loss and accuracy over the epochs, train and test, as a PNG.

    Args:
        rows: the rows of the history, with `epoch` and the `train_` and `test_` columns of loss and accuracy.
        title: above the picture.
        path: the PNG file.
    """
    # A figure without pyplot draws with Agg: no window, no display, no global state.
    picture = figure.Figure(figsize=(10, 4), layout="constrained")
    picture.suptitle(title, fontsize=13)
    loss, accuracy = picture.subplots(1, 2)
    epochs = [row["epoch"] for row in rows]
    for axes, metric in ((loss, "loss"), (accuracy, "accuracy")):
        for split, color in (("train", TRAIN), ("test", TEST)):
            values = [row[f"{split}_{metric}"] for row in rows]
            axes.plot(epochs, values, color=color, linewidth=2, label=split)
            axes.plot(epochs[-1], values[-1], "o", color=color)
        axes.set(xlabel="epoch", ylabel=metric)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.3)
    loss.set_yscale("log")
    accuracy.set_ylim(top=1.005)
    accuracy.legend(frameon=False, loc="lower right")
    last = rows[-1]["test_accuracy"]
    accuracy.set_title(f"test accuracy at the end: {last:.2%}", fontsize=10)
    loss.set_title(f"test loss at the end: {rows[-1]['test_loss']:.4f}", fontsize=10)
    with written_beside(path) as partial:
        picture.savefig(partial, dpi=150, format="png")
