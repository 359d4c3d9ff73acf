"""A proxy between a client and a server that does to their connections what networks do.

    with FaultProxy(server.socket) as proxy:
        proxy.inject(Fault.RESET_AFTER, only=b"EVAL")     # one request meets one fault
        proxy.mute()                                      # all connections at once, until `heal`

Both ends of a connection belong to one thread, so that a reset is a reset (RST), and not the polite end that closing a
socket causes while another thread still reads from it.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
from collections import Counter, deque
from enum import Enum

CHUNK = 65_536


class Fault(Enum):
    """What becomes of one request."""

    RESET_BEFORE = "reset before it is sent"
    HALF_SENT = "reset after half of it is sent"
    STALL_BEFORE = "swallowed, and silence"
    RESET_AFTER = "reset after it ran, the reply lost"
    HALF_ANSWERED = "reset after half of the reply"
    STALL_AFTER = "it runs, and silence"

    @property
    def runs(self) -> bool:
        """Whether the server runs the request."""
        return self in {Fault.RESET_AFTER, Fault.HALF_ANSWERED, Fault.STALL_AFTER}

    @property
    def is_silent(self) -> bool:
        """Whether the connection stays open, so that only the time limit of the client ends the wait."""
        return self in {Fault.STALL_BEFORE, Fault.STALL_AFTER}


class FaultProxy:
    """Listens on a port of its own and forwards to a unix socket, or to a (host, port).

    `met` counts the faults that requests have met so far. Threads may inject, mute and heal at any time.
    """

    def __init__(self, target: str | tuple[str, int]) -> None:
        self.met: Counter[Fault] = Counter()
        self.connections = self.forgotten = 0
        self.muted = threading.Event()
        self.swallowing = threading.Event()
        self._target = target
        self._refusing = threading.Event()
        self._faults: deque[tuple[Fault, bytes]] = deque()
        """Faults that no request has met yet, each with what the request must contain."""
        self._threads: list[threading.Thread] = []
        self._end, self.ended = socket.socketpair()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]

    def __enter__(self) -> FaultProxy:
        self._begin(self._accept)
        return self

    def __exit__(self, *exc: object) -> None:
        self._end.close()  # which every thread sees, and then closes what it has
        for thread in self._threads:
            thread.join()
        self._listener.close()
        self.ended.close()

    @property
    def lost(self) -> int:
        """How many replies were lost with their connection."""
        return self.met[Fault.RESET_AFTER]

    def inject(self, fault: Fault, only: bytes = b"") -> None:
        """Inject this fault into the next request that contains `only`, on any connection."""
        self._faults.append((fault, only))

    def lose_next_reply(self) -> None:
        """Drop the next reply and its connection."""
        self.inject(Fault.RESET_AFTER)

    def mute(self) -> None:
        """No client hears anything; what they send still arrives, and every connection stays open (half-open)."""
        self.muted.set()

    def swallow(self) -> None:
        """Become a black hole: accept connections and keep them open, and pass nothing in either direction."""
        self.swallowing.set()

    def forget(self) -> None:
        """Swallow what is sent on all present connections, like a firewall that has forgotten them; new ones work."""
        self.forgotten = self.connections

    def refuse(self) -> None:
        """Reset new connections; keep existing ones."""
        self._refusing.set()

    def heal(self) -> None:
        """Pass new requests again, without faults. Lost replies stay lost."""
        for condition in (self.muted, self.swallowing, self._refusing):
            condition.clear()
        self._faults.clear()

    def next_fault(self, request: bytes) -> Fault | None:
        """Return the fault for this request, if any."""
        with contextlib.suppress(IndexError):
            fault, only = self._faults[0]
            if only in request:
                self._faults.popleft()
                return fault
        return None

    def _accept(self) -> None:
        while True:
            readable, _, _ = select.select([self._listener, self.ended], [], [])
            if self.ended in readable:
                return
            client, _ = self._listener.accept()
            if self._refusing.is_set():
                reset(client)
                continue
            self.connections += 1
            connection = _Connection(self, client)
            self._begin(lambda connection=connection: connection.run(self._target))

    def _begin(self, work: object) -> None:
        thread = threading.Thread(target=work, name="fault-proxy", daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()


class _Connection:
    """One client's connection and the server's that belongs to it."""

    def __init__(self, proxy: FaultProxy, client: socket.socket) -> None:
        self._proxy = proxy
        self._client = client
        self._number = proxy.connections
        self._answering: Fault | None = None
        self._is_deaf = self._is_dumb = self._is_gone = False

    def run(self, target: str | tuple[str, int]) -> None:
        """Pass data until either end has closed, a fault has closed both, or the proxy stops."""
        with contextlib.suppress(OSError), _connected(target) as self._server:
            _without_delay(self._client)
            _without_delay(self._server)
            ends = [self._client, self._server, self._proxy.ended]
            while True:
                readable, _, _ = select.select(ends, [], [])
                if self._proxy.ended in readable:
                    break
                if self._client in readable and not self._forward():
                    if not (self._is_gone and self._answering):
                        break
                    ends.remove(self._client)  # it waited no longer, but the request runs and meets its fault
                if self._server in readable and not self._answer():
                    break
                if self._is_gone and not self._answering:
                    break
        reset(self._client)

    @property
    def _is_swallowed(self) -> bool:
        return self._proxy.swallowing.is_set() or self._number <= self._proxy.forgotten

    def _forward(self) -> bool:
        data = self._client.recv(CHUNK)
        if not data:
            self._is_gone = True
            return False
        if self._is_deaf or self._is_swallowed:
            return True
        fault = self._proxy.next_fault(data)
        if fault is None or fault.runs:
            self._answering = fault or self._answering
            self._server.sendall(data)
            return True
        self._is_deaf = self._is_dumb = fault is Fault.STALL_BEFORE
        if fault is Fault.HALF_SENT:
            self._server.sendall(data[: len(data) // 2])
        self._proxy.met[fault] += 1
        return self._is_deaf

    def _answer(self) -> bool:
        data = self._server.recv(CHUNK)
        if not data:
            return False
        if self._is_dumb or self._proxy.muted.is_set() or self._is_swallowed:
            return True
        fault, self._answering = self._answering, None
        if fault is None:
            self._client.sendall(data)
            return True
        self._is_dumb = fault is Fault.STALL_AFTER
        if fault is Fault.HALF_ANSWERED:
            self._client.sendall(data[: len(data) // 2])
        self._proxy.met[fault] += 1
        return self._is_dumb


def reset(connection: socket.socket) -> None:
    """Close the connection, so that reads and writes at its other end fail."""
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def _connected(target: str | tuple[str, int]) -> socket.socket:
    if not isinstance(target, str):
        return socket.create_connection(target)
    server = socket.socket(socket.AF_UNIX)
    try:
        server.connect(target)
    except OSError:
        server.close()
        raise
    return server


def _without_delay(connection: socket.socket) -> None:
    if connection.family == socket.AF_INET:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
