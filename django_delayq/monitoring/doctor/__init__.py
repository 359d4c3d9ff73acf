"""What is wrong with this installation, in words that say what to do: for people, and as an exit code for probes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from django.db import router

from django_delayq.models import Timeout
from django_delayq.monitoring.doctor import databases, redis, rounds, workers
from django_delayq.monitoring.doctor.findings import Finding, Level

__all__ = ["Finding", "Level", "examine"]

Check = Callable[[str], Iterator[Finding]]

QUICK: tuple[Check, ...] = (
    databases.versions,
    databases.migrations,
    databases.indexes,
    databases.clock,
    databases.room,
    redis.server,
    redis.clock,
    redis.in_step,
    workers.alive,
    workers.stuck,
    workers.unserved_queues,
    rounds.waiting,
    rounds.stopped,
    rounds.unfinished_changes,
)
SLOW: tuple[Check, ...] = (rounds.too_old_to_arm,)
"""These read the tables of the policies, as a sync does."""


def examine(using: str | None = None, *, quick: bool = False) -> list[Finding]:
    """Everything that is looked at, the worst first; what is well is among it. Changes nothing, raises nothing.

    `quick`: nothing that reads whole tables, for a probe that asks every few seconds.
    """
    using = using or router.db_for_write(Timeout)
    found: list[Finding] = []
    for check in QUICK if quick else (*QUICK, *SLOW):
        try:
            found += check(using)
        except Exception as error:  # noqa: BLE001 - what cannot be examined is a finding, and the others matter too
            name = f"{check.__module__.rpartition('.')[2]}.{check.__name__}"
            found.append(Finding(name, Level.ERROR, f"It could not be examined: {type(error).__name__}: {error}"))
    return sorted(found, key=lambda finding: -finding.level)
