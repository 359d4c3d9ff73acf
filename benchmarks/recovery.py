"""Measure how long until due timeouts fire again after a SIGKILL, after FLUSHALL, and while Redis is down or silent.

DELAYQ_TEST_DB=postgresql python benchmarks/recovery.py [--rounds 5] [--lease 5] [--sweep 5] [--outage 30]

The noise in the last line is how late a sleep ends on this machine: on a busy machine everything is later.

The benchmark starts its own Redis, because it kills and empties it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.ground import Probe, ground, late_sleep, show, summary, wait_for, workers
from tools.servers import RedisServer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--leased", type=int, default=20, help="timeouts that a killed worker holds")
    parser.add_argument("--timeouts", type=int, default=100, help="in each round of the other faults")
    parser.add_argument("--lease", type=float, default=5.0)
    parser.add_argument("--sweep", type=float, default=5.0)
    parser.add_argument("--outage", type=float, default=30.0)
    options = parser.parse_args()
    durations = {"LEASE": options.lease, "SWEEP_INTERVAL": options.sweep}
    with tempfile.TemporaryDirectory(prefix="delayq-recovery-") as folder, RedisServer(Path(folder, "redis")) as redis:
        os.environ.update(DELAYQ_TEST_REDIS_URL=redis.url, DELAYQ_TEST_SECONDS=json.dumps(durations))
        with ground(), Probe(late_sleep) as probe:
            results = {
                "SIGKILL, lease ends after": {"s": options.lease, "bound": options.lease + 1},
                "SIGKILL -> all fired, s": after_sigkill(options),
                "FLUSHALL, sweep every": {"s": options.sweep, "bound": options.sweep},
                "FLUSHALL: late, s": after_flushall(options, redis),
            }
            for words, outage in (("down", is_down), ("silent", is_silent)):
                late, back = during(options, redis, outage)
                results[f"Redis {words} for"] = {"s": options.outage, "bound": 2.0}
                results[f"Redis {words}: late, s"] = late
                results[f"Redis {words}: back in use, s"] = {"after": back}
            results["noise of sleeping here, ms"] = summary(probe.seen)
    show("recovery", results)


def after_sigkill(options: argparse.Namespace) -> dict[str, float]:
    """Measure the time from killing a worker until another one has fired all its leased timeouts."""
    seconds = []
    with workers(1) as [heir]:
        _warm_up()
        for _ in range(options.rounds):
            os.kill(heir.pid, signal.SIGSTOP)  # so that the other worker gets them all
            orders = _orders(options.leased)
            with mock.patch.dict(os.environ, DELAYQ_TEST_KILL_AT="begun"), workers(1) as [doomed]:
                _schedule(orders, lambda: 2.0)  # all at the same time, so that it leases many of them
                wait_for(lambda doomed=doomed: doomed.poll() is not None)
                died = time.monotonic()
            os.kill(heir.pid, signal.SIGCONT)
            _wait_for_all()
            seconds.append(time.monotonic() - died)
    return summary(seconds)


def after_flushall(options: argparse.Namespace, redis: RedisServer) -> dict[str, float]:
    """Measure the lateness of timeouts due within two sweeps of a FLUSHALL."""
    late: list[float] = []
    with workers(1) as _:
        _warm_up()
        for _ in range(options.rounds):
            orders = _orders(options.timeouts)
            start = random.uniform(2, 2 + options.sweep)
            _schedule(orders, lambda start=start: start + random.uniform(0, 2 * options.sweep))
            time.sleep(start)
            _ask(redis, "FLUSHALL")
            _wait_for_all()
            late += _lateness(orders)
    return summary(late)


def during(options: argparse.Namespace, redis: RedisServer, outage: Any) -> tuple[dict[str, float], float]:
    """Measure the lateness of timeouts due in an outage, and how long after it the worker uses Redis again."""
    with workers(1) as _:
        _warm_up()
        orders = _orders(10 * options.timeouts)
        _schedule(orders, lambda: 10 + random.uniform(0.0, options.outage))
        time.sleep(9)
        with outage(redis):
            time.sleep(1 + options.outage)
            _wait_for_all()
        began = time.monotonic()
        _ask(redis, "CONFIG", "RESETSTAT")
        wait_for(lambda: "cmdstat_evalsha" in _ask(redis, "INFO", "commandstats"))  # only the worker asks
        back = round(time.monotonic() - began, 3)
    return summary(_lateness(orders)), back


@contextmanager
def is_down(redis: RedisServer) -> Iterator[None]:
    """Refuse connections; afterwards all data is lost."""
    redis.kill()
    yield
    redis.start()


@contextmanager
def is_silent(redis: RedisServer) -> Iterator[None]:
    """Keep connections open without answers."""
    assert redis.process is not None
    redis.process.send_signal(signal.SIGSTOP)
    yield
    redis.process.send_signal(signal.SIGCONT)


def _orders(count: int) -> list[Any]:
    from tests.testapp.models import Order

    return Order.objects.bulk_create(Order(status="new") for _ in range(count))


def _schedule(orders: list[Any], seconds: Callable[[], float]) -> None:
    from django.utils import timezone

    from django_delayq import schedule_timeout

    begin = timezone.now()
    for order in orders:
        schedule_timeout(order, "remind", at=begin + timedelta(seconds=seconds()))


def _wait_for_all() -> None:
    from django_delayq.models import Timeout

    wait_for(lambda: not Timeout.objects.pending().exists())


def _warm_up() -> None:
    """Wait until a worker has fired a timeout, and so has opened its connections."""
    _schedule(_orders(1), lambda: 0.0)
    _wait_for_all()


def _lateness(orders: list[Any]) -> list[float]:
    """Return the times from deadline to handler, in seconds."""
    from django_delayq.models import Timeout
    from tests.testapp.models import Effect

    keys = [str(order.pk) for order in orders]
    due = dict(Timeout.objects.filter(object_id__in=keys).values_list("pk", "due_at"))
    effects = list(Effect.objects.filter(timeout_id__in=due).values_list("timeout_id", "at"))
    assert len(effects) == len(orders), "each fires once"
    return [(at - due[pk]).total_seconds() for pk, at in effects]


def _ask(redis: RedisServer, *words: str) -> Any:
    import redis as client

    with client.Redis.from_url(redis.url) as connection:
        return connection.execute_command(*words)


if __name__ == "__main__":
    main()
