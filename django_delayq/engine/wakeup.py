"""Wake a waiting worker when an earlier entry is added. Only a hint: a lost message costs time, never a timeout.

A thread reads from a connection of its own and wakes `wait`. A half-open connection is silent too, so a waiting worker
still checks its queues after the time that it passes to `wait`.
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

from django_delayq.backoff import Backoff, StateLog
from django_delayq.engine.scripts import Client

logger = logging.getLogger("django_delayq.engine")

PULSE_SECONDS: Final = 10.0
"""After this much silence the server gets a PING; after twice as much the connection is renewed."""
CLOSE_SECONDS: Final = 1.0
"""How long `close` waits for the thread, which may hang in a connect: a longer wait would delay the end of a worker."""


class Wakeup:
    """Subscribes to channels in a thread; `wait` returns early when a message arrives, or this process wakes it.

    A lost subscription and a new one also wake: messages in between are lost, so the worker must check its queues.
    Start it after a fork, in the process that waits.
    """

    def __init__(self, client: Client, channels: Sequence[str]) -> None:
        self._client = client
        self._channels = tuple(dict.fromkeys(channels))
        # A SimpleQueue, because a signal handler may call wake() while its thread is inside wait(): the lock of an
        # Event would deadlock.
        self._calls: SimpleQueue[None] = SimpleQueue()
        self._must_check = False
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self._stop_reading: socket.socket | None = None
        self._backoff = Backoff(0.05, 1.0)
        self._log = StateLog(logger, "wakeup_interrupted", quiet_seconds=1.0)  # clients may be killed again and again

    def start(self) -> None:
        """Subscribe in a thread, and again after each failure. Further calls do nothing."""
        if self._thread is None and self._channels and not self._closed.is_set():
            self._stop_reading, stop = socket.socketpair()
            self._thread = threading.Thread(target=self._listen, args=(stop,), name="delayq-wakeup", daemon=True)
            self._thread.start()

    def wait(self, seconds: float) -> bool:
        """Wait for a call, at most so many seconds, and not when closed. Return whether the queues must be checked.

        They must after `wake` and when closed, but not after `interrupt`. Calls before it end the next wait at once.
        For one thread.
        """
        if self._closed.is_set():
            return True
        with suppress(Empty):
            self._calls.get(timeout=min(max(0.0, seconds), threading.TIMEOUT_MAX))
        while not self._calls.empty():
            self._calls.get()
        if not self._must_check:
            return False
        self._must_check = False
        return True

    def wake(self) -> None:
        """End the current or next `wait`, which returns True. For any thread, and for signal handlers."""
        self._must_check = True
        self.interrupt()

    def interrupt(self) -> None:
        """End the current or next `wait`. For any thread, and for signal handlers."""
        if self._calls.empty():
            self._calls.put(None)

    def close(self) -> None:
        """End the thread, which closes its connection. Wait a second at most, as it may hang in a connect."""
        self._closed.set()
        self.wake()
        if self._thread is not None and self._stop_reading is not None:
            with suppress(OSError):
                # The thread closes its own connection. To close it here would race with its reads: they reopen a lost
                # connection, or wait on a file descriptor that another connection has by then.
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
            except Exception as error:  # noqa: BLE001 - the thread must continue
                self._log.failed("wake-ups are interrupted: %s", error, level=logging.INFO)
            finally:
                if connection is not None:
                    connection.disconnect()
            self.wake()
            self._backoff.failed()
            self._closed.wait(self._backoff.seconds_left)
        stop.close()

    def _read(self, connection: Any, stop: socket.socket) -> None:
        """Read messages until `close`, which writes to the other end of `stop`."""
        poll = select.poll()
        poll.register(connection._sock, select.POLLIN)
        poll.register(stop, select.POLLIN)
        asked = False
        while not self._closed.is_set():
            if connection.can_read(timeout=0):
                asked = False
                self._receive(connection.read_response(push_request=True))
            elif poll.poll(PULSE_SECONDS * 1000):
                continue
            elif asked:
                raise ConnectionError("no answer to PING")
            else:
                asked = True
                connection.send_command("PING")

    def _receive(self, message: object) -> None:
        """Wake for a message, and for the last confirmation: no later message can be missed."""
        if not isinstance(message, list) or len(message) < 3:
            return
        kind = message[0].decode() if isinstance(message[0], bytes) else message[0]
        if kind == "subscribe" and message[2] == len(self._channels):
            # Not before: a user that may not subscribe would connect thirty times a second without effect.
            self._backoff.succeeded()
            self._log.recovered()
            self.wake()
        elif kind == "message":
            self.wake()


def _new_connection(client: Client) -> Any:
    """Return a connection outside every pool, so that it does not compete with commands.

    On a cluster any node serves, as messages cross the cluster bus. Each try takes one at random, as the last one may
    be down.
    """
    server: Any = client
    if isinstance(client, RedisCluster):
        server = server.get_redis_connection(random.choice(server.get_nodes()))
    pool = server.connection_pool
    # No retries: they would hide from the worker that messages may have been missed.
    return pool.connection_class(**{**pool.connection_kwargs, "retry": Retry(NoBackoff(), 0)})
