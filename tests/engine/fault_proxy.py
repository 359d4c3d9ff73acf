"""A proxy between a client and a server that loses what it is told to lose."""

from __future__ import annotations

import contextlib
import socket
import threading
from types import TracebackType


class FaultProxy:
    """Listens on a port of its own and forwards to a unix socket.

    `lose_next_reply()`: the next reply is read from the server, so the command has run, and the client's connection is
    closed instead. `mute()`: nothing more reaches any client, and every connection stays open (half-open).
    """

    def __init__(self, target: str) -> None:
        self._target = target
        self._lose = threading.Event()
        self._muted = threading.Event()
        self._sockets: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.lost = 0

    def __enter__(self) -> FaultProxy:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *exc: type[BaseException] | BaseException | TracebackType | None) -> None:
        for open_socket in [self._listener, *self._sockets]:
            _close(open_socket)

    def lose_next_reply(self) -> None:
        """The next reply is lost, with its connection."""
        self._lose.set()

    def mute(self) -> None:
        """From now on no client hears anything."""
        self._muted.set()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.socket(socket.AF_UNIX)
                server.connect(self._target)
                self._sockets += [client, server]
                threading.Thread(target=self._forward, args=(client, server), daemon=True).start()
                threading.Thread(target=self._answer, args=(server, client), daemon=True).start()

    def _forward(self, client: socket.socket, server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := client.recv(65_536):
                server.sendall(data)
        _close(server)

    def _answer(self, server: socket.socket, client: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := server.recv(65_536):
                if self._lose.is_set():
                    self._lose.clear()
                    self.lost += 1
                    break
                if not self._muted.is_set():
                    client.sendall(data)
        _close(client)


def _close(open_socket: socket.socket) -> None:
    with contextlib.suppress(OSError):
        open_socket.shutdown(socket.SHUT_RDWR)
    open_socket.close()
