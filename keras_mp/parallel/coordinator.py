"""The coordinator of several processes: their rendezvous, the check that all train the same, and their heartbeats."""

from __future__ import annotations

import errno
import json
import os
import queue
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from keras_mp.parallel.cluster import Cluster, ClusterError, cluster_key, is_proof, proof, split_address

HEARTBEAT_SECONDS = 1.0
SILENCE_SECONDS = 20.0
JOIN_SECONDS = 300.0
# Whoever has not shown that it has the key gets this much time and so many bytes; of more strangers, the oldest goes.
STRANGERS, STRANGER_SECONDS, STRANGER_BYTES = 32, 10.0, 1024
MESSAGE_BYTES = 2**26  # of a process that trains with the others; the largest are lists of source files


class LostWorkerError(RuntimeError):
    """A process of the training did not join or was lost; the message names it."""


def end_process(message: str) -> None:
    """Ends this process at once. A collective that waits for a process which is gone cannot be interrupted."""
    print(f"\nerror: {message}", file=sys.stderr, flush=True)
    os._exit(1)


class Coordinator:
    """Connects each process to the first one, the coordinator, until it leaves.

    ```
    rendezvous:  the others connect to the first; both show that they have the key: each answers a random number of
                 the other's with an HMAC, and nothing else is read before. When all have joined, each learns the
                 addresses of all
    agree:       each sends its value; the first compares, and all go on or all raise
    heartbeat:   sent once a second, by the first to all others and by each of them to the first. A process that sends
                 none for 20 seconds, or whose connection breaks before it leaves, is lost: the first tells all, and
                 every process ends itself
    ```

    A process that is stopped (SIGSTOP) keeps its connections, so only a missing heartbeat tells.

    Args:
        folder: a folder that all processes share, for the file of the key; see `cluster_key`.
        join_seconds: the seconds that the rendezvous waits for all.
        silence_seconds: the seconds for which a process may send no heartbeat.
        on_lost: a function that is called with the message when a process is lost.
    """

    def __init__(
        self,
        cluster: Cluster,
        *,
        folder: str | os.PathLike[str] = ".",
        join_seconds: float = JOIN_SECONDS,
        silence_seconds: float = SILENCE_SECONDS,
        on_lost: Callable[[str], None] = end_process,
    ) -> None:
        self.cluster, self.silence_seconds, self.on_lost = cluster, silence_seconds, on_lost
        self._peers: dict[int, _Peer] = {}
        self._over = threading.Event()
        deadline = time.monotonic() + join_seconds
        own_port = _free_port()
        self._key = cluster_key(Path(folder), cluster.index == 0, deadline)
        try:
            if cluster.index == 0:
                self.addresses = self._host_rendezvous(deadline, own_port, join_seconds)
            else:
                self.addresses = self._join_rendezvous(deadline, own_port, join_seconds)
        except BaseException:
            self.close()
            raise
        for peer in self._peers.values():
            threading.Thread(target=self._listen, args=(peer,), daemon=True).start()
        threading.Thread(target=self._send_heartbeats, daemon=True).start()

    def agree(self, name: str, value: Any) -> None:
        """Makes sure that all processes have the same value; all must call it, in the same order.

        Args:
            value: anything that JSON can hold; a dict is compared key by key.

        Raises:
            ClusterError: on all of them, where one differs; names it and the difference.
        """
        own = json.loads(json.dumps(value, default=str))
        if self.cluster.index == 0:
            others = {index: self._heard(peer) for index, peer in sorted(self._peers.items())}
            text = "".join(
                f"\n  {self.cluster.name(index)}: {line}"
                for index, other in others.items()
                for line in differences(own, other["value"])
            )
            verdict = f"the workers differ in {name}; beside worker 0{text}" if text else ""
            for peer in self._peers.values():
                peer.send({"kind": "verdict", "text": verdict})
        else:
            first = self._peers[0]
            first.send({"kind": "value", "value": own})
            verdict = self._heard(first)["text"]
        if verdict:
            self.leave()
            raise ClusterError(verdict)

    def any(self, flag: bool) -> bool:
        """Tells whether the flag is set on any process; all must call it, in the same order."""
        if self.cluster.index:
            first = self._peers[0]
            first.send({"kind": "value", "value": bool(flag)})
            return bool(self._heard(first)["value"])
        others = [self._heard(peer)["value"] for _, peer in sorted(self._peers.items())]
        is_set = any(others) or bool(flag)
        for peer in self._peers.values():
            peer.send({"kind": "value", "value": is_set})
        return is_set

    def from_first(self, value: Any) -> Any:
        """Gives all processes the value that the first one has; all must call it.

        Args:
            value: anything that JSON can hold; only the value of the first process counts.

        Returns:
            The first one's value.
        """
        if self.cluster.index == 0:
            for peer in self._peers.values():
                peer.send({"kind": "value", "value": value})
            return value
        return self._heard(self._peers[0])["value"]

    def leave(self) -> None:
        """Leaves: from here on the others do not expect its heartbeats, nor it theirs."""
        for peer in self._peers.values():
            peer.send({"kind": "leave"})
        self.close()

    def _host_rendezvous(self, deadline: float, own_port: int, join_seconds: float) -> tuple[str, ...]:
        server = _listening(self.cluster)
        ports = {0: own_port}
        expected = set(range(1, len(self.cluster.addresses)))
        strangers: list[_Peer] = []
        shown: queue.Queue[tuple[_Peer, int, int]] = queue.Queue()
        try:
            while missing := expected - self._peers.keys():
                if time.monotonic() > deadline:
                    text = (
                        f"{', '.join(map(self.cluster.name, sorted(missing)))} did not join within {join_seconds:.0f} s"
                    )
                    self._tell_lost(text)
                    raise LostWorkerError(text)
                server.settimeout(0.1)
                try:
                    connection, _ = server.accept()
                except TimeoutError:
                    pass
                else:
                    stranger = _Peer(connection)
                    strangers = [*strangers[-STRANGERS:], stranger]
                    for oldest in strangers[:-STRANGERS]:
                        oldest.close()
                    threading.Thread(target=self._ask_for_the_key, args=(stranger, shown), daemon=True).start()
                while not shown.empty():
                    peer, index, port = shown.get()
                    if peer not in strangers:  # closed meanwhile, as the oldest; it comes again
                        continue
                    strangers.remove(peer)
                    if index not in expected or index in self._peers:
                        text = f"{self.cluster.name(0)} expects no worker {index} (or no second)"
                        peer.send({"kind": "lost", "text": text})
                        peer.close()
                        continue
                    peer.index = index
                    self._peers[index] = peer
                    ports[index] = port
        finally:
            server.close()
            for stranger in strangers:
                stranger.close()
        hosts = [split_address(address)[0] for address in self.cluster.addresses]
        addresses = tuple(f"{host}:{ports[index]}" for index, host in enumerate(hosts))
        for peer in self._peers.values():
            peer.send({"kind": "welcome", "addresses": addresses})
        return addresses

    def _ask_for_the_key(self, peer: _Peer, shown: queue.Queue[tuple[_Peer, int, int]]) -> None:
        """Talks to one that has connected, in a thread of its own; only one that has the key is passed on."""
        over = threading.Timer(STRANGER_SECONDS, peer.close)
        over.daemon = True
        over.start()
        number = secrets.token_hex(32)
        peer.send({"kind": "challenge", "number": number})
        said = peer.receive(limit=STRANGER_BYTES) or {}
        index, port, theirs = said.get("index"), said.get("port"), said.get("number")
        over.cancel()
        if (
            type(index) is int
            and type(port) is int
            and is_proof(said.get("proof"), self._key, number, theirs, index, port)
        ):
            peer.send({"kind": "accepted", "proof": proof(self._key, theirs, number)})
            shown.put((peer, index, port))
        else:
            peer.close()

    def _join_rendezvous(self, deadline: float, own_port: int, join_seconds: float) -> tuple[str, ...]:
        host, port = split_address(self.cluster.addresses[0])
        reason = ""
        while time.monotonic() < deadline or not reason:
            try:
                first = _Peer(socket.create_connection((host, port), timeout=5.0), index=0)
            except OSError as error:
                reason = f"({error}): is it started, and is the port open?"
            else:
                if self._show_the_key(first, own_port):
                    break
                first.close()
                reason = "as one that has the same key does: is another program at its port, or has it another key?"
            time.sleep(0.2)
        else:
            raise LostWorkerError(f"{self.cluster.name(0)} does not answer within {join_seconds:.0f} s {reason}")
        self._peers[0] = first
        answer = first.receive(timeout=max(1.0, deadline - time.monotonic()) + 5.0)
        if answer is None or answer["kind"] != "welcome":
            raise LostWorkerError(answer["text"] if answer else f"{self.cluster.name(0)} ended before all had joined")
        return tuple(answer["addresses"])

    def _show_the_key(self, first: _Peer, own_port: int) -> bool:
        """Answers the challenge of the first process; whether it has the key, too."""
        theirs = (first.receive(timeout=5.0, limit=STRANGER_BYTES) or {}).get("number")
        if not isinstance(theirs, str):
            return False
        number, index = secrets.token_hex(32), self.cluster.index
        shown = proof(self._key, theirs, number, index, own_port)
        first.send({"kind": "join", "index": index, "port": own_port, "number": number, "proof": shown})
        answer = first.receive(timeout=5.0, limit=STRANGER_BYTES) or {}
        return is_proof(answer.get("proof"), self._key, number, theirs)

    def _listen(self, peer: _Peer) -> None:
        while not self._over.is_set():
            message = peer.receive()
            if message is None:
                self._lose(peer.index, "has ended, or its connection broke")
                return
            peer.last_heard = time.monotonic()
            kind = message.get("kind")
            if kind == "leave":
                peer.has_left = True
                return
            if kind == "lost":
                self._end(str(message.get("text")))
            elif kind != "heartbeat":
                peer.inbox.put(message)

    def _send_heartbeats(self) -> None:
        last_sent = time.monotonic()
        while not self._over.wait(HEARTBEAT_SECONDS):
            now = time.monotonic()
            # After this process itself was stopped, it cannot tell who else was silent.
            was_stopped, last_sent = now - last_sent > HEARTBEAT_SECONDS + self.silence_seconds / 2, now
            for peer in list(self._peers.values()):
                if peer.has_left:
                    continue
                if was_stopped:
                    peer.last_heard = now
                peer.send({"kind": "heartbeat"})
                if now - peer.last_heard > self.silence_seconds:
                    self._lose(peer.index, f"has been silent for {self.silence_seconds:.0f} s: is it stopped?")

    def _heard(self, peer: _Peer) -> Any:
        message = peer.inbox.get()
        if message is None:
            raise LostWorkerError(f"{self.cluster.name(peer.index)} is gone")
        return message

    def _lose(self, index: int, how: str) -> None:
        if not self._over.is_set() and not self._peers[index].has_left:
            text = f"{self.cluster.name(index)} {how}"
            self._tell_lost(text)
            self._end(text)

    def _tell_lost(self, text: str) -> None:
        if self.cluster.index == 0:
            for peer in self._peers.values():
                peer.send({"kind": "lost", "text": text})

    def _end(self, text: str) -> None:
        if not self._over.is_set():
            self._over.set()
            for peer in self._peers.values():
                peer.inbox.put(None)
            self.on_lost(f"{text}. The training ends here; run it again with --resume to go on")

    def close(self) -> None:
        """Closes the connections without leaving: the others learn that this process has ended."""
        self._over.set()
        for peer in self._peers.values():
            peer.close()


class _Peer:
    """A connection that carries JSON lines."""

    def __init__(self, connection: socket.socket, index: int = -1) -> None:
        connection.settimeout(None)
        self.index, self.last_heard, self.has_left = index, time.monotonic(), False
        self.inbox: queue.Queue[Any] = queue.Queue()
        self._connection, self._file = connection, connection.makefile("rb")
        self._lock = threading.Lock()

    def send(self, message: dict[str, Any]) -> None:
        try:
            with self._lock:
                self._connection.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            pass  # whoever listens on this connection finds out

    def receive(self, timeout: float | None = None, limit: int = MESSAGE_BYTES) -> dict[str, Any] | None:
        """The next message; None when there will be none, none in time, or none that is an object of so many bytes."""
        try:
            self._connection.settimeout(timeout)
            line = self._file.readline(limit)
            self._connection.settimeout(None)
            message = json.loads(line) if line.endswith(b"\n") else None
        except (OSError, ValueError, RecursionError):
            return None
        return message if isinstance(message, dict) else None

    def close(self) -> None:
        try:
            self._connection.shutdown(socket.SHUT_RDWR)  # ends a read that waits in another thread
        except OSError:
            pass
        self._file.close()  # while it is open, so is the connection
        self._connection.close()


def differences(one: Any, other: Any, path: str = "") -> list[str]:
    """Says in which keys two values that JSON can hold differ.

    Returns:
        A line for each: `key: 1 here, 2 there`; one and other stand for worker 0 and the other.
    """
    if isinstance(one, dict) and isinstance(other, dict):
        lines = []
        for key in dict.fromkeys([*one, *other]):
            lines += differences(one.get(key), other.get(key), f"{path}.{key}" if path else str(key))
        return lines
    return [] if one == other else [f"{path + ': ' if path else ''}{other!r}, and worker 0 has {one!r}"]


def _listening(cluster: Cluster) -> socket.socket:
    """A socket at the first address: of the interface that its host names, or of all."""
    host, port = split_address(cluster.addresses[0])
    family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    if _is_loopback(str(place[0])) and not all(
        _is_loopback(split_address(address)[0]) for address in cluster.addresses
    ):
        # Debian gives a machine's own name the address 127.0.1.1, at which the others do not reach it.
        place = ("::" if family == socket.AF_INET6 else "0.0.0.0", port)
    try:
        return _bound(family, place)
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:  # the host's public address, say, which a router translates
            return _bound(family, ("::" if family == socket.AF_INET6 else "0.0.0.0", port))
        if error.errno != errno.EADDRINUSE:
            raise
        raise OSError(
            errno.EADDRINUSE,
            f"port {port} of {cluster.name(0)} is in use, by an earlier run that has not ended or by another program: "
            "end it, or give another port",
        ) from None


def _bound(family: int, place: Any) -> socket.socket:
    server = socket.socket(family)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        server.bind(place)
        server.listen()
    except OSError:
        server.close()
        raise
    return server


def _is_loopback(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
