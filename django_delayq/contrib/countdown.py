"""Countdowns of deadlines: what template tags and REST display."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from django.db.models import F, Model, QuerySet, Subquery
from django.db.models.functions import Coalesce

from django_delayq.ledger.relations import TimeoutRelation
from django_delayq.ledger.subjects import NEWEST_FIRST, Subject, current_round, subject_of
from django_delayq.models import WAITING, Timeout, TimeoutQuerySet
from django_delayq.scheduling.queries import get_progress
from django_delayq.sql.now import DatabaseNow
from django_delayq.sql.statements import chunks, compiled, param
from django_delayq.times import clock

if TYPE_CHECKING:
    from collections.abc import Sequence

    from django_delayq.arming.holding import Progress
    from django_delayq.policy.policies import M, TimeoutPolicy


@dataclass(frozen=True, slots=True)
class Countdown:
    """A deadline as it is displayed, at one point in time. True in a condition while it is pending, or held.

    It contains the server's time, so that a display that counts down does not depend on the user's clock.
    """

    due_at: datetime | None
    """The deadline of the newest round; None: there never was one."""
    state: str
    """The state of the newest round, one of `Timeout.State`; "": there never was one."""
    now: datetime
    """The server's time when this was read: the database's, or this process's if no query was needed."""
    row: Timeout | None = None
    """The newest round."""

    def __bool__(self) -> bool:
        return self.due_at is not None and self.state in WAITING

    @property
    def timeout_id(self) -> int | None:
        """Return the id of the newest round."""
        return None if self.row is None else self.row.pk

    @property
    def progress(self) -> Progress | None:
        """Return how much of its own time it has used and has left, by queries of its own: see `get_progress`."""
        return None if self.row is None else get_progress(self.row)

    @property
    def is_stopped(self) -> bool:
        """Return whether its clock is stopped, so that `seconds_left` stays as it is."""
        return self.row is not None and self.row.has_stopped_clock

    @property
    def is_paused(self) -> bool:
        """Return whether it does not fire until it is resumed, although its time runs out."""
        return self.row is not None and self.row.is_paused

    @property
    def seconds_left(self) -> int | None:
        """Return the whole seconds until the deadline, rounded up, never below zero; None: nothing is pending.

        If its clock is stopped: how many are left when it runs again.
        """
        if self.due_at is None or not self:
            return None
        left = self.row.time_left if self.row is not None and self.is_stopped else self.due_at - self.now
        return max(0, math.ceil(left.total_seconds()))

    @property
    def is_due(self) -> bool:
        """Return whether the deadline has passed and the timeout is still pending: a worker is about to fire it."""
        return self.seconds_left == 0 and self.state == Timeout.State.PENDING


def countdown_of(target: M, policy: str | TimeoutPolicy[M] | None = None, key: str = "") -> Countdown:
    """Return the countdown of the pending round, or else of the newest one, of `policy` for `target`.

    One query; none if `target` is a `Timeout`, or if its `TimeoutRelation` was prefetched whole.

    Raises:
        UnknownPolicy: no such policy.
        ValueError: `target` is not saved.
    """
    if isinstance(target, Timeout):
        return Countdown(target.due_at, target.state, vars(target).get("delayq_now", clock.now()), target)
    subject = subject_of(target, policy, key)
    kept = _prefetched(target, subject)
    if kept is None:
        kept = _current.objects(subject.using, slot=subject.slot)
    current = current_round(kept)
    return Countdown(None, "", clock.now()) if current is None else countdown_of(current)


@compiled
def _current(using: str) -> QuerySet[Timeout, Any]:
    """Return the first of the rounds in this slot, as `Subject.rounds` orders them.

    The pending one is found by the unique index. The database sorts all rounds only if nothing is pending.
    """
    rows = Timeout.objects.using(using).filter(slot=param("slot"))
    pending = rows.filter(slot_taken=1).order_by(NEWEST_FIRST)
    newest = rows.order_by(F("slot_taken").desc(nulls_last=True), NEWEST_FIRST)
    first = Coalesce(Subquery(pending.values("id")[:1]), Subquery(newest.values("id")[:1]))
    return _shown(Timeout.objects.using(using).filter(pk=first))


def _shown(rows: TimeoutQuerySet) -> QuerySet[Timeout, Any]:
    """Return `rows` with the time of the database, and without what may be large."""
    return rows.defer("history", "payload").annotate(delayq_now=DatabaseNow())


def pending_countdowns(objects: Sequence[M], policy: str | TimeoutPolicy[M], key: str = "") -> list[Countdown | None]:
    """Return the pending countdown of each of `objects`, in their order; None: nothing is pending.

    One query for up to five hundred objects; none for those whose `TimeoutRelation` was prefetched.

    Raises:
        UnknownPolicy, ValueError: as for `countdown_of`.
    """
    subjects = [subject_of(obj, policy, key) for obj in objects]
    found: dict[tuple[str, str], Countdown] = {}
    asked: dict[str, list[str]] = {}
    for obj, subject in zip(objects, subjects, strict=True):
        kept = _prefetched(obj, subject)
        if kept is None:
            asked.setdefault(subject.using, []).append(subject.slot)
        else:
            found |= {(subject.using, row.slot): countdown_of(row) for row in kept if row.slot_taken}
    for using, slots in asked.items():
        for chunk in chunks(slots):  # by the unique index of slots
            rows = Timeout.objects.using(using).filter(slot__in=chunk, slot_taken=1)
            found |= {(using, row.slot): countdown_of(row) for row in _shown(rows)}
    return [found.get((subject.using, subject.slot)) for subject in subjects]


def _prefetched(obj: Model, subject: Subject) -> list[Timeout] | None:
    """Return the rounds of `subject` among the timeouts that were prefetched with `obj`; None: not all of them were."""
    kept = getattr(obj, "_prefetched_objects_cache", {})
    for field in obj._meta.private_fields if kept else ():
        if isinstance(field, TimeoutRelation) and field.name in kept:
            rows = kept[field.name]
            is_filtered = len(rows.query.where.children) > 1  # by more than the object, as by `Prefetch`
            is_behind = rows.db != subject.using or any(row._state.db != subject.using for row in rows)  # as a replica
            return None if is_filtered or is_behind else [row for row in rows if row.slot == subject.slot]
    return None
