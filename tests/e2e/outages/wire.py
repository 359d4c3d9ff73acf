"""A proxy between a client and a Redis server that counts the traffic, and stops answering on request."""

from __future__ import annotations

import contextlib
import fcntl
import socket
import struct
import termios
import threading
import time
from types import TracebackType


class Wire:
    """Listens on its own port and forwards to `port`; without one it accepts and answers nothing.

    The counts include everything that clients sent before they are read, also on a busy machine.

    Attributes:
        dropped: how many bytes of replies were not forwarded.
    """

    def __init__(self, port: int | None = None) -> None:
        self._target = port
        self._is_silent_to_subscribers = False
        self._sockets: list[socket.socket] = []
        self._clients: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.port: int = self._listener.getsockname()[1]
        self._opened = self._asked = self.dropped = 0
        self._ours: dict[tuple[str, int], threading.Event] = {}

    def __enter__(self) -> Wire:
        threading.Thread(target=self._accept, name="wire", daemon=True).start()
        return self

    def __exit__(self, *exc: type[BaseException] | BaseException | TracebackType | None) -> None:
        for each in [self._listener, *self._sockets]:
            _close(each)

    @property
    def opened(self) -> int:
        """How many connections were opened.

        One of our own is opened behind them, and not counted: when it is accepted, all before it have been.
        """
        with contextlib.suppress(ConnectionRefusedError), socket.socket() as ours:
            ours.bind(("127.0.0.1", 0))
            accepted = self._ours[ours.getsockname()] = threading.Event()
            ours.connect(("127.0.0.1", self.port))
            assert accepted.wait(30)
        return self._opened

    @property
    def asked(self) -> int:
        """Return how often a client sent data."""
        deadline = time.monotonic() + 30
        while self.opened and any(map(_unread, list(self._clients))):
            assert time.monotonic() < deadline
            time.sleep(0.002)
        return self._asked

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def go_silent_to_subscribers(self) -> None:
        """Keep the connections that subscribed to a channel open, and forward nothing to them."""
        self._is_silent_to_subscribers = True

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, address = self._listener.accept()
                if address in self._ours:
                    self._ours.pop(address).set()
                    client.close()
                    continue
                self._opened += 1
                self._sockets.append(client)
                self._clients.append(client)
                if self._target is None:
                    threading.Thread(target=self._listen_only, args=(client,), daemon=True).start()
                else:
                    self._connect(client, self._target)

    def _connect(self, client: socket.socket, target: int) -> None:
        try:
            server = socket.create_connection(("127.0.0.1", target))
        except OSError:
            _close(client)
            return
        self._sockets.append(server)
        subscribed = threading.Event()
        threading.Thread(target=self._forward, args=(client, server, subscribed), daemon=True).start()
        threading.Thread(target=self._answer, args=(server, client, subscribed), daemon=True).start()

    def _listen_only(self, client: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while self._hear(client):
                pass

    def _hear(self, client: socket.socket) -> bytes:
        """Return the next data. It is counted before it is read."""
        if client.recv(1, socket.MSG_PEEK):
            self._asked += 1
        return client.recv(65_536)

    def _forward(self, client: socket.socket, server: socket.socket, subscribed: threading.Event) -> None:
        with contextlib.suppress(OSError):
            while data := self._hear(client):
                if b"SUBSCRIBE" in data:
                    subscribed.set()
                server.sendall(data)
        _close(server)

    def _answer(self, server: socket.socket, client: socket.socket, subscribed: threading.Event) -> None:
        with contextlib.suppress(OSError):
            while data := server.recv(65_536):
                if self._is_silent_to_subscribers and subscribed.is_set():
                    self.dropped += len(data)
                else:
                    client.sendall(data)
        _close(client)


def _unread(client: socket.socket) -> int:
    """How many bytes wait to be read from it."""
    with contextlib.suppress(OSError, ValueError):  # it is closed
        return int(struct.unpack("i", fcntl.ioctl(client, termios.FIONREAD, bytes(4)))[0])
    return 0


def _close(each: socket.socket) -> None:
    with contextlib.suppress(OSError):
        each.shutdown(socket.SHUT_RDWR)
    each.close()
