"""A proxy before a database server that outlives the server's restarts."""

from __future__ import annotations

from typing import Self

from tests.engine.fault_proxy import FaultProxy


class DatabaseProxy(FaultProxy):
    """As `FaultProxy`, to a TCP port of this machine. While nobody listens there, it hangs up on its clients."""

    def __init__(self, port: int) -> None:
        super().__init__(("127.0.0.1", port))

    def __enter__(self) -> Self:
        super().__enter__()
        return self
