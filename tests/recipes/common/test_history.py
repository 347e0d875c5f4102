import csv

from recipes.common.history import HistoryFile


def test_the_file_holds_a_row_for_each_finished_epoch_whatever_its_metrics(tmp_path):
    history = HistoryFile(tmp_path / "history.csv")
    for epoch, logs in enumerate([{"loss": 0.5}, {"loss": 0.25, "loss_scale": 8.0}, {"val_loss": 0.125}]):
        history.on_epoch_begin(epoch)
        history.on_epoch_end(epoch, logs)
        assert len((tmp_path / "history.csv").read_text().splitlines()) == epoch + 2
    with (tmp_path / "history.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["epoch"] for row in rows] == ["1", "2", "3"] and len(list(tmp_path.iterdir())) == 1
    assert list(rows[0]) == ["epoch", "train_loss", "train_loss_scale", "test_loss", "seconds"]
    assert [row["train_loss"] for row in rows] == ["0.5", "0.25", ""]
    assert [row["train_loss_scale"] for row in rows] == ["", "8.0", ""]
    assert [row["test_loss"] for row in rows] == ["", "", "0.125"]
