"""Measure the lateness of one policy while a worker drains a backlog of another policy.

python benchmarks/fairness.py [--flood 100000] [--without-redis] [--workers 1] [--slow 1.0]

With `DELAYQ_TEST_DB=postgresql` or `mariadb` on a server, by default on SQLite. `--slow`: the
handlers of the backlog take this many seconds each; then the benchmark does not drain it completely.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.contestants import Tree
from benchmarks.ground import Probe, ground, late_sleep, show, summary, wait_for, workers

SECONDS_SLOW = 30.0


def crowd(policy: str, count: int, after: timedelta) -> datetime:
    """Create orders with timeouts that are all due at the same time; return that time."""
    from django.utils import timezone

    from django_delayq import schedule_timeouts
    from tests.testapp.models import Order

    at = timezone.now() + after
    for start in range(0, count, 5000):
        orders = Order.objects.bulk_create(Order(status="new") for _ in range(min(5000, count - start)))
        schedule_timeouts(orders, policy, at=at)
    return at


def trickle_until(is_over: Any) -> None:
    """Schedule a timeout of the other policy every 50 ms, due in 100 ms."""
    from django_delayq import schedule_timeout
    from tests.testapp.models import Parcel

    while not is_over():
        schedule_timeout(Parcel.objects.create(), "chase", seconds=0.1)
        time.sleep(0.05)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    from django.utils import timezone

    from django_delayq import schedule_timeout
    from django_delayq.models import Timeout
    from tests.testapp.models import Order

    policy = "linger" if options.slow else "remind"
    begin = crowd(policy, options.flood, timedelta(seconds=20 + options.flood / 5000))
    left = Timeout.objects.pending().filter(policy__endswith=policy)
    with workers(options.workers) as started:
        first = schedule_timeout(Order.objects.create(status="new"), "cancel_unpaid", seconds=0)
        wait_for(lambda: Timeout.objects.filter(pk=first.pk).exclude(state="pending").exists())
        tree = Tree([process.pid for process in started])
        before = tree.memory_mb()
        with Probe(tree.memory_mb, 0.25) as memory, Probe(late_sleep) as noise:
            assert timezone.now() < begin, "setting up took too long"
            time.sleep((begin - timezone.now()).total_seconds())
            until = time.monotonic() + SECONDS_SLOW if options.slow else float("inf")
            trickle_until(lambda: time.monotonic() > until or not left.values("pk")[:1])
            wait_for(lambda: not Timeout.objects.pending().filter(policy__endswith="chase").exists())
        after = tree.memory_mb()
    fired = Timeout.objects.filter(policy__endswith=policy, state="fired")
    count, last = fired.count(), fired.order_by("-settled_at")[0].settled_at
    others = Timeout.objects.filter(policy__endswith="chase", state="fired").values_list("due_at", "settled_at")
    assert Timeout.objects.filter(settled_at__lt=begin, policy__endswith=policy).count() == 0, "early"
    return {
        "lateness of the other, ms": summary([(settled - due).total_seconds() * 1000 for due, settled in others]),
        "the backlog": {"fired": count, "per second": round(count / (last - begin).total_seconds(), 1)},
        "memory of the workers, MB": {"before": round(before), "most": round(max(memory.seen)), "after": round(after)},
        "noise of sleeping here, ms": summary(noise.seen),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--flood", type=int, default=100_000)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--without-redis", action="store_true")
    parser.add_argument("--slow", type=float, default=0.0)
    options = parser.parse_args()
    if options.without_redis:
        os.environ["DELAYQ_TEST_WITHOUT_REDIS"] = "1"
    if options.slow:
        os.environ["DELAYQ_TEST_LINGER"] = str(options.slow)
    with ground():
        source = "the ledger alone" if options.without_redis else "Redis"
        show(f"{options.flood} of one policy due at once, {source}, {options.workers} worker(s)", measure(options))


if __name__ == "__main__":
    main()
