"""How a waiting worker learns of an earlier due time. Only a hint: what is lost here costs time, never work.

A thread of its own reads a connection of its own, blocked in the socket until something comes, and rings a bell that
`wait` listens to. Silence proves nothing (a half-open connection is silent too), so a waiting worker still looks by
itself after the time that it gives to `wait`.
"""

from __future__ import annotations

import logging
import random
import select
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, Final

from redis.backoff import NoBackoff
from redis.cluster import RedisCluster
from redis.exceptions import ConnectionError
from redis.retry import Retry

from django_delayq.engine.faults import Client

logger = logging.getLogger("django_delayq.engine")

PULSE_SECONDS: Final = 10.0
"""After this much silence the server is asked for a sign of life; after twice as much the connection is renewed."""
FIRST_PAUSE_SECONDS: Final = 0.05
LAST_PAUSE_SECONDS: Final = 1.0
CLOSE_SECONDS: Final = 1.0


class Wakeup:
    """Listens to channels in a thread; `wait` returns early when one of them speaks.

    A lost subscription and a new one both count as a wake-up: what was published in between is gone, so the worker
    has to look. Start it after a fork, in the process that waits.
    """

    def __init__(self, client: Client, channels: Sequence[str]) -> None:
        self._client = client
        self._channels = tuple(dict.fromkeys(channels))
        # A SimpleQueue, because wake() may be called in a signal handler, even while this very thread is inside
        # wait(): an Event's lock would then wait for itself for ever.
        self._bell: SimpleQueue[None] = SimpleQueue()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self._stop_reading: socket.socket | None = None
        self._pause = FIRST_PAUSE_SECONDS
        self._is_told = False

    def start(self) -> None:
        """The subscription is on its way; a server that is down is tried again until it comes. Once is enough."""
        if self._thread is None and self._channels and not self._closed.is_set():
            self._stop_reading, stop = socket.socketpair()
            self._thread = threading.Thread(target=self._listen, args=(stop,), name="delayq-wakeup", daemon=True)
            self._thread.start()

    def wait(self, seconds: float) -> bool:
        """True as soon as there is a reason to look, False after `seconds` without one; True at once when closed.

        One reason ends one wait, and reasons that come while nobody waits end the next one. For one thread.
        """
        if self._closed.is_set():
            return True
        try:
            self._bell.get(timeout=min(max(0.0, seconds), threading.TIMEOUT_MAX))
        except Empty:
            return False
        while not self._bell.empty():
            self._bell.get()
        return True

    def wake(self) -> None:
        """The present or next `wait` returns at once. Callable from any thread and from a signal handler."""
        if self._bell.empty():
            self._bell.put(None)

    def close(self) -> None:
        """The thread and its connection are gone; after a second it returns even if the thread hangs in a connect."""
        self._closed.set()
        self.wake()
        if self._thread is not None and self._stop_reading is not None:
            with suppress(OSError):
                # The thread closes its own connection. To close it from here would race with its reads, which open a
                # lost connection anew, or wait on a file number that is somebody else's by then.
                self._stop_reading.send(b".")
            self._thread.join(CLOSE_SECONDS)
            self._stop_reading.close()

    def _listen(self, stop: socket.socket) -> None:
        while not self._closed.is_set():
            connection = None
            try:
                connection = _new_connection(self._client)
                connection.connect()
                connection.send_command("SUBSCRIBE", *self._channels)
                self._read(connection, stop)
            except Exception as error:  # noqa: BLE001 - whatever it is, this thread must outlive it
                # Once until it listens again: an outage of an hour is no 3,000 lines.
                level = logging.DEBUG if self._is_told else logging.INFO
                logger.log(level, "wake-ups are interrupted: %s", error, extra={"event": "wakeup_interrupted"})
                self._is_told = True
            finally:
                if connection is not None:
                    connection.disconnect()
            self.wake()
            self._closed.wait(self._pause * random.uniform(0.5, 1.0))
            self._pause = min(2 * self._pause, LAST_PAUSE_SECONDS)
        stop.close()

    def _read(self, connection: Any, stop: socket.socket) -> None:
        asked = False
        while not self._closed.is_set():
            if connection.can_read(timeout=0):
                asked = False
                self._hear(connection.read_response(push_request=True))
            elif _speaks(connection, stop):
                continue
            elif asked:
                raise ConnectionError("no sign of life from the server")
            else:
                asked = True
                connection.send_command("PING")

    def _hear(self, said: object) -> None:
        """Rings for a message, and for the last of the confirmations: from then on nothing can be missed."""
        if not isinstance(said, list) or len(said) < 3:
            return
        kind = said[0].decode() if isinstance(said[0], bytes) else said[0]
        if kind == "subscribe" and said[2] == len(self._channels):
            # Not before: a user who may not subscribe would connect in vain thirty times a second.
            self._pause, self._is_told = FIRST_PAUSE_SECONDS, False
            self.wake()
        elif kind == "message":
            self.wake()


def _speaks(connection: Any, stop: socket.socket) -> bool:
    """Blocks until the server says something, or `stop` does; False after a pulse of silence."""
    poll = select.poll()
    poll.register(connection._sock, select.POLLIN)
    poll.register(stop, select.POLLIN)
    return bool(poll.poll(PULSE_SECONDS * 1000))


def _new_connection(client: Client) -> Any:
    """A connection outside every pool, so that it takes no place from the commands, and none can starve it.

    On a cluster any node will do, as messages cross the cluster's bus; each try takes one at random, as the last one
    may be dead.
    """
    server: Any = client
    if isinstance(client, RedisCluster):
        server = server.get_redis_connection(random.choice(server.get_nodes()))
    pool = server.connection_pool
    # No retries inside: they would hide from the worker that messages may have been missed.
    return pool.connection_class(**{**pool.connection_kwargs, "retry": Retry(NoBackoff(), 0)})
