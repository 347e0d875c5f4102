"""This process among those that train together."""

from __future__ import annotations

import platform
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import keras

from keras_mp import backend
from keras_mp.backend.common.keras_private import get_random_seed
from keras_mp.parallel.cluster import Cluster
from keras_mp.parallel.coordinator import POLL_SECONDS, Coordinator
from keras_mp.system.packages import installed

engine = backend.engine_of(__package__)

PACKAGES = ("keras-mp", "keras", "tensorflow", "jax", "jaxlib", "numpy")

_joined: list[Coordinator] = []


@contextmanager
def join(cluster: Cluster | None, settings: Mapping[str, Any] | None = None, **options: Any) -> Iterator[None]:
    """Joins the processes that train together, in a scope.

    Begin the program with it, before any model or data. All must have the same versions and settings. When one of them
    is lost, dead or stopped, every other one ends itself within half a minute and names it; when this one fails, the
    others end, too.

    Args:
        cluster: the result of `find_cluster`; None for a process that trains alone, for which this does nothing.
        settings: the settings of the training, by name, which must be the same on all.
        **options: further arguments of `Coordinator`.

    Raises:
        LostWorkerError: If another process did not join; on JAX, which aborts this process then, a message says so.
        ClusterError: If the processes differ; the message names the difference.
    """
    if cluster is None:
        yield
        return
    coordinator = Coordinator(cluster, **options)
    _joined.append(coordinator)
    try:
        python = {"python": platform.python_version(), "backend": keras.backend.backend()}
        coordinator.agree("versions", python | installed(PACKAGES))
        coordinator.agree("settings", dict(settings or {}))
        if keras.backend.backend() == "jax":  # where a variable's initial value must be the same on all
            own = get_random_seed()
            seed = coordinator.from_first(secrets.randbelow(2**32) if own is None else own)
            if own is None:
                keras.utils.set_random_seed(seed)
        coordinator.calls_of_join = coordinator.calls
        yield
        coordinator.leave()
    except BaseException as error:
        if engine.is_engine_error(error):
            # Another process is lost, probably: where the error does not say which, a message that does ends this one.
            if lost := coordinator.who_is_lost(error):
                coordinator.lose(f"{lost} has ended, or is silent: is it stopped?")
            time.sleep(coordinator.silence_seconds + 2 * POLL_SECONDS)
        coordinator.leave(error)
        raise
    finally:
        _joined.pop()


def count() -> int:
    """How many processes train together."""
    return len(_joined[-1].cluster.addresses) if _joined else 1


def index() -> int:
    """Which of them this is; 0 for a process alone."""
    return _joined[-1].cluster.index if _joined else 0


def is_first() -> bool:
    """Whether this process writes the files and prints the progress."""
    return index() == 0


def agree(name: str, value: Any) -> None:
    """Checks that all processes have the same value."""
    if _joined:
        _joined[-1].agree(name, value)


def begin_step(stop: bool) -> bool:
    """Tells whether training stops after the step that begins.

    All processes must call it before every step, as `keras_mp.training.fit` does, and say whether they want to stop.
    """
    return _joined[-1].begin_step(stop) if _joined else stop


def any_process(flag: bool) -> bool:
    """Tells whether any process sets a flag; all call it."""
    return _joined[-1].any(flag) if _joined else flag


def from_first(value: Any) -> Any:
    """Gives all processes the first one's value, JSON's."""
    return _joined[-1].from_first(value) if _joined else value
