"""The wire between a client and a Redis server: counts what goes over it, and goes silent when it is told to."""

from __future__ import annotations

import contextlib
import socket
import threading
from types import TracebackType


class Wire:
    """Listens on a port of its own and forwards to `port`; without one it accepts and says nothing.

    Attributes:
        opened: how many connections were opened.
        asked: how often a client said something.
        dropped: how many bytes of replies were not handed on.
    """

    def __init__(self, port: int | None = None) -> None:
        self._target = port
        self._silent = self._silent_to_subscribers = False
        self._sockets: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.port: int = self._listener.getsockname()[1]
        self.opened = self.asked = self.dropped = 0

    def __enter__(self) -> Wire:
        threading.Thread(target=self._accept, name="wire", daemon=True).start()
        return self

    def __exit__(self, *exc: type[BaseException] | BaseException | TracebackType | None) -> None:
        for each in [self._listener, *self._sockets]:
            _close(each)

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def go_silent(self) -> None:
        """Connections, old and new, stay open, and nobody hears anything any more."""
        self._silent = True

    def go_silent_to_subscribers(self) -> None:
        """The same for connections that subscribed to a channel, and for those alone."""
        self._silent_to_subscribers = True

    def speak(self) -> None:
        """What is said from now on is handed on."""
        self._silent = self._silent_to_subscribers = False

    def cut(self) -> None:
        """Every connection ends; new ones are accepted."""
        sockets, self._sockets = self._sockets, []
        for each in sockets:
            _close(each)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self.opened += 1
                self._sockets.append(client)
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
            while client.recv(65_536):
                self.asked += 1

    def _forward(self, client: socket.socket, server: socket.socket, subscribed: threading.Event) -> None:
        with contextlib.suppress(OSError):
            while data := client.recv(65_536):
                self.asked += 1
                if b"SUBSCRIBE" in data:
                    subscribed.set()
                server.sendall(data)
        _close(server)

    def _answer(self, server: socket.socket, client: socket.socket, subscribed: threading.Event) -> None:
        with contextlib.suppress(OSError):
            while data := server.recv(65_536):
                if self._silent or (self._silent_to_subscribers and subscribed.is_set()):
                    self.dropped += len(data)
                else:
                    client.sendall(data)
        _close(client)


def _close(each: socket.socket) -> None:
    with contextlib.suppress(OSError):
        each.shutdown(socket.SHUT_RDWR)
    each.close()
