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
