"""What breaks, when, and how it is made whole again: all drawn from one seeded generator.

Faults come like cards from a deck: all kinds once, in a new order each time. So a minute sees every kind. A fault that
lasts has its end in the agenda; a server that is down already is left alone, and the fault is not counted.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from tests.e2e.chaos.crew import SENDER, THREADS, Crew, Worker
from tests.e2e.chaos.databases import CELERY
from tests.e2e.chaos.stage import DURATIONS, SIDES, Stage, signal_all
from tests.engine.fault_proxy import Fault
from tools import processes
from tools.servers import Server

GAP_SECONDS = (0.2, 1.2)
COMMIT = b"COMMIT"
"""As psycopg and mysqlclient send it."""
MOST_CUTS = 8
STEPS = ("planned", "noted", "begun", "locked", "checked", "marked", "handled", "committed", "settled", "reported")
PAST_A_LEASE = 1.5
"""How long a worker sleeps, in leases."""


class Faults:
    """Call `tend` often; after `heal` there are none, and everything runs."""

    def __init__(self, stage: Stage, crew: Crew, seed: int) -> None:
        self.counts: Counter[str] = Counter()
        self._stage = stage
        self._crew = crew
        self._plan = random.Random(f"{seed}/plan")
        self._random = random.Random(f"{seed}/details")
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._ties = itertools.count()
        self._deck = self._shuffled()
        self._next_at = time.monotonic()
        self._down: set[str] = set()

    def tend(self) -> None:
        """End the faults that are over, and start the next one if it is time."""
        now = time.monotonic()
        while self._agenda and self._agenda[0][0] <= now:
            heapq.heappop(self._agenda)[2]()
        self._wake_sleepers(now)
        if now >= self._next_at:
            name, fault = next(self._deck)
            if fault():
                self.counts[name] += 1
            self._next_at = time.monotonic() + self._plan.uniform(*GAP_SECONDS)

    def heal(self) -> None:
        """End all faults: the servers run, no process is suspended, the proxies pass everything."""
        while self._agenda:
            heapq.heappop(self._agenda)[2]()
        for proxy in self._stage.proxies.values():
            proxy.heal()
        self._wake_sleepers(float("inf"))
        self._crew.dismiss_the_doomed()

    def _shuffled(self) -> Iterator[tuple[str, Callable[[], bool]]]:
        kinds = sorted({**self._kinds_of_database(), **self._kinds_of_others()}.items())
        while True:
            yield from self._plan.sample(kinds, len(kinds))

    def _kinds_of_database(self) -> dict[str, Callable[[], bool]]:
        label = self._stage.database.label
        database, server = self._stage.database, self._stage.database.server
        if server is None:
            return {f"{label} locked": self._lock_database}
        return {
            f"{label} restart": lambda: self._take_down("database", database.crash, server.start),
            f"{label} sessions ended": self._end_sessions,
            f"{label} COMMIT not sent": lambda: self._cut("database", Fault.RESET_BEFORE, COMMIT),
            f"{label} COMMIT not answered": lambda: self._cut("database", Fault.RESET_AFTER, COMMIT),
            f"{label} requests lost": lambda: self._cut("database", Fault.RESET_BEFORE),
            f"{label} answers lost": lambda: self._cut("database", Fault.RESET_AFTER),
            f"{label} silent": lambda: self._silence("database", server),
        }

    def _kinds_of_others(self) -> dict[str, Callable[[], bool]]:
        stage = self._stage
        return {
            "worker SIGKILL": self._kill_worker,
            "worker killed at a step": lambda: self._doom("KILL_AT"),
            "worker asleep at a step past its lease": lambda: self._doom("STOP_AT"),
            "worker asleep past its lease": self._stop_worker,
            "worker SIGTERM": self._tell_worker,
            "worker of another installation": self._crew.intrude,
            "celery SIGKILL": lambda: self._kill_worker(CELERY),
            "celery SIGTERM": lambda: self._tell_worker(CELERY),
            "celery messages lost": lambda: self._ask("broker", "DEL", "celery"),
            "celery broker SIGKILL": lambda: self._take_down("broker", stage.broker.kill, stage.broker.start),
            "redis SIGKILL, log kept": lambda: self._kill_redis(keeps=True),
            "redis SIGKILL, all lost": lambda: self._kill_redis(keeps=False),
            "redis silent": lambda: self._silence("redis", stage.redis),
            "redis FLUSHALL": lambda: self._ask("redis", "FLUSHALL"),
            "redis SCRIPT FLUSH": lambda: self._ask("redis", "SCRIPT", "FLUSH"),
            "redis CLIENT KILL": lambda: self._ask("redis", "CLIENT", "KILL", "SKIPME", "yes"),
            "redis CLIENT PAUSE": lambda: self._ask("redis", "CLIENT", "PAUSE", str(self._random.randint(300, 2500))),
            "redis requests lost": lambda: self._cut("redis", Fault.RESET_BEFORE),
            "redis answers lost": lambda: self._cut("redis", Fault.RESET_AFTER),
        }

    def _take_down(self, server: str, begin: Callable[[], object], end: Callable[[], object]) -> bool:
        """Do `begin` to a server that is up, and some time later `end`."""
        if server in self._down:
            return False
        begin()
        self._down.add(server)

        def over() -> None:
            end()
            self._down.discard(server)

        over_at = time.monotonic() + self._random.uniform(0.0, 3.0)
        heapq.heappush(self._agenda, (over_at, next(self._ties), over))
        return True

    def _a_worker(self, kind: str | None = None) -> Worker | None:
        """Return one of this kind; None: of any but Celery's, which have faults of their own.

        Those of Celery take seconds to start: on a busy machine none would live to fire.
        """
        plain = [worker for worker in self._crew.workers if worker.is_plain and worker.process.poll() is None]
        plain = [worker for worker in plain if worker.kind in ({kind} if kind else {THREADS, SENDER})]
        plain = [worker for worker in plain if worker.kind != CELERY or worker.listens()]
        return self._random.choice(plain) if plain else None

    def _kill_worker(self, kind: str | None = None) -> bool:
        worker = self._a_worker(kind)
        if worker is not None:
            worker.is_ours_to_end = True
            processes.kill(worker.process)
        return worker is not None

    def _doom(self, fate: str) -> bool:
        """Replace a worker by one that is killed or suspended at a step of a firing."""
        if any(worker.variables for worker in self._crew.workers) or not self._kill_worker(THREADS):
            return False
        self._crew.next_has({fate: self._random.choice(STEPS)})
        return True

    def _stop_worker(self) -> bool:
        worker = self._a_worker()
        if worker is not None:
            worker.process.send_signal(signal.SIGSTOP)
            worker.stopped_since = time.monotonic()
        return worker is not None

    def _tell_worker(self, kind: str | None = None) -> bool:
        worker = self._a_worker(kind)
        if worker is None or not worker.listens():
            return False
        worker.tell()
        return True

    def _wake_sleepers(self, now: float) -> None:
        for worker in self._crew.workers:
            since = worker.stopped_since
            if since is not None and now - since > DURATIONS["LEASE"] * PAST_A_LEASE:
                worker.process.send_signal(signal.SIGCONT)
                worker.stopped_since, worker.variables = None, {}

    def _kill_redis(self, *, keeps: bool) -> bool:
        def start() -> None:
            self._stage.redis.keeps = keeps
            self._stage.redis.start()

        return self._take_down("redis", self._stage.redis.kill, start)

    def _ask(self, name: str, *words: str) -> bool:
        if name in self._down:
            return False
        server = self._stage.redis if name == "redis" else self._stage.broker
        options: Any = {"socket_timeout": 5, "retry": Retry(NoBackoff(), 0)}
        with contextlib.suppress(redis.RedisError), redis.Redis(port=server.port, **options) as client:
            client.execute_command(*words)
            return True
        return False

    def _end_sessions(self) -> bool:
        if "database" in self._down:
            return False
        with contextlib.suppress(Exception):  # the errors of all drivers
            self._stage.database.end_sessions(self._random.uniform(0.1, 1.0))
            return True
        return False

    def _lock_database(self) -> bool:
        """Keep all from writing for a while, as another program with the file does."""
        with contextlib.suppress(Exception):
            unlocks: list[Callable[[], None]] = []
            lock = self._stage.database.hold_write_lock
            return self._take_down("database", lambda: unlocks.append(lock()), lambda: unlocks.pop()())
        return False

    def _silence(self, name: str, server: Server) -> bool:
        """Suspend a server: its connections stay open, and nothing answers."""
        return self._take_down(
            name, lambda: signal_all(server, signal.SIGSTOP), lambda: signal_all(server, signal.SIGCONT)
        )

    def _cut(self, server: str, fault: Fault, only: bytes = b"") -> bool:
        side = self._random.choice(SIDES)
        for _ in range(self._random.randint(1, MOST_CUTS)):
            self._stage.proxies[f"{server}-{side}"].inject(fault, only)
        return server not in self._down
