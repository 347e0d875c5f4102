"""`TrainingCheckpoint`: a killed training goes on to the same numbers."""

from __future__ import annotations

import copy
import inspect
import itertools
import json
import os
import pickle
import random
import shutil
import warnings
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import keras
import numpy as np

from keras_mp.conversion.other_precision import precision_of
from keras_mp.parallel import workers
from keras_mp.rebuild.optimizers import held_optimizers
from keras_mp.reporting.text import byte_size
from keras_mp.system.argument_checks import whole_number
from keras_mp.training import training_state
from keras_mp.training.batches import Batches
from keras_mp.training.checkpoint_file import (
    CheckpointError,
    Place,
    Reader,
    checkpoints_in,
    path_of,
    place_of,
    remove_partial,
    write,
)

DAMAGED = ".damaged"


class TrainingCheckpoint(keras.callbacks.Callback):
    """Saves the whole state of a training, and resumes.

    It goes on from the newest checkpoint when `fit` is called again. A save holds the weights, the optimizer with its
    slots, the loss scale, the gradients accumulated so far, FP8 amax histories, the state of every seed generator and
    of Python's and NumPy's own, the metrics, and the place in the data. A training that was killed and resumed ends
    with the weights of one that was not, bit for bit, where the device computes the same bits twice.

    A save in one precision goes on in another: a message says what is left out or begins anew.

        batches = keras_mp.training.ShuffledBatches(x, y, batch_size=64, seed=0)
        checkpoint = keras_mp.TrainingCheckpoint("checkpoints", batches, every=100)
        model.fit(batches, epochs=10, shuffle=False, callbacks=[checkpoint])

    Put it last, behind the callbacks that it keeps. Files are written beside their place and renamed; a damaged newest
    one is set aside with a message, and the one before it is taken. A save that fails while training goes on is a
    warning.

    Args:
        folder: the folder of the saves; made when it is missing.
        batches: the training data given to `fit`, to save and resume within an epoch; it is told each epoch's number.
            Without it a save is made at the end of each epoch, and the data must come in the same order each time.
        every: the number of steps of an epoch after each of which a save is made, too; 0 for the ends of epochs alone.
            A training that is stopped within an epoch, as by ctrl-C in a training recipe, saves as well.
        max_to_keep: the number of saves to keep, the newest.
        settings: the settings of the training, by name; a resumed one must be asked for the same.
        ignore_settings: names of settings that may differ.
        force: whether to go on with other settings, and with an optimizer that keeps other variables.
        callbacks: the callbacks whose counters, best values and histories are saved too, such as `EarlyStopping`.

    Where several processes train together, the first one writes, and all must see the folder.

    Raises:
        ValueError: If an argument is out of its range, or if every is given without batches.
        CheckpointError: If, in `fit`, the settings, the data, the model or the optimizer differ from those of the save,
            or none of the saves can be read.
        OSError: If, in `fit`, there is no room for the saves.

    Examples:
        >>> import keras, keras_mp, numpy as np, tempfile
        >>> x, y, folder = np.ones((32, 4)), np.ones((32, 1)), tempfile.mkdtemp()
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        >>> model.compile("adam", "mse")
        >>> for epochs in (1, 3):  # the second call goes on where the first ended
        ...     batches = keras_mp.training.ShuffledBatches(x, y, batch_size=8, seed=0)
        ...     checkpoint = keras_mp.TrainingCheckpoint(folder, batches, every=2)
        ...     history = model.fit(batches, epochs=epochs, shuffle=False, verbose=0, callbacks=[checkpoint])
        resumed from ...
    """

    supports_multiprocess = True

    def __init__(
        self,
        folder: str | os.PathLike[str],
        batches: Batches | None = None,
        *,
        every: int = 0,
        max_to_keep: int = 3,
        settings: Mapping[str, Any] | None = None,
        ignore_settings: Collection[str] = (),
        force: bool = False,
        callbacks: Collection[Any] = (),
    ) -> None:
        super().__init__()
        every, max_to_keep = whole_number("every", every, 0), whole_number("max_to_keep", max_to_keep)
        if batches is not None and not isinstance(batches, Batches):
            raise ValueError(
                "batches must be keras_mp.training.Batches, such as keras_mp.training.ShuffledBatches, got "
                f"{type(batches).__name__}: the place within an epoch is not known of other data; without batches, "
                "checkpoints are saved at the ends of epochs"
            )
        if every and batches is None:
            raise ValueError(f"every={every} saves within an epoch, which needs batches=, the data given to fit")
        self.folder, self.batches, self.every, self.max_to_keep = Path(folder), batches, every, max_to_keep
        self.settings = json.loads(json.dumps(dict(settings or {}), default=str))
        self.ignore_settings, self.force, self.callbacks = frozenset(ignore_settings), force, tuple(callbacks)
        self.resumed_from: Path | None = None

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Goes on from the newest whole save, if any."""
        others = [name for name in held_optimizers(self._model) if name != "optimizer"]
        if others:
            raise CheckpointError(
                f"TrainingCheckpoint saves the optimizer that compile() was given, and model {self._model.name!r} has "
                f"others, whose state would be lost: {', '.join(others)}"
            )
        if workers.is_first():
            self.folder.mkdir(parents=True, exist_ok=True)
            remove_partial(self.folder)
        # The first one's folder is there, and the others look into it.
        workers.from_first(None)
        workers.agree(
            f"the checkpoints in {str(self.folder)!r}, a folder that all must share",
            {"newest": next((path.name for path in checkpoints_in(self.folder)), None)},
        )
        self._start = Place(0, 0)
        self._told = False
        self._quiet = ExitStack()
        self._before = [snapshot(callback) for callback in self.callbacks]
        if checkpoints_in(self.folder):
            training_state.build_state(self.model, None if self.batches is None else self.batches.batch(0, 0))
            self._resume()
        if self.model.built:
            training_state.build_state(self.model)
        if self.model.built and workers.is_first():
            self._check_room()

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Sets the data to the epoch.

        In the one that is resumed, it sets the step, too.
        """
        self._epoch, self._stopped = epoch, False
        self._first = self._done = self._start.step if epoch == self._start.epoch else 0
        if self.batches is not None:
            self.batches.start_at(epoch, self._first)
        if self._first and self.resumed_from is not None:
            with Reader(self.resumed_from, check=False) as reader:
                training_state.restore_metrics(self.model, reader)
            # Keras says that the data ran out where an epoch has fewer steps than the others.
            self._quiet.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", message="Your input ran out of data")

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Ends a resumed epoch after its last step."""
        # Not left to the data: TensorFlow would begin a step without a batch, and draw its random numbers.
        if self._first and self.batches is not None and self._first + batch >= self.batches.steps:
            raise StopIteration

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Saves when it is time, or when training stops."""
        self._done = self._first + batch + 1
        if self.batches is not None and workers.count() == 1:
            self._check_read(self.batches)
        # Not self.model, which on JAX fetches the whole state each time.
        self._stopped = bool(self._model.stop_training)
        if self.batches is not None and self._done < self.batches.steps:
            if self._stopped or (self.every and self._done % self.every == 0):
                self._save(Place(self._epoch, self._done), ended=False)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Saves, unless the epoch was cut short."""
        self._quiet.close()
        steps = self.params.get("steps") if self.batches is None else self.batches.steps
        if steps is None or self._done >= steps:
            # What stops an epoch's last step, as ctrl-C does, would have stopped another as well: training goes on when
            # it is resumed. What stops at its end, as EarlyStopping does, has decided that it is over.
            self._save(Place(epoch + 1, 0), ended=bool(self._model.stop_training) and not self._stopped)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Makes the model forget where it was resumed."""
        self._quiet.close()
        self._model._initial_epoch = None

    def _check_read(self, batches: Batches) -> None:
        """Checks that `fit` trains on the batches, in order."""
        if self._told:
            return
        if not batches.being_read:
            raise CheckpointError(
                f"fit trains on other data than batches={batches!r}, which TrainingCheckpoint was given, and a resumed "
                "training would begin at the wrong place: give fit these batches, or leave batches= out to save at the "
                "ends of epochs"
            )
        if not batches.in_order:
            self._told = True
            warnings.warn(
                "fit reads the batches in an order of its own, which a resumed training will not repeat: pass "
                "shuffle=False to fit, as the batches are shuffled already",
                stacklevel=2,
            )

    def _resume(self) -> None:
        path = self.folder / workers.from_first(self._newest().name if workers.is_first() else None)
        # The first one has checked it: a file of gigabytes is not read twice.
        with Reader(path, check=False) as reader:
            manifest = reader.manifest
            self._check_settings(path, manifest)
            try:
                notes = training_state.restore(self.model, reader, self.force)
            except CheckpointError as error:
                raise CheckpointError(f"{path} cannot be resumed: {error}") from None
            for callback, state in zip(self.callbacks, manifest["callbacks"], strict=False):
                vars(callback).update(from_json(state, reader))
            random.setstate((manifest["python"][0], tuple(manifest["python"][1]), manifest["python"][2]))
            np.random.set_state(from_json(manifest["numpy"], reader))
            self._start = Place(*manifest["place"])
        self.resumed_from = path
        ended = manifest["ended"] or self._start.epoch >= self.params["epochs"]
        self._model._initial_epoch = self.params["epochs"] if ended else self._start.epoch
        lines = [f"resumed from {path}: {'training had ended' if ended else f'{self._start} is done'}"]
        if self.batches is None:
            lines.append(
                "the data must come in the same order as in the interrupted run: fit(x, y) needs shuffle=False, or "
                "keras_mp.training.ShuffledBatches and batches="
            )
        now = precision_of(self.model)
        if manifest["precision"] != now:
            lines.append(f"saved in {manifest['precision']}, goes on in {now}")
        if workers.is_first():
            print("\n  ".join([*lines, *notes]))

    def _newest(self) -> Path:
        paths = checkpoints_in(self.folder)
        for path in paths:
            try:
                with Reader(path):
                    return path
            except CheckpointError as error:
                aside = path.with_name(path.name + DAMAGED)
                path.replace(aside)
                print(f"{path} is damaged ({error}): set aside as {aside.name}, taking the one before it")
        raise CheckpointError(
            f"none of the {len(paths)} checkpoints in {str(self.folder)!r} can be read; they are set aside with the "
            f"ending {DAMAGED}: run again to begin anew"
        )

    def _check_settings(self, path: Path, manifest: dict[str, Any]) -> None:
        was, now = (
            settings | {f"data: {name}": value for name, value in data.items()}
            for settings, data in ((manifest["settings"], manifest["data"]), (self.settings, self._data()))
        )
        names = [name for name in dict.fromkeys([*was, *now]) if name not in self.ignore_settings]
        different = [name for name in names if was.get(name) != now.get(name)]
        if different and not self.force:
            lines = "".join(f"\n  {name}: {was.get(name)!r} then, {now.get(name)!r} now" for name in different)
            raise CheckpointError(
                f"{path} was trained with other settings:{lines}\nto go on with the new ones, pass force=True (--force)"
            )

    def _check_room(self) -> None:
        size = training_state.byte_count(self.model)
        more = max(1, self.max_to_keep + 1 - len(checkpoints_in(self.folder)))
        free = shutil.disk_usage(self.folder).free
        if more * size > free:
            raise OSError(
                f"there is no room for checkpoints in {str(self.folder)!r}: {more} more of {byte_size(size)} are to "
                f"be written, and {byte_size(free)} are free. Give a folder with more room, or keep fewer than "
                f"max_to_keep={self.max_to_keep}"
            )

    def _save(self, place: Place, ended: bool) -> None:
        arrays: dict[str, np.ndarray] = {}
        state = random.getstate()
        manifest = {
            "place": place,
            "ended": ended,
            "precision": precision_of(self.model),
            "settings": self.settings,
            "data": self._data(),
            "state": training_state.describe(self.model),
            "callbacks": [
                to_json(changed(callback, before), arrays, "callbacks")
                for callback, before in zip(self.callbacks, self._before, strict=True)
            ],
            "python": [state[0], list(state[1]), state[2]],
            "numpy": to_json(np.random.get_state(legacy=False), arrays, "numpy"),
            "versions": {"keras": keras.__version__, "backend": keras.backend.backend()},
        }
        if not workers.is_first():
            # What several processes hold together, all must read.
            for _ in training_state.arrays(self.model, metrics=place.step > 0):
                pass
            return
        try:
            of_training = training_state.arrays(self.model, metrics=place.step > 0)
            write(path_of(self.folder, place), itertools.chain(of_training, arrays.items()), manifest)
        except OSError as error:
            warnings.warn(
                f"the checkpoint of {place} was not written ({error}); those before it are kept, and training goes on",
                stacklevel=2,
            )
            return
        for path in checkpoints_in(self.folder)[self.max_to_keep :]:
            if place_of(path) < place:
                path.unlink(missing_ok=True)

    def _data(self) -> dict[str, Any]:
        return {} if self.batches is None else self.batches.signature()


# What a training has changed in the plain attributes of a callback: counters, best values, histories.

_PLAIN = (bool, int, float, str, type(None))


def snapshot(callback: keras.callbacks.Callback) -> dict[str, Any]:
    """Copies plain attributes by name, but not the settings.

    Plain are numbers, texts, arrays, and lists and dicts of such. Settings are what has the name of an argument of
    `__init__`: some callbacks turn their sign as training begins.
    """
    settings = {"params", *inspect.signature(type(callback).__init__).parameters}
    return {
        name: copy.deepcopy(value)
        for name, value in vars(callback).items()
        if name not in settings and _is_plain(value)
    }


def changed(callback: keras.callbacks.Callback, before: dict[str, Any]) -> dict[str, Any]:
    """Returns the plain attributes that differ from a snapshot."""
    now = snapshot(callback)  # compared by bytes: NaN is then itself, and arrays are compared whole
    return {
        name: now[name] for name in now if name not in before or pickle.dumps(now[name]) != pickle.dumps(before[name])
    }


def to_json(value: Any, arrays: dict[str, np.ndarray], name: str) -> Any:
    """Makes a plain value JSON's; puts arrays aside by name."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        key = f"{name}/{len(arrays)}"
        arrays[key] = value
        return {"array": key}
    if isinstance(value, (list, tuple)):
        return [to_json(item, arrays, name) for item in value]
    if isinstance(value, dict):
        return {"items": [[key, to_json(item, arrays, name)] for key, item in value.items()]}
    return value


def from_json(value: Any, arrays: Any) -> Any:
    """The inverse of `to_json`; tuples come back as lists."""
    if isinstance(value, list):
        return [from_json(item, arrays) for item in value]
    if isinstance(value, dict) and "array" in value:
        return arrays[value["array"]]
    if isinstance(value, dict):
        return {key: from_json(item, arrays) for key, item in value["items"]}
    return value


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, _PLAIN) and _is_plain(item) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return all(_is_plain(item) for item in value)
    return isinstance(value, (*_PLAIN, np.ndarray, np.generic))
