"""Proxies between processes and servers, in their own process: they cut connections at critical times.

python -m tests.e2e.chaos.proxy '{"postgres": 5432, "redis": 6379}'

Prints the ports it listens on, by name. Then a line of JSON on its standard input orders a fault, and an empty line is
answered with the counts of those that have happened, by name and fault:

    before_commit   a client sends COMMIT, and the server never receives it
    after_commit    the server has executed the COMMIT, and its client is cut off without an answer
    request         a request is lost with its connection
    reply           the same after the server has executed it
    stall           nothing passes for `seconds`
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections import Counter
from typing import Any

COMMITS = (b"Q\x00\x00\x00\x0bCOMMIT\x00", b"\x07\x00\x00\x00\x03COMMIT")
"""The messages of PostgreSQL and MariaDB for it, as psycopg and mysqlclient send them, in capitals."""
CUTS_REQUEST = {"before_commit": True, "request": False}
CUTS_REPLY = {"after_commit": True, "reply": False}


class Proxy:
    """A listening port in front of the port of a server."""

    def __init__(self, name: str, target: int) -> None:
        self.name = name
        self.happened: Counter[str] = Counter()
        self._target = target
        self._ordered: Counter[str] = Counter()
        self._stalled_until = 0.0

    async def listen(self) -> int:
        """Return the port."""
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        port: int = server.sockets[0].getsockname()[1]
        return port

    def order(self, fault: str, count: int = 1, seconds: float = 0.0) -> None:
        """Inject `fault` at the next `count` occasions."""
        if fault == "stall":
            self._stalled_until = time.monotonic() + seconds
            self.happened[fault] += 1
        else:
            self._ordered[fault] += count

    def calm(self) -> None:
        """Cancel the faults that have not happened yet."""
        self._ordered.clear()
        self._stalled_until = 0.0

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            upstream, upward = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            writer.transport.abort()
            return
        swallow = asyncio.Event()
        pumps = [
            asyncio.create_task(self._ask(reader, upward, swallow)),
            asyncio.create_task(self._answer(upstream, writer, swallow)),
        ]
        await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
        upward.transport.abort()
        writer.transport.abort()

    async def _ask(self, reader: asyncio.StreamReader, upward: asyncio.StreamWriter, swallow: asyncio.Event) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65_536):
                await self._wait()
                is_commit = data[-12:].upper().endswith(COMMITS)
                if self._takes(CUTS_REQUEST, is_commit):
                    return
                if self._takes(CUTS_REPLY, is_commit):
                    swallow.set()
                upward.write(data)
                await upward.drain()

    async def _answer(self, upstream: asyncio.StreamReader, writer: asyncio.StreamWriter, swallow: Any) -> None:
        with contextlib.suppress(OSError):
            while data := await upstream.read(65_536):
                if swallow.is_set():
                    return
                await self._wait()
                writer.write(data)
                await writer.drain()

    def _takes(self, faults: dict[str, bool], is_commit: bool) -> bool:
        for fault, needs_commit in faults.items():
            if self._ordered[fault] > 0 and (is_commit or not needs_commit):
                self._ordered[fault] -= 1
                self.happened[fault] += 1
                return True
        return False

    async def _wait(self) -> None:
        while (seconds := self._stalled_until - time.monotonic()) > 0:
            await asyncio.sleep(min(seconds, 0.05))


async def main(targets: dict[str, int]) -> None:
    proxies = {name: Proxy(name, target) for name, target in targets.items()}
    _say({name: await proxy.listen() for name, proxy in proxies.items()})
    orders = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(orders), sys.stdin)
    while line := await orders.readline():
        if not line.strip():
            _say({name: dict(proxy.happened) for name, proxy in proxies.items()})
        elif (order := json.loads(line)) == "calm":
            for proxy in proxies.values():
                proxy.calm()
        else:
            proxies[order.pop("name")].order(**order)


def _say(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1])))
