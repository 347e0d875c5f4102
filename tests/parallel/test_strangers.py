"""Strangers at the coordinator: garbage, silence and impostors, before the processes of a training have joined."""

import json
import os
import resource
import socket
import stat
import threading
import time

import numpy as np
import pytest
from test_coordinator import free_port, together
from test_workers import Processes

from keras_mp.parallel import coordinator as module
from keras_mp.parallel.cluster import FILE, VARIABLE, Cluster, ClusterError, cluster_key, is_proof, proof
from keras_mp.parallel.coordinator import Coordinator, LostWorkerError

JOIN = {"kind": "join", "index": 1, "port": 6666, "number": "00", "proof": "0" * 64}
MESSAGES = [
    *(5, "x", [1], None, True, 1e308, {}, [[]], {"kind": None}, {"kind": "heartbeat"}, {"kind": "lost", "text": "bye"}),
    *({"kind": "leave"}, {"kind": "welcome", "addresses": []}, {"kind": "value", "value": 1}, JOIN),
    *(JOIN | {"index": index} for index in (0, 2, -1, 1.0, "1", None, [], [[1]], {}, 10**400, True)),
    *({name: value for name, value in JOIN.items() if name != left_out} for left_out in JOIN),
    *(JOIN | {"proof": given} for given in (None, 0, "", [], "é" * 64, "0" * 65, "\ud800" * 9)),
]
GARBAGE = [
    *(
        b"\n",
        b"\0" * 500 + b"\n",
        b"{\n",
        b'"\n',
        b"[" * 900 + b"\n",
        b"\xff\xfe\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"1e999\n",
    ),
    *(b"NaN\n", b"{" * 2000, b'{"kind": "join"', b"\x16\x03\x01\x02\x00\x01", b"A" * 100_000, b"", b" "),
]
PROBES = [*(json.dumps(message).encode() + b"\n" for message in MESSAGES), *GARBAGE]


@pytest.fixture(autouse=True)
def key(monkeypatch):
    monkeypatch.setenv(VARIABLE, "a key of the tests alone")


def probe(port, data):
    """Connects, once somebody listens, and sends; the connection stays open, and what was answered is read later."""
    for _ in range(100):
        try:
            connection = socket.create_connection(("127.0.0.1", port), timeout=5)
            break
        except ConnectionRefusedError:
            time.sleep(0.05)
    try:
        connection.sendall(data)
    except OSError:  # it has been closed while sending
        pass
    return connection


def answers(connection):
    connection.settimeout(5)
    read = b""
    try:
        while part := connection.recv(4096):
            read += part
    except OSError:
        pass
    return read


def first_with(strangers, count=2):
    """The outcomes of processes that join after the strangers have been at the first one's port."""
    addresses = tuple(f"127.0.0.1:{free_port()}" for _ in range(count))

    def act(coordinator):
        coordinator.agree("settings", {"rate": 0.1})
        secret = coordinator.from_first({"folder": "secret"})
        coordinator.leave()
        return secret

    def others():
        connections.extend(probe(int(addresses[0].rpartition(":")[2]), data) for data in strangers)
        outcomes.extend(together(count - 1, act, addresses, first=1, join_seconds=10))

    connections, outcomes = [], []
    thread = threading.Thread(target=others)
    thread.start()
    outcomes[:0] = together(1, act, addresses, join_seconds=20)
    thread.join(30)
    return outcomes, connections


def test_probes_end_their_own_connections_alone():
    assert len(PROBES) >= 40
    outcomes, connections = first_with(PROBES)
    assert outcomes == [{"folder": "secret"}] * 2
    for data, connection in zip(PROBES, connections, strict=True):
        lines = answers(connection).splitlines()
        assert len(lines) <= 1 and all(json.loads(line)["kind"] == "challenge" for line in lines), (data, lines)


def test_one_that_sends_a_byte_now_and_then_holds_nobody(monkeypatch):
    monkeypatch.setattr(module, "STRANGER_SECONDS", 0.5)
    address = f"127.0.0.1:{free_port()}"
    outcomes = []
    first = threading.Thread(
        target=lambda: outcomes.extend(together(1, lambda each: each, (address, "127.0.0.1:1"), join_seconds=3))
    )
    first.start()
    connection = probe(int(address.rpartition(":")[2]), b"{")
    started = time.monotonic()
    with pytest.raises(OSError):
        while time.monotonic() - started < 10:
            connection.sendall(b" ")
            time.sleep(0.1)
    assert time.monotonic() - started < 2.5
    first.join(10)
    assert isinstance(outcomes[0], LostWorkerError) and "did not join within 3 s" in str(outcomes[0])


def test_many_strangers_and_a_long_line_take_little_memory(monkeypatch):
    monkeypatch.setattr(module, "STRANGERS", 8)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    outcomes, _ = first_with([*[b""] * (3 * module.STRANGERS), b"A" * 2**24, b""])
    assert outcomes == [{"folder": "secret"}] * 2
    # the 16 MiB are this process's own, too
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**16  # KiB: 64 MiB


def test_a_process_with_another_key_neither_joins_nor_is_joined():
    addresses = tuple(f"127.0.0.1:{free_port()}" for _ in range(2))

    class Other(Coordinator):
        def _show_the_key(self, first, own_port):
            self._key = b"another key, as long as ours"
            return super()._show_the_key(first, own_port)

    outcomes = [None, None]

    def start(index, kind):
        try:
            outcomes[index] = kind(Cluster(addresses, index, "test"), join_seconds=1.5)
        except LostWorkerError as error:
            outcomes[index] = str(error)

    threads = [threading.Thread(target=start, args=pair) for pair in ((0, Coordinator), (1, Other))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert "worker 1 (127.0.0.1" in outcomes[0] and "did not join" in outcomes[0]
    assert "has it another key?" in outcomes[1]


def test_an_impostor_at_the_first_one_s_port_is_left_alone():
    """Whoever listens there before the first process does learns nothing, and the real one is joined."""
    port = free_port()
    heard = []
    with socket.create_server(("127.0.0.1", port)) as impostor:

        def answer():
            connection, _ = impostor.accept()
            connection.sendall(json.dumps({"kind": "challenge", "number": "00"}).encode() + b"\n")
            heard.append(json.loads(connection.makefile("rb").readline()))
            connection.sendall(json.dumps({"kind": "accepted", "proof": heard[0]["proof"]}).encode() + b"\n")
            connection.close()
            impostor.close()

        thread = threading.Thread(target=answer)
        thread.start()
        addresses = (f"127.0.0.1:{port}", f"127.0.0.1:{free_port()}")
        outcomes = []
        worker = threading.Thread(
            target=lambda: outcomes.extend(together(1, lambda each: each.leave(), addresses, first=1, join_seconds=20))
        )
        worker.start()
        thread.join(10)
    assert together(1, lambda each: each.leave(), addresses, join_seconds=20) == [None]
    worker.join(20)
    assert outcomes == [None] and set(heard[0]) == {"kind", "index", "port", "number", "proof"}


def test_a_proof_holds_for_what_was_said_alone():
    assert is_proof(proof(b"key", 1, "a"), b"key", 1, "a")
    for other in ((b"yek", 1, "a"), (b"key", 2, "a"), (b"key", "a", 1), (b"key", 1, "a", None)):
        assert not is_proof(proof(b"key", 1, "a"), *other)
    assert not any(is_proof(given, b"key", 1) for given in (None, 1, b"", "", "é", "\ud800", [proof(b"key", 1)]))


def test_the_file_of_the_key_is_the_user_s_alone(tmp_path, monkeypatch):
    monkeypatch.delenv(VARIABLE)
    soon = time.monotonic() + 0.3
    with pytest.raises(ClusterError, match=f"{FILE} does not appear.*set the variable {VARIABLE}"):
        cluster_key(tmp_path / "new", False, soon)
    first = cluster_key(tmp_path / "new", True, soon)
    path = tmp_path / "new" / FILE
    assert len(first) == 64 and first == cluster_key(tmp_path / "new", False, soon)
    assert first == cluster_key(tmp_path / "new", True, soon) and os.listdir(path.parent) == [FILE]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert first != cluster_key(tmp_path / "other", True, soon)
    path.chmod(0o640)
    with pytest.raises(ClusterError, match="readable by nobody else, and it has owner .* mode 640"):
        cluster_key(tmp_path / "new", False, soon)
    monkeypatch.setenv(VARIABLE, "short")
    with pytest.raises(ClusterError, match=f"{VARIABLE} has 5 characters, and needs at least 16"):
        cluster_key(tmp_path / "new", True, soon)


def test_it_listens_where_the_hosts_say(monkeypatch):
    def listens_at(*addresses):
        with module._listening(Cluster(addresses, 0, "test")) as server:
            return server.getsockname()[0]

    assert listens_at(f"127.0.0.1:{free_port()}", "127.0.0.1:1") == "127.0.0.1"
    assert listens_at(f"127.0.0.2:{free_port()}", "localhost:1") == "127.0.0.2"
    resolve = socket.getaddrinfo
    # As Debian writes a machine's own name into /etc/hosts.
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *more, **how: resolve("127.0.1.1", *more, **how))
    assert listens_at(f"host0:{free_port()}", "host1:1") == "0.0.0.0"
    # A public address that a router translates: of no interface here.
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *more, **how: resolve("203.0.113.7", *more, **how))
    assert listens_at(f"host0:{free_port()}", "host1:1") == "0.0.0.0"


@pytest.mark.slow
@pytest.mark.jax
def test_two_processes_that_are_probed_while_they_train_end_with_the_same_bits(tmp_path):
    left = {}
    for name in ("quiet", "probed"):
        with Processes(tmp_path / name, "float32", "--epochs", 2, "--dropout", 0.2, "--pause", 0.3) as processes:
            stop, sent = threading.Event(), 0
            port = int(processes.addresses[0].rpartition(":")[2])

            def strangers(port=port, stop=stop):
                nonlocal sent
                while not stop.is_set():
                    for data in PROBES:
                        if stop.is_set():
                            return
                        try:
                            with socket.create_connection(("127.0.0.1", port), timeout=1) as connection:
                                sent += 1
                                connection.sendall(data)
                        except OSError:
                            time.sleep(0.05)  # nobody listens yet, or any more

            thread = threading.Thread(target=strangers, daemon=True)
            if name == "probed":
                thread.start()
            ended = processes.end()
            stop.set()
        assert [status for status, _ in ended] == [0, 0], ended
        left[name] = [np.load(tmp_path / name / "float32" / f"ended-{index}.npz") for index in range(2)]
    assert sent > len(PROBES)
    for quiet, probed in zip(left["quiet"], left["probed"], strict=True):
        for key in quiet.files:
            np.testing.assert_array_equal(probed[key], quiet[key], err_msg=key)
