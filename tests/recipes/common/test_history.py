import csv

from recipes.common.history import HistoryFile


def test_the_file_holds_a_row_for_each_finished_epoch(tmp_path):
    history = HistoryFile(tmp_path / "history.csv")
    for epoch in range(2):
        history.on_epoch_begin(epoch)
        history.on_epoch_end(epoch, {"loss": 0.5 - 0.25 * epoch, "val_accuracy": 0.75})
        with (tmp_path / "history.csv").open(newline="") as file:
            rows = list(csv.DictReader(file))
        assert [row["epoch"] for row in rows] == ["1", "2"][: epoch + 1]
    assert [float(row["train_loss"]) for row in rows] == [0.5, 0.25]
    assert [float(row["test_accuracy"]) for row in rows] == [0.75, 0.75]
    assert [path.name for path in tmp_path.iterdir()] == ["history.csv"]


def test_an_epoch_with_other_metrics_keeps_the_rows_before_it(tmp_path):
    history = HistoryFile(tmp_path / "history.csv")
    for epoch, logs in enumerate([{"loss": 0.5}, {"loss": 0.25, "loss_scale": 8.0}, {"val_loss": 0.125}]):
        history.on_epoch_begin(epoch)
        history.on_epoch_end(epoch, logs)
    with (tmp_path / "history.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["epoch", "train_loss", "train_loss_scale", "test_loss", "seconds"]
    assert [row["train_loss"] for row in rows] == ["0.5", "0.25", ""]
    assert [row["train_loss_scale"] for row in rows] == ["", "8.0", ""]
    assert [row["test_loss"] for row in rows] == ["", "", "0.125"]
