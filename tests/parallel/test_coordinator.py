"""The coordinator of several processes, with threads for processes and a dict for the engine's store."""

import threading

import pytest

from keras_mp import backend
from keras_mp.parallel import coordinator as module
from keras_mp.parallel import workers
from keras_mp.parallel.cluster import Cluster, ClusterError
from keras_mp.parallel.coordinator import Coordinator, LostWorkerError, differing_keys

engine = backend.engine_of("keras_mp.parallel")

ADDRESSES = tuple(f"host{index}:1" for index in range(3))


class Store:
    """The engine's store, and what it hears of the processes."""

    def __init__(self):
        self.texts, self.changed, self.silent, self.is_gone = {}, threading.Condition(), [], False

    def put(self, key, text):
        with self.changed:
            self.texts.setdefault(key, text)
            self.changed.notify_all()

    def get(self, key):
        with self.changed:
            self.changed.wait_for(lambda: self.is_gone or key in self.texts, 30)
            if self.is_gone:
                raise ConnectionError("the store is gone")
            return self.texts[key]

    def silent_processes(self, count, silence_seconds):
        if self.is_gone:
            raise ConnectionError("the store is gone")
        return self.silent

    def go(self):
        with self.changed:
            self.is_gone = True
            self.changed.notify_all()


@pytest.fixture
def store(monkeypatch):
    store = Store()
    monkeypatch.setattr(module, "POLL_SECONDS", 0.05)
    for name, value in {
        "ENGINE_ERRORS": (ConnectionError,),
        "connect": lambda *arguments: None,
        "disconnect": lambda: None,
        "store_put": store.put,
        "store_get": store.get,
        "silent_processes": store.silent_processes,
        "stops_after": lambda step, stop: stop,
    }.items():
        monkeypatch.setattr(engine, name, value)
    yield store
    store.go()
    for thread in threading.enumerate():
        if "(_wait_for_" in thread.name or "(_listen)" in thread.name:
            thread.join(10)


def together(act, count=3, **options):
    """Runs `act(coordinator)` for processes of a cluster in threads, and returns what each returned or raised."""
    outcomes = [None] * count

    def run(index):
        try:
            outcomes[index] = act(Coordinator(Cluster(ADDRESSES[:count], index), **options))
        except Exception as error:  # noqa: BLE001 - it is what is tested
            outcomes[index] = error

    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive(), "a process hangs"
    return outcomes


class Told:
    """Notes what the processes say when one is lost."""

    def __init__(self):
        self.texts, self.all_told = [], threading.Semaphore(0)

    def __call__(self, text):
        self.texts.append(text)
        self.all_told.release()

    def wait_for(self, count):
        for _ in range(count):
            assert self.all_told.acquire(timeout=20)
        return self.texts


@pytest.mark.parametrize("wants", [None, 0, 2])
def test_all_agree_hear_the_first_and_one_that_wants_to_stop_and_leave(store, wants):
    def act(coordinator):
        coordinator.agree("settings", {"rate": 0.1, "nested": {"a": (1, 2)}})
        answers = [coordinator.from_first({"folder": coordinator.cluster.index})]
        answers += [coordinator.any(False), coordinator.any(coordinator.cluster.index == wants)]
        coordinator.leave()
        assert not any(thread.is_alive() for thread in coordinator._threads)
        return answers

    assert together(act, on_lost=pytest.fail) == [[{"folder": 0}, False, wants is not None]] * 3


def test_a_difference_is_told_to_all(store):
    def act(coordinator):
        coordinator.agree("versions", {"keras": "3.15.1"})
        coordinator.agree("settings", {"rate": 0.1, "seed": coordinator.cluster.index // 2})

    for outcome in together(act, on_lost=pytest.fail):
        assert isinstance(outcome, ClusterError)
        text = str(outcome)
        assert (
            "the workers differ from worker 0 in settings" in text
            and "worker 2 (host2:1): seed: 1, and worker 0 has 0" in text
        )
        assert "rate" not in text and "worker 1" not in text


def test_join_compares_the_settings(store):
    told = {}

    def act(index):
        with pytest.raises(ClusterError) as told[index]:
            with workers.join(Cluster(ADDRESSES[:2], index), {"rate": (0.01, 0.5)[index]}):
                pass

    threads = [threading.Thread(target=act, args=(index,), daemon=True) for index in range(2)]
    [thread.start() for thread in threads]
    [thread.join(30) for thread in threads]
    for error in told.values():
        assert "worker 1 (host1:1): rate: 0.5, and worker 0 has 0.01" in str(error.value)


def test_one_that_is_silent_is_named_by_all(store):
    told = Told()
    together(lambda coordinator: coordinator, on_lost=told)
    store.silent = [1]
    for text in told.wait_for(3):
        assert "worker 1 (host1:1) has ended, or has been silent for 20 s: is it stopped?" in text
        assert "run it again with --resume" in text


def test_without_the_first_one_s_store_the_others_name_the_first(store):
    told = Told()
    together(lambda coordinator: coordinator, on_lost=told)
    store.go()
    assert all("worker 0 (host0:1) has ended" in text for text in told.wait_for(3))


def test_the_error_of_one_that_fails_is_told_to_the_others(store):
    told = Told()

    def act(coordinator):
        if coordinator.cluster.index == 1:
            coordinator.leave(ValueError("a fault of mine"))

    together(act, on_lost=told)
    for text in told.wait_for(2):
        assert "worker 1 (host1:1) has failed: ValueError: a fault of mine. The training ends here" in text


@pytest.mark.parametrize("counts", [True, False])
def test_one_that_ends_early_ends_all(store, counts):
    """Where steps are counted at once; in a loop of the user's own, which counts none, after a while."""
    told = Told()

    def act(coordinator):
        early = coordinator.cluster.index == 1
        for _ in range((3 if early else 4) if counts else 0):
            coordinator.begin_step(False)
        if early:
            threading.Thread(target=coordinator.leave, daemon=True).start()

    together(act, on_lost=told, join_seconds=300 if counts else 0.2)
    for text in told.wait_for(3):
        assert "worker 1 (host1:1) has ended its part of the training, and worker " in text


def test_one_that_writes_its_model_for_long_is_not_missed(store):
    def act(coordinator):
        coordinator.begin_step(False)
        if coordinator.cluster.index == 0:
            threading.Event().wait(0.5)
        coordinator.leave()

    together(act, on_lost=pytest.fail, join_seconds=0.1)


@pytest.mark.parametrize(
    "index, text, message",
    [
        (0, "1/3.\nSome timed out task names:\n/job:worker/replica:0/task:2\n", r"worker 2 \(host2:1\) did not join"),
        (1, "Deadline Exceeded\nremote target /job:worker/replica:0/task:0", r"worker 0 \(host0:1\) does not answer"),
        (0, "Could not start gRPC server", r"worker 0 \(host0:1\) cannot join: is its port in use\?"),
    ],
)
def test_one_that_does_not_join_is_named(store, monkeypatch, index, text, message):
    def connect(*arguments):
        raise ConnectionError(text)

    monkeypatch.setattr(engine, "connect", connect)
    with pytest.raises(LostWorkerError, match=message):
        Coordinator(Cluster(ADDRESSES, index))


def test_the_process_that_an_error_of_the_engine_names(store):
    told = (
        "Error reported from /job:worker/task:2: The following tasks are unhealthy (stopped sending heartbeats):\n"
        "/job:worker/replica:0/task:2\nThe tasks have crashed.\nremote target /job:worker/replica:0/task:0"
    )
    coordinator = Coordinator(Cluster(ADDRESSES, 1), on_lost=pytest.fail)
    assert coordinator.who_is_lost(RuntimeError(told)) == "worker 2 (host2:1)"
    assert coordinator.who_is_lost(RuntimeError(told.rpartition("\n")[2])) == "worker 0 (host0:1)"
    coordinator.leave(RuntimeError())


def test_differences_are_told_by_key():
    one = {"a": 1, "b": {"c": 2, "d": [1]}, "e": None}
    assert differing_keys(one, one) == []
    assert differing_keys(one, {"a": 1, "b": {"c": 3, "d": [1]}, "f": 0}) == [
        "b.c: 3, and worker 0 has 2",
        "f: 0, and worker 0 has None",
    ]
