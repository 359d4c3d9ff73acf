"""What a worker without Redis may do with rows: claim those that are due for a while, and give claims back.

A claim is to the ledger what a lease is to Redis: whoever dies with it leaves a count behind, so that the row is a
suspect when it is claimed again. It decides nothing: a claimed row may be fired by anybody, once.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime, timedelta
from typing import NamedTuple

from django.db import connections
from django.db.models import Case, DateTimeField, F, Q, Value, When

from django_delayq.clock import DatabaseNow, database_now
from django_delayq.ledger.controls import stop_cache
from django_delayq.ledger.locking import for_update, transaction_of
from django_delayq.models import Timeout, TimeoutQuerySet

CHUNK = 200
MOST_CLAIMS = 30_000
"""The column holds no more than 32,767."""


class Claimed(NamedTuple):
    """What `claim` got: how often each id was claimed and never given back, until when, and the database's moment."""

    claims: Mapping[int, int]
    until: datetime
    now: datetime


def claimable(
    using: str, queues: Sequence[str] | None, label: str | None = None, without: Collection[str] = ()
) -> TimeoutQuerySet:
    """Rows that are due and that nobody has claimed, longest due first.

    `queues` None: of all queues; `label` None: of all policies that are not stopped, but for the labels `without`.
    """
    unclaimed = Q(claimed_until__isnull=True) | Q(claimed_until__lte=DatabaseNow())
    rows: TimeoutQuerySet = Timeout.objects.using(using).due().filter(unclaimed).order_by("run_at", "id")
    if label is not None:
        rows = rows.filter(policy=label)
    elif left_out := {*stop_cache.confirmed(using).all_labels(), *without}:
        # What is stopped is not even claimed: there may be more of it than a worker takes in one look.
        rows = rows.exclude(policy__in=sorted(left_out))
    return rows if queues is None else rows.filter(queue__in=queues)


def is_any_claimable(using: str, queues: Sequence[str] | None, without: Collection[str] = ()) -> bool:
    """Whether `claim` would find anything.

    Not `exists()`, which leaves out the order: without it PostgreSQL may read the table from its beginning until it
    finds one, and mostly there is none.
    """
    return bool(claimable(using, queues, without=without).values_list("pk", flat=True)[:1])


def labels_with_claimable(using: str, queues: Sequence[str] | None, labels: Sequence[str]) -> list[str]:
    """Those of `labels` that `claim_each` would find anything for: one look into an index for each, in one query."""
    stopped = set(stop_cache.confirmed(using).all_labels())
    labels = [label for label in labels if label not in stopped]
    if not labels:
        return []
    looks = [claimable(using, queues, label).values("pk")[:1].query.get_compiler(using).as_sql() for label in labels]
    words = ", ".join(f"({sql})" for sql, _ in looks)
    with connections[using].cursor() as cursor:
        cursor.execute(f"SELECT {words}", [value for _, values in looks for value in values])
        [found] = cursor.fetchall()
    return [label for label, id in zip(labels, found, strict=True) if id is not None]


def claim(
    using: str, queues: Sequence[str] | None, limit: int, seconds: timedelta, without: Collection[str] = ()
) -> Claimed:
    """At most `limit` due rows are claimed by the caller for `seconds`; rows that others lock are left out.

    So are those of the labels `without`, which the caller could not fire.
    """
    return _claim([(claimable(using, queues, without=without), limit)], seconds, using)


def claim_each(using: str, queues: Sequence[str] | None, limits: Mapping[str, int], seconds: timedelta) -> Claimed:
    """As `claim`, of each label at most so many, in one transaction."""
    wanted = [(claimable(using, queues, label), limit) for label, limit in limits.items()]
    return _claim(wanted, seconds, using)


def _claim(wanted: Sequence[tuple[TimeoutQuerySet, int]], seconds: timedelta, using: str) -> Claimed:
    found: dict[int, int] = {}
    with transaction_of(using):
        now = database_now(using)
        until = now + seconds
        for rows, limit in wanted:
            found.update(for_update(rows, using, wait=False).values_list("id", "claims")[:limit])
        for ids in _chunks(list(found)):
            unspent = Timeout.objects.using(using).filter(pk__in=ids, claims__lt=MOST_CLAIMS)
            unspent.update(claims=F("claims") + 1, claimed_until=until)
    return Claimed({id: count + 1 for id, count in found.items()}, until, now)


def keep(ids: Collection[int], until: datetime, seconds: timedelta, using: str) -> tuple[datetime, list[int]]:
    """Those of `ids` that are still claimed `until` then are claimed for `seconds` from now; until when, and which.

    Rows that others lock stay as they are: whoever fires one holds it for as long as its handler runs, and nobody
    claims what somebody holds.
    """
    longer, kept = database_now(using) + seconds, []
    for chunk in _chunks(list(ids)):
        with transaction_of(using):
            free = _locked(Timeout.objects.using(using).filter(pk__in=chunk, claimed_until=until), using)
            Timeout.objects.using(using).filter(pk__in=free, claimed_until=until).update(claimed_until=longer)
        kept += free
    return longer, kept


def give_back(again: Mapping[int, datetime], until: datetime, using: str) -> list[int]:
    """Those that are still claimed `until` then are free, each from its moment on, and that claim is not counted.

    A row that waits for that moment anyway is free at once: somebody may move it forward. Returns those that others
    lock, which stay as they are: a row is often put back because somebody holds it.
    """
    held: list[int] = []
    for ids in _chunks(list(again)):
        moments = [When(pk=id, then=Value(again[id], output_field=DateTimeField())) for id in ids]
        free_from = Case(*moments, output_field=DateTimeField())
        claimed = Timeout.objects.using(using).filter(pk__in=ids, claimed_until=until, claims__gt=0)
        with transaction_of(using):
            free = _locked(claimed, using)
            rows = claimed.filter(pk__in=free)
            rows.filter(run_at__gte=free_from).update(claims=F("claims") - 1, claimed_until=None)
            rows.update(claims=F("claims") - 1, claimed_until=free_from)
        if len(free) < len(ids):
            held += claimed.exclude(pk__in=free).values_list("pk", flat=True)
    return held


def free(ids: Sequence[int], using: str) -> int:
    """Those of `ids` that were given back until a later moment may be claimed now; returns how many.

    What somebody has claimed just now stays his, and what somebody locks stays as it is.
    """
    rows = Timeout.objects.using(using).filter(pk__in=ids, slot_taken=1, claims=0, claimed_until__isnull=False)
    with transaction_of(using):
        return int(rows.filter(pk__in=_locked(rows, using)).update(claimed_until=None))


def _locked(rows: TimeoutQuerySet, using: str) -> list[int]:
    """The ids of those of `rows` that nobody else locks, locked.

    An UPDATE of many rows would wait for the others: for a handler that runs, or for a request that waits for one of
    the rows which the UPDATE has already.
    """
    return list(for_update(rows.order_by("pk"), using, wait=False).values_list("pk", flat=True))


def _chunks(ids: Sequence[int]) -> list[Sequence[int]]:
    return [ids[start : start + CHUNK] for start in range(0, len(ids), CHUNK)]
