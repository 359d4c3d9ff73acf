"""Which queues there are: those of declared policies, and those that only rows still name."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Collection, Iterable
from datetime import timedelta
from typing import Final

from django_delayq.clock import database_now
from django_delayq.conf import get_settings
from django_delayq.models import Timeout
from django_delayq.policies import declared_queues

logger = logging.getLogger("django_delayq.worker")

MOST_ROWS: Final = 10_000
"""Read in one look for queues; behind a longer backlog a forgotten queue is found when the backlog is gone."""


def forgotten_queues(using: str, known: Collection[str]) -> list[str]:
    """Queues that no policy names any more, but rows that are due or nearly so."""
    soon = database_now(using) + 2 * get_settings().sweep_interval + timedelta(seconds=1)
    rows = Timeout.objects.using(using).pending().filter(run_at__lte=soon).order_by("run_at", "id")
    return sorted(set(rows.values_list("queue", flat=True)[:MOST_ROWS]) - set(known))


def warn_of_unknown(wanted: Iterable[str], using: str) -> None:
    """Logs those of `wanted` that no policy and no row names: most likely they are misspelled."""
    known = declared_queues()
    for queue in wanted:
        if queue in known or Timeout.objects.using(using).unsettled().filter(queue=queue).exists():
            continue
        near = difflib.get_close_matches(queue, known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}"
        logger.warning("No policy uses the queue %r: %s", queue, hint, extra={"event": "queue_unknown", "queue": queue})
