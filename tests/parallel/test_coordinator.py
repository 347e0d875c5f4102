"""The coordinator of several processes, with threads for processes; what kills real ones is in test_workers.py."""

import socket
import threading
import time

import pytest

from keras_mp.parallel import coordinator as module
from keras_mp.parallel.cluster import Cluster, ClusterError
from keras_mp.parallel.coordinator import Coordinator, LostWorkerError, differences


def free_port():
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


@pytest.fixture(autouse=True)
def key(monkeypatch):
    monkeypatch.setenv("KERAS_MP_CLUSTER_KEY", "a key of the tests alone")


def together(count, act, addresses=None, first=0, **options):
    """Runs `act(coordinator)` for processes of a cluster in threads, and returns what each returned or raised."""
    addresses = addresses or tuple(f"localhost:{free_port()}" for _ in range(count))
    outcomes = [None] * count

    def run(index):
        try:
            outcomes[index] = act(Coordinator(Cluster(addresses, first + index, "test"), **options))
        except Exception as error:  # noqa: BLE001 - it is what is tested
            outcomes[index] = error

    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive(), "a process hangs"
    return outcomes


@pytest.fixture
def often(monkeypatch):
    """Heartbeats come in shorter intervals, and a silence is noticed sooner."""
    monkeypatch.setattr(module, "HEARTBEAT_SECONDS", 0.2)


def test_all_come_and_learn_one_another_s_addresses():
    def act(coordinator):
        coordinator.agree("settings", {"rate": 0.1, "nested": {"a": [1, 2]}})
        coordinator.leave()
        return coordinator.addresses

    outcomes = together(3, act)
    assert outcomes[0] == outcomes[1] == outcomes[2] and len(set(outcomes[0])) == 3
    assert all(address.startswith("localhost:") for address in outcomes[0])


def test_a_difference_is_told_to_all():
    def act(coordinator):
        coordinator.agree("versions", {"keras": "3.15.1"})
        coordinator.agree("settings", {"rate": 0.1, "seed": coordinator.cluster.index // 2})

    outcomes = together(3, act)
    for outcome in outcomes:
        assert isinstance(outcome, ClusterError)
        text = str(outcome)
        assert "the workers differ in settings" in text and "worker 2 (localhost" in text
        assert "seed: 1, and worker 0 has 0" in text and "rate" not in text and "worker 1" not in text


def test_what_the_first_says_reaches_all():
    def act(coordinator):
        value = coordinator.from_first({"folder": coordinator.cluster.index})
        coordinator.leave()
        return value

    assert together(3, act) == [{"folder": 0}] * 3


@pytest.mark.parametrize("wants", [None, 0, 2])
def test_one_that_wants_to_stop_is_heard_by_all(wants):
    def act(coordinator):
        answers = [coordinator.any(False), coordinator.any(coordinator.cluster.index == wants)]
        coordinator.leave()
        return answers

    assert together(3, act) == [[False, wants is not None]] * 3


def test_one_that_never_joins_is_named():
    addresses = tuple(f"localhost:{free_port()}" for _ in range(3))
    outcomes = together(2, lambda coordinator: None, addresses, join_seconds=0.6)
    assert all(f"worker 2 ({addresses[2]}) did not join within 1 s" in str(outcome) for outcome in outcomes)


def test_a_first_that_never_joins_is_named():
    cluster = Cluster((f"localhost:{free_port()}", "localhost:1"), 1, "test")
    with pytest.raises(LostWorkerError, match=r"worker 0 \(localhost:\d+\) does not answer within 1 s"):
        Coordinator(cluster, join_seconds=0.6)


def test_a_port_in_use_is_named():
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=rf"port {port} of worker 0 .* is in use"):
            Coordinator(Cluster((f"localhost:{port}", "localhost:1"), 0, "test"), join_seconds=0.6)


@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.parametrize("way", ["ends", "stops"])
def test_one_that_is_lost_is_named_by_all_others(lost, way, often):
    told = [threading.Event() for _ in range(3)]
    kept = []  # one that is collected closes its connections
    texts = [None] * 3

    def act(coordinator):
        index = coordinator.cluster.index
        kept.append(coordinator)

        def on_lost(text):
            texts[index] = text
            told[index].set()

        coordinator.on_lost = on_lost
        coordinator.agree("nothing", {})
        if index == lost:
            coordinator.on_lost = lambda text: None
            if way == "ends":
                coordinator.close()
            else:
                coordinator._over.set()  # no more heartbeats, and the connection stays
            return
        assert told[index].wait(20)
        return texts[index]

    start = time.monotonic()
    outcomes = together(3, act, silence_seconds=1.0)
    assert time.monotonic() - start < 15
    for index, outcome in enumerate(outcomes):
        if index != lost:
            assert f"worker {lost} (localhost" in outcome, outcome
            assert ("silent for 1 s" if way == "stops" else "ended") in outcome


def test_one_that_leaves_is_not_missed(often):
    lost = []

    def act(coordinator):
        coordinator.on_lost = lost.append
        if coordinator.cluster.index:
            coordinator.leave()
        else:
            time.sleep(1.5)
            coordinator.leave()

    together(2, act, silence_seconds=1.0)
    assert not lost


def test_differences_are_told_by_key():
    one = {"a": 1, "b": {"c": 2, "d": [1]}, "e": None}
    assert differences(one, one) == []
    assert differences(one, {"a": 1, "b": {"c": 3, "d": [1]}, "f": 0}) == [
        "b.c: 3, and worker 0 has 2",
        "f: 0, and worker 0 has None",
    ]
