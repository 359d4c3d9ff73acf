"""Divide the rows that a source has leased or claimed into works of one policy each.

One query reads them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from math import inf
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from django.db.models import Subquery

from django_delayq.conf import get_settings
from django_delayq.engine.records import MAX_ID
from django_delayq.firing.handler import checkpoint
from django_delayq.firing.log_lines import UNKNOWN_PAUSE, log_waiting
from django_delayq.firing.report import ReportBuilder
from django_delayq.firing.state import firing_state
from django_delayq.firing.works import Report, Work
from django_delayq.ledger.claiming import Slot
from django_delayq.ledger.controls import stop_cache
from django_delayq.ledger.installation import check_name
from django_delayq.models import Installation, Timeout
from django_delayq.policy.policies import TimeoutPolicy, registry
from django_delayq.rounds.columns import is_suspect
from django_delayq.sql.now import DatabaseNow
from django_delayq.sql.statements import compiled, has_key, key_list

if TYPE_CHECKING:
    from django.db.models import QuerySet

TOGETHER_WITHIN: Final = timedelta(milliseconds=1)
"""How long the first of several timeouts that share a transaction may wait for the last one."""
WITHOUT_SLOT_PAUSE: Final = timedelta(seconds=1)
"""For an entry of a timeout that another worker has claimed. That worker removes neither this entry nor its lease."""
ANY_TIME: Final = Slot(0.0, inf)
"""The slot of works of policies without a rate: the worker decides when they begin."""


class _Row(NamedTuple):
    id: int
    policy: str
    object_id: str
    queue: str
    state: str
    share: str
    run_at: datetime
    suspected_at: datetime | None
    deaths: int
    database_now: datetime
    installation: str | None


def plan(
    deliveries: Mapping[int, int], using: str, ahead: timedelta = timedelta(0), slots: Mapping[int, Slot] | None = None
) -> tuple[list[Work], Report]:
    """Return works for `run`, and a report on the timeouts that need none.

    One query, and occasionally one for stopped policies. Settled rows and ids without a row are done. Rows that are not
    due yet by the database clock, and those of policies that are stopped or not declared here, are checked again later.

    Args:
        deliveries: how often each id was delivered without an acknowledgement. From the second time on it is a suspect,
            as is a row that is still `firing` although its attempt has expired, or that the ledger calls one.
        using: the database.
        ahead: timeouts due within this time count as due; `early` of the report has the deadlines of those that are not
            due yet. Only those that are due at nearly the same time share a work.
        slots: when timeouts of policies with a rate may begin. Those that have none are checked again in a second; a
            worker claims them when the rate allows. None: rates do not apply.

    Raises:
        django.db.Error: the database cannot be read. Nothing has changed then.
        WrongInstallation: a copy of another installation has replaced the database while this process runs.
    """
    found = rows_of(deliveries, using)
    report = ReportBuilder(now=found[0].database_now if found else None)
    report.done += deliveries.keys() - {row.id for row in found}
    policies = {label: registry.get(label) for label in {row.policy for row in found}}
    stopped = stop_cache.confirmed(using, {policy.label for policy in policies.values() if policy is not None})
    due: dict[tuple[str, str, datetime | None, Slot], list[_Row]] = defaultdict(list)
    early, begins = dict[int, datetime](), dict[tuple[str, str], datetime]()
    for row in [_deferred(row, policies[row.policy]) for row in found]:
        policy, now = policies[row.policy], row.database_now
        if Timeout.State(row.state).is_settled or row.state == Timeout.State.HELD:
            log_waiting([row.id], f"it is {row.state} already")
            report.done.append(row.id)
        elif row.run_at > now + ahead:
            log_waiting([row.id], f"it is not due before {row.run_at}")
            report.again[row.id] = row.run_at
        elif policy is None:
            log_waiting([row.id], f"the policy {row.policy} is not declared here")
            report.again[row.id] = now + UNKNOWN_PAUSE
        elif policy.label in stopped:
            report.release_stopped([row.id])
        elif policy.rate and slots is not None and row.state == Timeout.State.PENDING:
            if slot := slots.get(row.id):
                due[policy.label, row.queue, None, slot].append(row)
            else:
                log_waiting([row.id], "the worker claims it when the rate of its policy allows")
                report.again[row.id] = row.run_at if row.run_at > now else now + WITHOUT_SLOT_PAUSE
        else:
            begin = None
            if row.run_at > now:  # in the order of `run_at`: it joins the first row of a work, or begins the next work
                begin = begins.get((policy.label, row.queue), row.run_at)
                begin = begins[policy.label, row.queue] = begin if row.run_at <= begin + TOGETHER_WITHIN else row.run_at
                early[row.id] = row.run_at
            due[policy.label, row.queue, begin, ANY_TIME].append(row)
    checkpoint("planned")
    works = [work for (label, *_, slot), rows in due.items() for work in works_of(label, rows, deliveries, slot)]
    return works, report.report(early)


def _deferred(row: _Row, policy: TimeoutPolicy[Any] | None) -> _Row:
    """Return `row`, with a later `run_at` while it may run as a suspect together with others of its value.

    If another worker tried it, its lock would keep the others from running. If their process dies, it does not end the
    suspicion.
    """
    if policy is None or policy.batch_by is None or row.suspected_at is None:
        return row
    return row._replace(run_at=max(row.run_at, row.suspected_at + get_settings().lease))


def rows_of(ids: Iterable[int], using: str) -> list[_Row]:
    """Read the rows `ids`; those without a row are left out."""
    possible = [timeout_id for timeout_id in ids if 0 < timeout_id <= MAX_ID]
    wanted, count = key_list(Timeout, possible, using)
    found = [_Row(*row) for row in _read.rows(using, count, id=wanted)] if possible else []
    if found:
        firing_state.note_database(found[0].database_now)
        check_name(found[0].installation)
    return found


@compiled
def _read(using: str, count: int) -> QuerySet[Timeout, Any]:
    rows = Timeout.objects.using(using).filter(has_key(Timeout, "id", count, using))
    name = Subquery(Installation.objects.using(using).values("name")[:1])
    rows = rows.annotate(database_now=DatabaseNow(), installation=name)
    return rows.order_by("run_at", "id").values_list(*_Row._fields)


def works_of(label: str, rows: Sequence[_Row], deliveries: Mapping[int, int], slot: Slot = ANY_TIME) -> Iterator[Work]:
    """Divide the due `rows` of one policy, queue and slot: each is alone, unless the policy has `batch` or `together`.

    Suspects are always alone. No work has two timeouts of one object: the first would change the object of the second.
    With `batch_by` none has two values, and a timeout without a value is alone. There suspects of one value share a
    work, which is alone in its process, until that process has died, too.
    """
    policy = registry.get(label)
    assert policy is not None
    size, pieces = policy.transaction_size, defaultdict[tuple[bool, Slot], list[dict[str, int]]](list)
    for row in rows:
        may_kill = deliveries[row.id] > 1 or is_suspect(row)
        its, is_alone = slot, may_kill or size == 1
        if policy.batch_by is not None and not is_suspect(row):
            its, is_alone = slot._replace(share=row.share), size == 1 or not row.share
        if is_alone:
            yield Work(label, (row.id,), (row.object_id,), row.queue, may_kill, *its)
            continue
        for piece in pieces[may_kill, its]:
            if len(piece) < size and row.object_id not in piece:
                break
        else:
            pieces[may_kill, its].append(piece := {})
        piece[row.object_id] = row.id
    for (may_kill, its), found in pieces.items():
        for piece in found:
            yield Work(label, tuple(piece.values()), tuple(piece), rows[0].queue, may_kill, *its)
