"""The parts of a worker that its main loop shares with its other threads."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, cast

from django.db import router

from django_delayq.conf import get_settings
from django_delayq.engine.engine import Engine
from django_delayq.engine.wakeup import Wakeup
from django_delayq.ledger.db_connections import Limit, pool_limit
from django_delayq.models import Timeout
from django_delayq.policy.policies import declared_queues
from django_delayq.worker.servers import ClockSkew, RedisHealth
from django_delayq.worker.sources.redis import Sources

logger = logging.getLogger("django_delayq.worker")


class WorkerParts:
    """What `Dispatch` and `Background` need of their worker, which derives from this class.

    The arguments are those of `Worker`. Raises ConfigError.
    """

    def __init__(
        self, *, queues: Sequence[str] | None, concurrency: int | None, burst: bool, using: str | None
    ) -> None:
        self.using = using or router.db_for_write(Timeout)
        self.queues = list(dict.fromkeys(queues)) if queues else declared_queues()
        self.concurrency = concurrency or get_settings().concurrency
        self.only = self.queues if queues else None
        """The queues to which it is restricted; None: it serves all."""
        self.is_burst = burst
        self.processes = 1
        """So many workers like this one run under one supervisor."""
        self.passed_at = time.monotonic()
        """When the last pass of the main loop began, by `time.monotonic()`."""
        self.found_queues: SimpleQueue[Sequence[str]] = SimpleQueue()
        """For `Background`: queues to serve, too, that only rows name."""
        self.skew = ClockSkew(self.using)
        self.limit_concurrency(pool_limit(self.using))
        self.redis = RedisHealth(None)
        self._connect(None)

    def _connect(self, engine: Engine | None) -> None:
        """Take due timeouts from this engine, too. It needs the ledger, whose identity is part of the keys in Redis."""
        self.redis.engine = engine
        self.sources = Sources(self.redis, self.queues, self.only, self.using, self.skew)
        if self.is_burst:  # it ends when nothing is due
            self.sources.ledger.ahead = timedelta(0)
        self._wakeup = self._new_wakeup()

    def wake(self) -> None:
        """Make the worker check its sources now. For any thread, and for signal handlers."""
        self._wakeup.wake()

    def interrupt(self) -> None:
        """Make the worker resolve what has completed; it checks its sources only if it is time. For any thread."""
        self._wakeup.interrupt()

    def limit_concurrency(self, limit: Limit | None) -> None:
        """Run as many handler threads as `limit` leaves connections for, and log a warning if that is fewer."""
        if limit is None or get_settings().executor is not None:  # another executor has connections of its own
            return
        if self.processes > 1 and not limit.is_pool:
            limit = Limit(limit.size // self.processes, f"{limit.setting}, for each of {self.processes} processes,")
        wanted, self.concurrency = self.concurrency, limit.threads(self.concurrency)
        if self.concurrency < wanted:
            words = "%s This worker runs %d of them. Raise the limit, or lower CONCURRENCY."
            logger.warning(words, limit.shortage(wanted), self.concurrency, extra={"event": "too_few_connections"})

    def serve_found_queues(self) -> None:
        """Serve the queues that `Background` has found, too."""
        while not self.found_queues.empty():
            self.queues += self.found_queues.get()
            self.sources.redis.serve(self.queues)
            former, self._wakeup = self._wakeup, self._new_wakeup()
            self._wakeup.start()
            former.close()
            self._wakeup.wake()  # a call of the former one may have been missed

    def _new_wakeup(self) -> Wakeup:
        engine = self.redis.engine
        # Without channels only this process wakes the worker.
        return Wakeup(cast("Any", None), ()) if engine is None else engine.wakeup(self.queues)
