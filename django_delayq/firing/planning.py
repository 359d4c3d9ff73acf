"""Plan: one query for all rows that Redis says are due, and from it pieces of work, one policy each."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

from django_delayq.clock import DatabaseNow
from django_delayq.firing.checkpoints import reach
from django_delayq.firing.pace import pace_of
from django_delayq.firing.report import Findings, Report, Work
from django_delayq.firing.unknown import unknown
from django_delayq.ledger.controls import stop_cache
from django_delayq.models import Timeout
from django_delayq.policies import TimeoutPolicy, registry

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from datetime import datetime

_BIGGEST_ID = 2**63 - 1
_COLUMNS = ("id", "policy", "object_id", "queue", "state", "run_at", "database_now")


class _Row(NamedTuple):
    id: int
    policy: str
    object_id: str
    queue: str
    state: str
    run_at: datetime
    database_now: datetime

    @property
    def is_settled(self) -> bool:
        return Timeout.State(self.state).is_settled


def plan(deliveries: Mapping[int, int], using: str, ahead: timedelta = timedelta(0)) -> tuple[list[Work], Report]:
    """What to do with the timeouts that fell due: work for `run`, and a report on those that need none.

    One query, whatever their number, and now and then one for what is stopped. Settled rows and ids without a row
    are done; rows that are not due yet by the database's clock, and those whose policy is stopped or not declared
    here, come again.

    Args:
        deliveries: how often each id was handed out and never returned. From the second time on it is a suspect.
        using: the database.
        ahead: what falls due within this time counts as due; the report's `due_by` says when all of it is.

    Raises:
        django.db.Error: the database cannot be read. Nothing has changed then.
    """
    ids = [timeout_id for timeout_id in deliveries if 0 < timeout_id <= _BIGGEST_ID]
    rows = Timeout.objects.using(using).filter(pk__in=ids).annotate(database_now=DatabaseNow())
    found = [_Row(*row) for row in rows.order_by("run_at", "id").values_list(*_COLUMNS)]
    findings = Findings(now=found[0].database_now if found else None)
    findings.done += deliveries.keys() - {row.id for row in found}
    due: dict[tuple[str, str], list[_Row]] = defaultdict(list)
    stopped = stop_cache.confirmed(using, _labels(found))
    for row in found:
        policy = registry.get(row.policy)
        if row.is_settled:
            findings.done.append(row.id)
        elif row.run_at > row.database_now + ahead:
            findings.again[row.id] = row.run_at
        elif policy is None:
            findings.again[row.id] = unknown.again_at(row.policy, row.id, row.database_now)
        elif policy.label in stopped:
            findings.again[row.id] = stopped.recheck_at(policy.label, row.database_now)
        else:
            due[policy.label, row.queue].append(row)
    reach("planned")
    works = [work for (label, _), waiting in due.items() for work in _works(label, waiting, deliveries)]
    last = max((row.run_at for waiting in due.values() for row in waiting), default=None)
    if last is None or last <= found[0].database_now:
        return works, findings.report()
    return works, replace(findings.report(), due_by=last)


def _labels(rows: Sequence[_Row]) -> set[str]:
    policies = {row.policy: registry.get(row.policy) for row in rows}
    return {policy.label for policy in policies.values() if policy is not None}


def _works(label: str, rows: Sequence[_Row], deliveries: Mapping[int, int]) -> Iterator[Work]:
    """The due `rows` of one policy and queue in pieces: suspects and rows that were `firing` alone."""
    policy = registry.get(label)
    assert policy is not None
    crowd = []
    for row in rows:
        suspect = deliveries[row.id] > 1
        if suspect or row.state == Timeout.State.FIRING or not policy.atomic:
            yield _work(label, [row], suspect=suspect)
        else:
            crowd.append(row)
    yield from (_work(label, piece) for piece in _pieces(crowd, _size(policy)))


def _size(policy: TimeoutPolicy[Any]) -> int:
    return policy.batch or pace_of(policy.label).work_size()


def _pieces(rows: Sequence[_Row], size: int) -> Iterator[list[_Row]]:
    """`rows` in pieces of at most `size`, none with two timeouts of one object: the first would change the second's."""
    rest = list(rows)
    while rest:
        piece: dict[str, _Row] = {}
        left = []
        for row in rest:
            if len(piece) < size and row.object_id not in piece:
                piece[row.object_id] = row
            else:
                left.append(row)
        yield list(piece.values())
        rest = left


def _work(label: str, rows: Sequence[_Row], *, suspect: bool = False) -> Work:
    return Work(label, tuple(row.id for row in rows), tuple(row.object_id for row in rows), rows[0].queue, suspect)
