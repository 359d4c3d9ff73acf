"""Workers: whether any live, whether one hangs, and whether every queue has one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from django_delayq.clock import database_now
from django_delayq.models import Timeout
from django_delayq.monitoring.doctor.findings import Finding, error, ok, warning
from django_delayq.monitoring.snapshot import OVERDUE, workers_alive

STUCK_SECONDS: Final = 30.0
LOOKED_AT: Final = 1_000


def alive(using: str) -> Iterator[Finding]:
    """Whether any worker lives."""
    found = workers_alive(using)
    if not found:
        yield error("workers", "No worker lives: nothing fires.", "manage.py delayq_worker")
        return
    versions = {worker.version for worker in found}
    names = ", ".join(worker.name for worker in found)
    if len(versions) > 1:
        text = f"{len(found)} live, of versions {', '.join(sorted(versions))}: {names}."
        yield warning("workers", text, "Restart the older ones, if no deployment is under way.")
    else:
        yield ok("workers", f"{len(found)} live: {names}.")


def stuck(using: str) -> Iterator[Finding]:
    """Whether the loop of one hangs: its process lives, and takes nothing."""
    for worker in workers_alive(using):
        if worker.stuck_seconds > STUCK_SECONDS:
            text = f"{worker.name} has not looked for due timeouts for {worker.stuck_seconds:.0f} s."
            yield error("workers.stuck", text, "Restart it. What it holds comes back when its lease ends.")


def unserved_queues(using: str) -> Iterator[Finding]:
    """Whether something waits in a queue that no worker serves."""
    found = workers_alive(using)
    if not found or any(worker.queues is None for worker in found):
        return
    served = {queue for worker in found for queue in worker.queues or ()}
    rows = Timeout.objects.using(using).pending().filter(run_at__lte=database_now(using) - OVERDUE)
    waiting = rows.order_by("run_at", "id").values_list("queue", flat=True)[:LOOKED_AT]
    for queue in sorted(set(waiting) - served):
        hint = f"delayq_worker --queue {queue}, or one worker without --queue."
        yield error("workers.queues", f"Nobody serves the queue {queue!r}, and timeouts in it are overdue.", hint)
