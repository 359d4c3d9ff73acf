"""Measure how late an idle worker process runs handlers: 1,000 random deadlines.

python benchmarks/lag.py [--timeouts 1000] [--seconds 60]
"""

from __future__ import annotations

import argparse
import random
import sys
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.ground import SleepProbe, ground, show, summary, wait_for, workers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--timeouts", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--workers", type=int, default=1)
    options = parser.parse_args()
    with ground():
        from django.utils import timezone

        from django_delayq import schedule_timeout
        from django_delayq.models import Timeout
        from tests.testapp.models import Effect, Order

        orders = Order.objects.bulk_create(Order(status="new") for _ in range(options.timeouts + 1))
        with workers(options.workers) as _:
            schedule_timeout(Order.objects.order_by("pk")[0], "remind", seconds=0)
            wait_for(lambda: Effect.objects.exists())  # it runs, and has opened its connections
            begin = timezone.now() + timedelta(seconds=2 + options.timeouts / 200)
            for order in Order.objects.order_by("pk")[1:]:
                schedule_timeout(order, "remind", at=begin + timedelta(seconds=random.uniform(0, options.seconds)))
            assert timezone.now() < begin, "scheduling took too long"
            with SleepProbe() as probe:
                import time

                time.sleep((begin - timezone.now()).total_seconds() + options.seconds)
                wait_for(lambda: not Timeout.objects.pending().exists())
        due = dict(Timeout.objects.values_list("pk", "due_at"))
        effects = list(Effect.objects.values_list("timeout_id", "at"))
        late = [(at - due[pk]).total_seconds() * 1000 for pk, at in effects if due[pk] >= begin]
        settled = Timeout.objects.filter(due_at__gte=begin).values_list("due_at", "settled_at")
        marked = [(settled_at - due_at).total_seconds() * 1000 for due_at, settled_at in settled]
        assert len(late) == len(orders) - 1 == len({pk for pk, _ in effects}) - 1
        show(
            "lag of an idle worker, ms",
            {
                "deadline -> marked fired": summary(marked),
                "deadline -> in the handler": summary(late),
                "noise of sleeping here": summary(probe.late),
            },
        )


if __name__ == "__main__":
    main()
