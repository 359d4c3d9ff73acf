"""A proxy between a client and a server that does to their connections what networks do.

    with FaultProxy(server.socket) as proxy:
        proxy.lose_next_reply()     # one request runs, and its connection is reset
        proxy.mute()                # all connections at once, until `heal`

Both ends of a connection belong to one thread, so that a reset is a reset (RST), and not the polite end that closing a
socket causes while another thread still reads from it.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable

CHUNK = 65_536


class FaultProxy:
    """Listens on a port of its own and forwards to a unix socket, or to a (host, port).

    `lost`: how many replies were lost with their connection. Threads may use all methods at any time.
    """

    def __init__(self, target: str | tuple[str, int]) -> None:
        self.lost = self.connections = self.forgotten = 0
        self.losses = deque[None]()
        self.muted = threading.Event()
        self.swallowing = threading.Event()
        self._target = target
        self._refusing = threading.Event()
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

    def lose_next_reply(self) -> None:
        """Run the next request, on any connection, and drop its reply and its connection."""
        self.losses.append(None)

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
        """Pass new requests again. Lost replies stay lost."""
        for condition in (self.muted, self.swallowing, self._refusing):
            condition.clear()

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
            self._begin(_Connection(self, client, self._target).run)

    def _begin(self, work: Callable[[], None]) -> None:
        thread = threading.Thread(target=work, name="fault-proxy", daemon=True)
        self._threads.append(thread)
        thread.start()


class _Connection:
    """One client's connection and the server's that belongs to it."""

    def __init__(self, proxy: FaultProxy, client: socket.socket, target: str | tuple[str, int]) -> None:
        self._proxy = proxy
        self._client = client
        self._target = target
        self._number = proxy.connections
        self._is_losing = False

    def run(self) -> None:
        """Pass data until either end has closed, a reply is lost, or the proxy stops."""
        with contextlib.suppress(OSError), _connected(self._target) as self._server:
            ends = [self._client, self._server, self._proxy.ended]
            while True:
                readable, _, _ = select.select(ends, [], [])
                if self._proxy.ended in readable:
                    break
                if self._client in readable and not self._forward():
                    if not self._is_losing:
                        break
                    ends.remove(self._client)  # it waited no longer, but the request runs, and its reply is lost
                if self._server in readable and not self._answer():
                    break
        reset(self._client)

    @property
    def _is_swallowed(self) -> bool:
        return self._proxy.swallowing.is_set() or self._number <= self._proxy.forgotten

    def _forward(self) -> bool:
        data = self._client.recv(CHUNK)
        if data and not self._is_swallowed:
            with contextlib.suppress(IndexError):
                self._proxy.losses.popleft()
                self._is_losing = True
            self._server.sendall(data)
        return bool(data)

    def _answer(self) -> bool:
        data = self._server.recv(CHUNK)
        if not data or self._proxy.muted.is_set() or self._is_swallowed:
            return bool(data)
        if self._is_losing:
            self._proxy.lost += 1
            return False
        self._client.sendall(data)
        return True


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
