import errno
import functools
import os
import shutil
import signal
import subprocess
import sys
import types
import warnings
from pathlib import Path

import keras
import numpy as np
import pytest
from resumable import EPOCHS, STEPS, Act, Crash, build, data, train, values
from thirds import thirds

import keras_mp
from keras_mp.training import checkpoint
from keras_mp.training.checkpoint_file import CheckpointError, checkpoints_in


class Trainer:
    """A model that is compiled once, and trained again and again from where it began."""

    def __init__(self, precision, folder):
        self.precision = precision
        start, self.model = build(precision, seed=12), build(precision)
        for model in (start, self.model):
            model.optimizer.build(model.trainable_variables)
        self.start, self.other_start = values(self.model), values(start)
        self.whole = self.trained(folder)

    def begin(self, start):
        model = self.model
        model.stop_training, model._initial_epoch = False, None
        for variable, value in zip([*model.variables, *model.optimizer.variables], start.values(), strict=True):
            variable.assign(value)
        return model

    def crashed(self, folder, place, **options):
        with pytest.raises(Crash):
            train(self.precision, folder, Act(place, crash), model=self.begin(self.start), **options)

    def trained(self, folder, *actions, **options):
        """Trains from the checkpoint in a folder, or anew."""
        # What a checkpoint lacks differs: it is of another seed then.
        start = self.other_start if checkpoints_in(folder) else self.start
        model, logs = train(self.precision, folder, *actions, model=self.begin(start), **options)
        return values(model), logs


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    """The trainer of a precision, and a training that nobody disturbs, which the tests compare with."""
    return functools.cache(lambda precision: Trainer(precision, tmp_path_factory.mktemp("undisturbed")))


@pytest.fixture
def small(trainer):
    return trainer("small")


def crash(callback):
    raise Crash


def assert_same_training(one, other):
    (expected, logs), (actual, other_logs) = one, other
    assert [v.shape for v in expected.values()] == [v.shape for v in actual.values()]
    for (name, want), have in zip(expected.items(), actual.values(), strict=True):
        np.testing.assert_array_equal(have, want, err_msg=name)
    np.testing.assert_equal(logs, other_logs)  # NaN, where a float16 epoch is all skipped, is NaN


def a_random_place():
    place = divmod(int(np.random.default_rng().integers(2, EPOCHS * STEPS - 1)), STEPS)
    print(f"ends after epoch {place[0]}, step {place[1]}")
    return place


only_jax = pytest.mark.skipif(keras.backend.backend() != "jax", reason="states lie on the host on JAX alone")


@pytest.mark.parametrize(
    "precision", ["small", pytest.param("host states", marks=[pytest.mark.slow, pytest.mark.jax, only_jax])]
)
def test_killed_at_a_random_step_it_ends_with_the_same_bits(precision, tmp_path, trainer):
    trains = trainer(precision)
    program = Path(__file__).with_name("resumable.py")
    command = [sys.executable, program, precision, tmp_path, *a_random_place()]
    environment = os.environ | {"PYTHONPATH": str(program.parents[2]), "KERAS_BACKEND": keras.backend.backend()}
    child = subprocess.run([str(word) for word in command], stderr=subprocess.PIPE, timeout=300, env=environment)
    assert child.returncode == -signal.SIGKILL, child.stderr
    assert_same_training(trains.whole, trains.trained(tmp_path))


@pytest.mark.parametrize(
    "precision",
    [
        "mixed_float16",
        pytest.param("int8", marks=[pytest.mark.slow, pytest.mark.jax]),
        *thirds(("fp8", "bfloat16", "float8 states", "int4")),
    ],
)
def test_crashed_at_a_random_step_it_ends_with_the_same_bits(precision, tmp_path, trainer):
    trains = trainer(precision)
    if precision == "mixed_float16":
        assert int(trains.model.optimizer.skipped_steps.numpy()) > 0
    trains.crashed(tmp_path, a_random_place())
    assert_same_training(trains.whole, trains.trained(tmp_path))


@pytest.mark.parametrize("place", [(0, 2), (1, STEPS - 1)])
def test_a_crash_at_the_edges_of_an_epoch_and_of_a_window(place, tmp_path, trainer):
    trains = trainer("mixed_float16")
    trains.crashed(tmp_path, place, every=1)
    assert_same_training(trains.whole, trains.trained(tmp_path))
    assert "Your input ran out of data" not in str(warnings.filters)  # silent in the epoch that was gone on with


@pytest.mark.jax
def test_it_can_crash_again_and_again(tmp_path, small):
    for place in [(0, 3), (0, 5), (2, 1)]:
        # The batches of an epoch that is gone on with are counted from its first.
        first = next((int(path.stem[-8:]) for path in checkpoints_in(tmp_path)), 0) if place[0] == 0 else 0
        small.crashed(tmp_path, (place[0], place[1] - first))
    assert_same_training(small.whole, small.trained(tmp_path))


def test_without_batches_it_saves_at_the_ends_of_epochs(tmp_path, small):
    x, y = data().inputs, data().targets

    def fit(folder, *actions):
        model, saves = small.begin(small.start), keras_mp.TrainingCheckpoint(folder)
        model.fit(x, y, batch_size=10, epochs=3, shuffle=False, verbose=0, callbacks=[*actions, saves])
        return values(model), 0

    whole = fit(tmp_path / "whole")
    with pytest.raises(Crash):
        fit(tmp_path / "crashed", Act((2, 1), crash))
    assert checkpoints_in(tmp_path / "crashed")[0].name == "epoch00002-step00000000.npz"
    assert_same_training(whole, fit(tmp_path / "crashed"))


def test_a_finished_training_is_not_trained_again(tmp_path, capsys, small):
    finished = small.trained(tmp_path)
    again = small.trained(tmp_path)
    assert "training had ended" in capsys.readouterr().out
    assert_same_training(finished, again)
    small.model.fit(data(), epochs=1, shuffle=False, verbose=0)  # and the model does not remember where it was
    assert int(small.model.optimizer.iterations) == (EPOCHS + 1) * STEPS


@pytest.mark.parametrize(
    "step, newest", [(3, "epoch00001-step00000004.npz"), (STEPS - 1, "epoch00002-step00000000.npz")]
)
def test_a_training_that_is_stopped_saves_at_that_step_and_goes_on(step, newest, tmp_path, small):
    def stop(callback):
        callback.model.stop_training = True

    small.trained(tmp_path, Act((1, step), stop), every=0)
    assert checkpoints_in(tmp_path)[0].name == newest
    assert_same_training(small.whole, small.trained(tmp_path, every=0))


def test_counters_of_other_callbacks_go_on(tmp_path, small):
    def fit(folder, *actions):
        batches, model = data(), small.begin(small.start)
        early = keras.callbacks.EarlyStopping("loss", 100.0, 4, restore_best_weights=True)  # none is so much better
        saves = keras_mp.TrainingCheckpoint(folder, batches, every=2, callbacks=[early])
        model.fit(batches, epochs=9, shuffle=False, verbose=0, callbacks=[early, *actions, saves])
        return early.stopped_epoch, early.wait, [weight.tolist() for weight in early.best_weights]

    whole = fit(tmp_path / "whole")
    assert whole[0] == 4
    with pytest.raises(Crash):
        fit(tmp_path / "crashed", Act((2, 4), crash))
    assert fit(tmp_path / "crashed") == whole
    assert fit(tmp_path / "crashed") == whole  # it had ended by itself: no more epochs


@pytest.mark.slow
def test_another_precision_goes_on_from_the_same_state(tmp_path, capsys, trainer):
    plain, kept = trainer("float32"), {}
    plain.crashed(tmp_path, (1, 3), every=1)

    def look(callback):
        kept.update(values(callback.model))

    plain.trained(tmp_path / "look", Act((1, 2), look), every=0)  # the third step of the second epoch
    other = build("fp8", gradient_accumulation_steps=None)
    batches = data()
    saves = keras_mp.TrainingCheckpoint(tmp_path, batches)
    saves.set_model(other)
    saves.set_params({"epochs": 3, "steps": STEPS})
    saves.on_train_begin()
    told = capsys.readouterr().out
    assert "saved in float32, goes on in fp8" in told and "begins anew" in told
    assert "the loss scale starts at its initial value" not in told
    saved = [v for v in values(other).values() if v.dtype == np.float32 and v.size >= 16 and v.ndim < 3]
    expected = [v for v in kept.values() if v.dtype == np.float32 and v.size >= 16 and v.ndim < 3]
    np.testing.assert_equal(saved, expected)
    other.fit(batches, epochs=3, shuffle=False, verbose=0, callbacks=[saves])


def test_float16_goes_on_in_float32_and_back_in_the_middle_of_a_window(tmp_path, capsys, trainer):
    half = trainer("mixed_float16")

    def fit(model, *actions):
        train("mixed_float16", tmp_path, *actions, model=model, every=1)

    model = half.begin(half.start)
    model.optimizer.dynamic_scale.assign(2.0**10)
    with pytest.raises(Crash):
        fit(model, Act((0, 4), crash))
    plain = build("float32", gradient_accumulation_steps=3)
    with pytest.raises(Crash):
        fit(plain, Act((0, 1), crash))  # its second step: the sixth of the epoch
    assert "the loss scale is left out" in capsys.readouterr().out
    assert checkpoints_in(tmp_path)[0].name == "epoch00000-step00000005.npz"
    assert int(plain.optimizer._iterations.numpy()) == 6
    back = half.begin(half.other_start)
    fit(back)
    told = capsys.readouterr().out
    assert "saved in float32, goes on in mixed_float16" in told and "starts at its initial value" in told
    micro_batches = int(back.optimizer.inner_optimizer._iterations.numpy())
    assert micro_batches == EPOCHS * STEPS - int(back.optimizer.skipped_steps.numpy())


def test_a_damaged_newest_save_is_set_aside(tmp_path, capsys, small):
    small.crashed(tmp_path, (1, 5))
    newest = checkpoints_in(tmp_path)[0]
    newest.write_bytes(newest.read_bytes()[:-1])
    assert_same_training(small.whole, small.trained(tmp_path))
    told = capsys.readouterr().out
    assert f"{newest} is damaged" in told and "taking the one before it" in told
    assert newest.with_name(newest.name + ".damaged").exists()


def test_where_every_save_is_damaged_it_says_so(tmp_path, small):
    small.crashed(tmp_path, (1, 5))
    for path in checkpoints_in(tmp_path):
        path.write_bytes(b"PK")
    with pytest.raises(CheckpointError, match="none of the 3 checkpoints in .* can be read"):
        small.trained(tmp_path)


def test_the_newest_are_kept_and_nothing_half_written(tmp_path, small):
    tmp_path.joinpath(".partial-epoch00000-step00000002.npz").write_bytes(b"half")
    small.trained(tmp_path, max_to_keep=2)
    assert [path.name for path in sorted(tmp_path.iterdir())] == [
        "epoch00002-step00000006.npz",
        "epoch00003-step00000000.npz",
    ]


def test_no_room_is_an_error_before_training(tmp_path, monkeypatch, small):
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: types.SimpleNamespace(free=10_000))
    with pytest.raises(
        OSError, match=r"no room for checkpoints in .*: 4 more of [1-9][\d.]* KiB .*, and 9.8 KiB are free"
    ):
        small.trained(tmp_path)


def test_a_save_that_fails_is_a_warning_and_the_ones_before_it_are_kept(tmp_path, monkeypatch, small):
    small.crashed(tmp_path, (0, 5))
    kept = checkpoints_in(tmp_path)

    def fail(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint, "write", fail)
    with pytest.warns(UserWarning, match="was not written .*No space left on device.*training goes on"):
        small.trained(tmp_path)
    assert checkpoints_in(tmp_path) == kept


def test_a_save_of_another_model_is_refused_by_name(tmp_path, small):
    small.crashed(tmp_path, (1, 0))
    wider = keras.Sequential([keras.Input((8, 8, 1)), keras.layers.Flatten(), keras.layers.Dense(4)], name="wider")
    wider.compile("adamw", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    before = values(wider)
    described = (
        r"of another model:\n  it has 'small' with [\d,]+ values in [^\n]*"
        r"\n  here is 'wider' with 260 values in 2 weights of [^\n]*dense[^\n]*\n  it has .* of shape"
    )
    with pytest.raises(CheckpointError, match=described):
        train("small", tmp_path, model=wider, force=True)
    for name, value in before.items():
        np.testing.assert_array_equal(values(wider)[name], value)


def test_a_save_of_another_optimizer_is_refused_without_force(tmp_path, capsys, small):
    small.crashed(tmp_path, (1, 0))

    def other():
        model = build("small")
        model.compile(keras.optimizers.SGD(0.01, momentum=0.9), model.loss, metrics=["accuracy"])
        return model

    with pytest.raises(CheckpointError, match="was trained with AdamW, and the model is compiled with SGD"):
        train("small", tmp_path, model=other())
    train("small", tmp_path, model=other(), force=True, epochs=1)
    assert "_velocities of the checkpoint has no place here" in capsys.readouterr().out


def test_other_settings_are_shown_and_need_force(tmp_path, small):
    small.crashed(tmp_path, (1, 0), settings={"rate": 0.1, "name": "one"}, ignore_settings=["name"])
    with pytest.raises(CheckpointError, match=r"other settings:\n  rate: 0.1 then, 0.2 now\nto go on .*force=True"):
        small.trained(tmp_path, settings={"rate": 0.2, "name": "two"}, ignore_settings=["name"])
    small.trained(tmp_path, settings={"rate": 0.2, "name": "two"}, ignore_settings=["name"], force=True)


def test_other_data_is_shown(tmp_path, small):
    small.crashed(tmp_path, (1, 0))
    batches = keras_mp.training.ShuffledBatches(data().inputs, data().targets, batch_size=4, seed=5)
    with pytest.raises(CheckpointError, match="data: batch_size: 8 then, 4 now"):
        small.model.fit(batches, verbose=0, callbacks=[keras_mp.TrainingCheckpoint(tmp_path, batches)])


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"max_to_keep": 0}, "max_to_keep=0 must be a whole number, 1 or more"),
        ({"every": -1}, "every=-1 must be a whole number, 0 or more"),
        ({"every": 5}, "every=5 saves within an epoch, which needs batches="),
        (
            {"batches": [1]},
            "batches must be keras_mp.training.Batches, such as keras_mp.training.ShuffledBatches, got list",
        ),
    ],
)
def test_a_bad_argument_is_named(arguments, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        keras_mp.TrainingCheckpoint(tmp_path, **arguments)


@pytest.mark.jax
def test_batches_that_fit_shuffles_or_does_not_read_are_named(tmp_path, capsys):
    x = np.arange(64, dtype="float32")[:, None]
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    batches = keras_mp.training.ShuffledBatches(x, x, batch_size=4, seed=0)
    with pytest.warns(UserWarning, match="an order of its own, which a resumed training will not repeat: pass shuffle"):
        model.fit(batches, verbose=0, callbacks=[keras_mp.TrainingCheckpoint(tmp_path / "shuffled", batches)])
    other = keras_mp.training.ShuffledBatches(x, x, batch_size=4, seed=0)
    for given in ((x, x), (other,)):
        with pytest.raises(CheckpointError, match="fit trains on other data than batches="):
            model.fit(*given, verbose=0, callbacks=[keras_mp.TrainingCheckpoint(tmp_path / "other", batches)])
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        for epochs in (1, 2):
            whole = keras_mp.TrainingCheckpoint(tmp_path / "epochs")
            model.fit(x, x, shuffle=False, epochs=epochs, verbose=0, callbacks=[whole])
    assert "fit(x, y) needs shuffle=False" in capsys.readouterr().out


def test_optimizers_that_would_be_lost_are_named(tmp_path):
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model.second = keras.optimizers.Adam()
    with pytest.raises(CheckpointError, match="others, whose state would be lost: second"):
        model.fit(np.ones((4, 1)), np.ones((4, 1)), verbose=0, callbacks=[keras_mp.TrainingCheckpoint(tmp_path)])
