"""A recipe that is stopped, and goes on with --resume, from the command line."""

import signal

import keras
import numpy as np
import pytest

from keras_mp.cli.training_recipe import run_recipe as main
from keras_mp.training.batches import ShuffledBatches

QUICK = (
    "--epochs 3 --batch-size 8 --sequence-length 16 --layers 1 --width 32 --dropout 0.2 --generate 3 --no-export "
    "--checkpoint-every 2"
).split()


pytestmark = pytest.mark.slow


def run(output, corpus, *options):
    return main(["language_model", "--output", str(output), "--corpus", corpus, *QUICK, *options])


def weights(folder):
    keras.mixed_precision.set_global_policy("float32")
    return keras.saving.load_model(folder / "model.keras").get_weights()


def test_ctrl_c_saves_and_resume_ends_with_the_same_bits_and_history(tmp_path, corpus, monkeypatch, capsys):
    policy = "mixed_bfloat16"
    assert run(tmp_path / "whole", corpus, "--policy", policy) == 0
    read = ShuffledBatches.batch
    stop = int(np.random.default_rng().integers(3, 30))
    asked = []

    def interrupted(self, epoch, step):
        asked.append((epoch, step))
        if len(asked) == stop:
            signal.raise_signal(signal.SIGINT)
        return read(self, epoch, step)

    monkeypatch.setattr(ShuffledBatches, "batch", interrupted)
    assert run(tmp_path / "stopped", corpus, "--policy", policy) == 130
    monkeypatch.setattr(ShuffledBatches, "batch", read)
    assert run(tmp_path / "stopped", corpus, "--policy", policy, "--resume") == 0
    assert "resumed from" in capsys.readouterr().out
    whole, resumed = tmp_path / "whole" / "language_model", tmp_path / "stopped" / "language_model"
    np.testing.assert_equal(weights(resumed), weights(whole), err_msg=f"stopped when batch {stop} was read")

    def history(folder):
        return [line.rpartition(",")[0] for line in (folder / "history.csv").read_text().splitlines()]

    assert history(resumed) == history(whole)
    assert (resumed / "generated.txt").read_bytes() == (whole / "generated.txt").read_bytes()


def test_resume_with_other_settings_shows_them_and_takes_force(tmp_path, corpus, capsys):
    # Where nothing was, --resume is a first run.
    assert run(tmp_path, corpus, "--policy", "float32", "--resume") == 0
    assert "there is no run 'language_model'" in capsys.readouterr().out
    with pytest.raises(ValueError, match="(?s)epochs: 3 then, 4 now.*learning_rate: 0.004 then, 0.5 now.*--force"):
        run(tmp_path, corpus, "--policy", "float32", "--resume", "--learning-rate", "0.5", "--epochs", "4")
    other = ["--policy", "mixed_bfloat16", "--state-dtype", "float8"]
    assert run(tmp_path, corpus, *other, "--resume", "--epochs", "4", "--force") == 0
    printed = capsys.readouterr().out
    assert "saved in float32, goes on in mixed_bfloat16" in printed
    optimizer = keras.saving.load_model(tmp_path / "language_model" / "model.keras").optimizer
    stored = {str(variable.dtype) for variable in optimizer.variables}
    assert int(optimizer.iterations) > 0 and "float8_e4m3fn" in stored
    assert [path.name for path in tmp_path.iterdir()] == ["language_model"]
