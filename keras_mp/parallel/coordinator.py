"""What several processes share, and which one is lost."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from keras_mp import backend
from keras_mp.parallel.cluster import Cluster, ClusterError

engine = backend.engine_of(__package__)

POLL_SECONDS = 1.0
SILENCE_SECONDS = 20.0
JOIN_SECONDS = 300.0


class LostWorkerError(RuntimeError):
    """A process that did not join or was lost."""


def end_process(message: str) -> None:
    """Ends this process at once."""
    # A collective that waits for a process which is gone cannot be interrupted.
    print(f"\nerror: {message}", file=sys.stderr, flush=True)
    os._exit(1)


class Coordinator:
    """Compares and shares values of processes, and watches them.

    All is in the key-value store of the engine's own coordination service, `jax.distributed` or that of TensorFlow.

    ```
    join:   the engine's rendezvous, which waits for all
    agree:  each writes its value; the first reads them all, and writes what all read: in what they differ
    watch:  the first process sees from which one nothing is heard; it writes that under the key "lost", for which a
            thread of every process waits, and every process ends itself. Who fails writes its error there
    leave:  who leaves first writes how many calls and steps it has made. One that makes another would wait for ever,
            and is lost. All wait until all have left
    ```

    Args:
        join_seconds: the seconds that the rendezvous waits for all; so long a process that has left waits for others
            that have made no step and no call since they joined, as in a loop of the user's own.
        silence_seconds: the seconds for which nothing may be heard of a process.
        on_lost: a function that is called with the message when a process is lost.
    """

    def __init__(
        self,
        cluster: Cluster,
        *,
        join_seconds: float = JOIN_SECONDS,
        silence_seconds: float = SILENCE_SECONDS,
        on_lost: Callable[[str], None] = end_process,
    ) -> None:
        self.cluster, self.on_lost = cluster, on_lost
        self.join_seconds, self.silence_seconds = join_seconds, silence_seconds
        self.steps = self.calls = self.calls_of_join = 0
        self._first_left: tuple[int, int] | None = None
        self._leaving, self._over = threading.Event(), threading.Event()
        gpus = cluster.own_gpus(os.environ.get("CUDA_VISIBLE_DEVICES"))
        in_main = threading.current_thread() is threading.main_thread()
        # Python's own handler would only run when the engine has ended to wait.
        handler = signal.signal(signal.SIGINT, signal.SIG_DFL) if in_main else None
        try:
            limits = silence_seconds, join_seconds
            engine.connect(cluster.addresses, cluster.index, gpus, *limits, lambda: on_lost(self._no_answer()))
        except engine.ENGINE_ERRORS as error:
            raise LostWorkerError(self._why_not_joined(str(error))) from error
        finally:
            if in_main:
                signal.signal(signal.SIGINT, handler)
        self._threads = [
            threading.Thread(target=target, daemon=True)
            for target in (self._wait_for_loss, self._wait_for_first_end, self._listen)
        ]
        for thread in self._threads:
            thread.start()

    def agree(self, name: str, value: Any) -> None:
        """Checks that all processes have the same value, JSON's.

        All must call it, in the same order. A dict is compared key by key.

        Raises:
            ClusterError: on all of them, where one differs; names it and the difference.
        """

        def judge(values: list[Any]) -> str:
            return "".join(
                f"\n  {self.cluster.name(index)}: {line}"
                for index, other in enumerate(values)
                for line in differing_keys(values[0], other)
            )

        if text := self._judged(value, judge):
            self.leave()
            raise ClusterError(f"the workers differ from worker 0 in {name}:{text}")

    def any(self, flag: bool) -> bool:
        """Tells whether any process sets a flag; all call it."""
        return bool(self._judged(bool(flag), any))

    def from_first(self, value: Any) -> Any:
        """Gives all processes the first one's value; all call it."""
        self._count()
        if self.cluster.index:
            return json.loads(engine.store_get(str(self.calls)))
        engine.store_put(str(self.calls), json.dumps(value))
        return value

    def begin_step(self, stop: bool) -> bool:
        """Counts a step; returns whether to stop after it.

        On JAX that is the same on all processes; on TensorFlow it is `stop`, which the step sums.
        """
        self._count()
        self.steps += 1
        return engine.stops_after(self.steps, stop)

    def leave(self, error: BaseException | None = None) -> None:
        """Waits until all leave; after an error tells them."""
        if self._leaving.is_set():
            return
        self._leaving.set()
        own = self.cluster.name(self.cluster.index)
        try:
            if error is not None:
                self._over.set()
                engine.store_put("lost", f"{own} has failed: {type(error).__name__}: {error}")
            engine.store_put("left", json.dumps([self.cluster.index, self.calls if error is None else sys.maxsize]))
            if error is None and self.cluster.index == 0:
                for index in range(1, len(self.cluster.addresses)):
                    engine.store_get(f"gone/{index}")
                engine.store_put("lost", "")
            elif error is None:
                engine.store_put(f"gone/{self.cluster.index}", "")
                self._threads[0].join()
        except engine.ENGINE_ERRORS:
            pass  # the store has gone, with the first process
        self._over.set()
        for thread in self._threads:  # one inside of the engine when Python ends would abort the process
            thread.join(self.silence_seconds)
        if error is None:
            engine.disconnect()

    def who_is_lost(self, error: BaseException) -> str:
        """Names the processes that an engine's error says are lost."""
        # TensorFlow's list of those that it does not hear, without the process from which this one learnt of it.
        listed = re.search(r"unhealthy.*\n((?:\S*/task:\d+\n)+)", str(error))
        numbers = re.findall(r"/task:(\d+)\b", listed[1] if listed else str(error))
        indices = sorted({int(number) for number in numbers} - {self.cluster.index})
        return ", ".join(self.cluster.name(index) for index in indices if index < len(self.cluster.addresses))

    def lose(self, text: str) -> None:
        """Tells all that a process is lost, and ends this."""
        if not self._over.is_set():
            try:
                engine.store_put("lost", text)
            except engine.ENGINE_ERRORS:
                pass
            self._end(text)

    def _judged(self, value: Any, judge: Callable[[list[Any]], Any]) -> Any:
        """Gives all processes what the first says of their values."""
        self._count()
        key = str(self.calls)
        if self.cluster.index:
            engine.store_put(f"{key}/{self.cluster.index}", json.dumps(value, default=str))
            return json.loads(engine.store_get(key))
        others = [json.loads(engine.store_get(f"{key}/{index}")) for index in range(1, len(self.cluster.addresses))]
        result = judge([json.loads(json.dumps(value, default=str)), *others])
        engine.store_put(key, json.dumps(result))
        return result

    def _end(self, text: str) -> None:
        if not self._over.is_set():
            self._over.set()
            self._leaving.set()
            if self.cluster.index == 0:
                time.sleep(POLL_SECONDS)  # the store ends with this process: before, the others read or print why
            stop = "" if text.endswith("?") else "."
            self.on_lost(f"{text}{stop} The training ends here; run it again with --resume to go on")

    def _count(self) -> None:
        self.calls += 1
        self._check_order()

    def _check_order(self) -> None:
        if self._first_left is not None and self.calls > self._first_left[1]:
            self._lose_to_early_end()

    def _lose_to_early_end(self) -> None:
        assert self._first_left is not None
        first, own = self.cluster.name(self._first_left[0]), self.cluster.name(self.cluster.index)
        self.lose(f"{first} has ended its part of the training, and {own} has not: it would wait for ever")

    def _wait_for_loss(self) -> None:
        try:
            text = engine.store_get("lost")
        except engine.ENGINE_ERRORS:
            # A process that is leaving has no more need of the first one.
            text = "" if self._leaving.is_set() else self._first_is_lost()
        if text:
            self._end(text)

    def _wait_for_first_end(self) -> None:
        try:
            index, calls = json.loads(engine.store_get("left"))
        except engine.ENGINE_ERRORS:
            return
        self._first_left = index, calls
        self._check_order()
        # A loop of the user's own counts no steps.
        if not self._leaving.wait(self.join_seconds) and self.calls == self.calls_of_join:
            self._lose_to_early_end()

    def _listen(self) -> None:
        while not self._over.wait(POLL_SECONDS):
            late = threading.Timer(self.silence_seconds, self._end, [self._first_is_lost()])
            late.daemon = True
            late.start()
            try:
                silent = engine.silent_processes(len(self.cluster.addresses), self.silence_seconds)
            except engine.ENGINE_ERRORS:
                return  # the thread that waits for a loss says so
            finally:
                late.cancel()
            if silent:
                names = ", ".join(map(self.cluster.name, silent))
                self.lose(f"{names} has ended, or has been silent for {self.silence_seconds:.0f} s: is it stopped?")

    def _first_is_lost(self) -> str:
        return f"{self.cluster.name(0)} has ended, or has been silent for {self.silence_seconds:.0f} s: is it stopped?"

    def _no_answer(self) -> str:
        limit = f"{self.join_seconds:.0f} s"
        first = self.cluster.name(0)
        return f"{first} does not answer within {limit}: is it started, is its address right, and is its port open?"

    def _why_not_joined(self, text: str) -> str:
        _, listed, missing = text.rpartition("timed out task names:")
        indices = sorted({int(number) for number in re.findall(r"task:(\d+)", missing)})
        if listed and indices:
            return f"{', '.join(map(self.cluster.name, indices))} did not join within {self.join_seconds:.0f} s"
        if self.cluster.index and "deadline" in text.lower():
            return self._no_answer()
        return f"{self.cluster.name(self.cluster.index)} cannot join: is its port in use? {text}"


def differing_keys(one: Any, other: Any, path: str = "") -> list[str]:
    """Says in which keys two values differ, a line each."""
    if isinstance(one, dict) and isinstance(other, dict):
        lines = []
        for key in dict.fromkeys([*one, *other]):
            lines += differing_keys(one.get(key), other.get(key), f"{path}.{key}" if path else str(key))
        return lines
    return [] if one == other else [f"{path + ': ' if path else ''}{other!r}, and worker 0 has {one!r}"]
