"""A proxy before a database server that outlives the server's restarts."""

from __future__ import annotations

import contextlib
import socket
import threading

from tests.engine.fault_proxy import FaultProxy


class DatabaseProxy(FaultProxy):
    """As `FaultProxy`, to a TCP port of this machine. While nobody listens there, it hangs up on its clients."""

    def __init__(self, port: int) -> None:
        super().__init__("")
        self._server_port = port

    def __enter__(self) -> DatabaseProxy:
        super().__enter__()
        return self

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                try:
                    server = socket.create_connection(("127.0.0.1", self._server_port))
                except OSError:
                    client.close()
                    continue
                self._sockets += [client, server]
                threading.Thread(target=self._forward, args=(client, server), daemon=True).start()
                threading.Thread(target=self._answer, args=(server, client), daemon=True).start()
