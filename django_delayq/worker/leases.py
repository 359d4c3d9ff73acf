"""What runs longer than expected stays this worker's: its leases are extended for as long as the process lives."""

from __future__ import annotations

from django_delayq.conf import get_settings
from django_delayq.firing import extend_firing
from django_delayq.worker.dispatch import Dispatch
from django_delayq.worker.periodic import Job
from django_delayq.worker.sources.both import Sources


def lease_keeper(sources: Sources, dispatch: Dispatch, using: str) -> Job:
    """Return the job that extends all leases, a third of a lease after the last time: one try may fail.

    A process that is stopped for longer than its lease loses it, and goes on: what it commits then is decided by the
    ledger, as always.
    """

    def extend() -> None:
        sources.extend()
        extend_firing(dispatch.firing_outside(), using)

    return Job("leases", extend, third_of_a_lease, is_immediate=False)


def third_of_a_lease() -> float:
    """Seconds; also after which time a worker leaves to others what it has not begun."""
    return get_settings().lease.total_seconds() / 3
