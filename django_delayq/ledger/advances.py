"""Let time pass in a staging installation: all waiting timeouts become due earlier, by the same duration.

No process's clock changes, so leases, heartbeats and running handlers are not disturbed. The deadlines come closer
instead: in one statement those of the rows, and, by `since`, those that are computed later from a time before the
advance. What is counted from a time after it, such as an order that was placed since, is not concerned.

An installation that may not do this neither reads nor writes any of it: see `refusal`.
"""

from __future__ import annotations

import time
from datetime import datetime, timedelta
from typing import Any, Final

from django.conf import settings as django_settings
from django.db import Error as DatabaseError
from django.db.models import Case, DateTimeField, ExpressionWrapper, F, Model, QuerySet, Value, When

from django_delayq.conf import get_settings
from django_delayq.ledger.controls import CACHE_SECONDS
from django_delayq.ledger.db_connections import transient_reason
from django_delayq.ledger.installation import check_name, ledger_name
from django_delayq.ledger.locking import is_private, transaction_of
from django_delayq.ledger.outbox import push_due
from django_delayq.ledger.routing import database_of
from django_delayq.ledger.search import MAX_COUNT
from django_delayq.models import ClockAdvance, PolicyControl, Timeout
from django_delayq.sql.now import database_now
from django_delayq.times import clock

MAX_TRIES: Final = 5
"""The statement locks rows in no order, so another transaction may deadlock with it, but not five times."""
State, Stop = Timeout.State, PolicyControl.Stop
_read: dict[str, tuple[float, list[tuple[datetime, timedelta]]]] = {}
"""For each database when the advances were read, by `time.monotonic()`, and what they were.

All processes know an advance after `CACHE_SECONDS`. Without a cache, each deadline that is computed would read them.
"""


def is_allowed() -> bool:
    """Return whether settings allow this installation to advance its clock: not if it is, or may be, production."""
    return not _refusal_of_settings()


def _refusal_of_settings() -> str:
    settings = get_settings()
    if settings.installation is not None and settings.installation == settings.production:
        return f"This is the installation {settings.installation!r}, which DELAYQ['PRODUCTION'] names."
    known = {"INSTALLATION": settings.installation, "PRODUCTION": settings.production}
    missing = [f"DELAYQ[{name!r}]" for name, value in known.items() if value is None]
    if not missing or django_settings.DEBUG:
        return ""
    verb, it = ("is", "it") if len(missing) == 1 else ("are", "them")
    return f"{' and '.join(missing)} {verb} not set: this may be production. Set {it}, or DEBUG, in staging."


def refusal(using: str) -> str:
    """Return why this installation may not advance its clock; empty: it may. Raises the database's errors.

    Raises:
        WrongInstallation: the ledger belongs to another installation, so that no worker of this one would start.
    """
    if words := _refusal_of_settings():
        return words
    check_name(known := ledger_name(using))
    if known is not None and get_settings().installation is None:
        return f"The database belongs to the installation {known!r}, and DELAYQ['INSTALLATION'] is not set here."
    return ""


def total(using: str) -> timedelta:
    """Return by how much the clock is ahead; nothing, without a query, where that is not allowed."""
    return sum((length for _, length in _advances(using)), timedelta(0)) if is_allowed() else timedelta(0)


def since(model: type[Model], start: datetime) -> timedelta:
    """Return by how much the clock has been advanced since `start`, for a deadline of `model` that counts from it.

    If `start` is ahead, such as an appointment, by how much it has been advanced at all: it comes closer, too.
    """
    if not is_allowed():
        return timedelta(0)
    is_ahead = start > clock.now()
    return sum((length for at, length in _advances(database_of(model)) if is_ahead or at > start), timedelta(0))


def passed_at(row: Timeout) -> datetime:
    """Return when the deadline of `row` passed: at the end of a step of an advance, if it was within that step."""
    if row.ready_at is None or not is_allowed():
        return row.due_at
    ends = [at for at, _ in _advances(row._state.db or database_of(Timeout))]
    return row.ready_at if row.ready_at in ends else row.due_at


def _advances(using: str) -> list[tuple[datetime, timedelta]]:
    read_at, found = _read.get(using, (0.0, []))
    if not read_at or time.monotonic() - read_at >= CACHE_SECONDS:
        read_at = time.monotonic()
        found = list(ClockAdvance.objects.using(using).values_list("at", "length"))
        if not is_private(using):  # else only this transaction may see them so
            _read[using] = read_at, found
    return found


def forget() -> None:
    """Read the advances again at the next call, because this process has changed them, or a test begins."""
    _read.clear()


def advance(using: str, by: timedelta, *, actor: str, reason: str) -> int:
    """Make everything that waits due earlier by `by`, and store this; return how many rows became due.

    Inside its own transaction. Rows that are due already stay as they are. Those that become due are due now, so that
    they do not count as late. Stopped clocks stay stopped; the end of a hold by hand, or of a pause, comes closer.
    """
    due = 0
    for number in range(MAX_TRIES):
        try:
            with transaction_of(using):
                due = _advance(using, by, actor, reason)
            break
        except DatabaseError as error:
            if number == MAX_TRIES - 1 or transient_reason(error, using) is None:
                raise
    forget()
    return due


def _advance(using: str, by: timedelta, actor: str, reason: str) -> int:
    now = database_now(using)
    ClockAdvance(at=now, length=by, by=actor, reason=reason).save(using=using)
    rows = Timeout.objects.using(using).waiting().filter(created_at__lte=now)
    pending = rows.filter(state=State.PENDING, run_at__gt=now)
    due = pending.filter(run_at__lte=now + by).count()
    moved = {name: _earlier(name, by) for name in ("due_at", "first_due_at", "computed_due_at", "asked_due_at")}
    # In this order: MySQL and MariaDB compare with what the statement has written already.
    at_last = {"ready_at": _until(now, by, "run_at", "ready_at"), "run_at": _until(now, by, "run_at", "run_at")}
    pending.update(**at_last, **moved)
    rows.filter(state=State.HELD, keeps_deadline=True).update(**moved)
    _shorten(rows.filter(state=State.HELD), "held_until", now, by)
    _shorten(PolicyControl.objects.using(using).filter(stop=Stop.PAUSED), "until", now, by)
    soon = Timeout.objects.using(using).pending().filter(run_at__lte=now + 2 * get_settings().sweep_interval)
    found = soon.order_by("run_at", "id").values_list("queue", "policy", "id", "run_at")
    push_due(list(found[:MAX_COUNT]), using, earlier_only=True)  # sweeps add the others within a minute
    return due


def _shorten(rows: QuerySet[Any], column: str, now: datetime, by: timedelta) -> None:
    rows.filter(**{f"{column}__gt": now}).update(**{column: _until(now, by, column, column)})


def _until(now: datetime, by: timedelta, decides: str, column: str) -> Case:
    """Return `now` for rows whose column `decides` would be passed, otherwise `column` earlier by `by`."""
    passed = When(**{f"{decides}__lte": now + by}, then=Value(now, DateTimeField()))
    return Case(passed, default=_earlier(column, by), output_field=DateTimeField())


def _earlier(column: str, by: timedelta) -> Any:
    return ExpressionWrapper(F(column) - by, output_field=DateTimeField())


def next_event(using: str) -> datetime | None:
    """Return when the next timeout is due, or the next hold by hand or pause ends; None: nothing is ahead."""
    now = database_now(using)
    rows = Timeout.objects.using(using)
    pending = rows.pending().filter(run_at__gt=now).order_by("run_at", "id").values_list("run_at", flat=True)
    held = rows.held().filter(held_until__gt=now).order_by("held_until", "id").values_list("held_until", flat=True)
    pauses = PolicyControl.objects.using(using).filter(stop=Stop.PAUSED, until__gt=now)
    found: list[Any] = [*pending[:1], *held[:1], *pauses.order_by("until").values_list("until", flat=True)[:1]]
    return min(found, default=None)


def reset(using: str) -> None:
    """Forget all advances. Deadlines that have moved stay where they are."""
    ClockAdvance.objects.using(using).all().delete()
    forget()
