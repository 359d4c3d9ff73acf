"""A deadline as it is shown to people: the moment, how things stand, and what time it is by the server's clock.

Without the last, whoever shows it would count by a clock of their own, which may be an hour off.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from django_delayq import clock
from django_delayq.ledger.subjects import subject_of
from django_delayq.models import Timeout
from django_delayq.relations import TimeoutRelation

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from datetime import datetime

    from django.db.models import Model

    from django_delayq.ledger.subjects import Subject
    from django_delayq.policies import M, TimeoutPolicy

# Older SQLite takes no more than 999 parameters in one statement.
MOST_SLOTS = 500
State = Timeout.State


@dataclass(frozen=True, slots=True)
class Countdown:
    """One deadline at one moment. True in a condition while it is pending."""

    due_at: datetime | None
    """The deadline of the newest round; None: there never was one."""
    state: str
    """The state of the newest round, one of `Timeout.State`; "": there never was one."""
    now: datetime
    """The server's clock when this was read: the database's, or this process's where no query was needed."""
    timeout_id: int | None = None

    def __bool__(self) -> bool:
        return self.due_at is not None and self.state == State.PENDING

    @property
    def seconds_left(self) -> float | None:
        """Until the deadline, never below zero; None: nothing is pending."""
        if self.due_at is None or not self:
            return None
        return max(0.0, (self.due_at - self.now).total_seconds())

    @property
    def is_due(self) -> bool:
        """Whether the deadline has passed while it is still pending: a worker is about to fire it."""
        return self.seconds_left == 0.0


def countdown_of(target: M, policy: str | TimeoutPolicy[M] | None = None, key: str = "") -> Countdown:
    """How the newest round of `policy` for `target` stands.

    One query; none if `target` is a `Timeout`, or if its `TimeoutRelation` was prefetched whole.

    Raises:
        UnknownPolicy: no such policy.
        ValueError: `target` is not saved.
    """
    if isinstance(target, Timeout):
        return Countdown(target.due_at, target.state, clock.now(), target.pk)
    subject = subject_of(target, policy, key)
    kept = _prefetched(target, subject)
    if kept is not None:
        newest = max(kept, key=lambda row: row.pk, default=None)
        return _nothing() if newest is None else countdown_of(newest)
    found = subject.rounds().values_list("due_at", "state", clock.DatabaseNow(), "id").first()
    return _nothing() if found is None else Countdown(*found)


def pending_countdowns(objects: Sequence[M], policy: str | TimeoutPolicy[M], key: str = "") -> list[Countdown | None]:
    """What is pending for each of `objects`, in their order; None: nothing.

    One query for up to five hundred objects; none for those whose `TimeoutRelation` was prefetched.

    Raises:
        UnknownPolicy, ValueError: as for `countdown_of`.
    """
    subjects = [subject_of(obj, policy, key) for obj in objects]
    kept = [_prefetched(obj, subject) for obj, subject in zip(objects, subjects, strict=True)]
    asked: dict[str, list[str]] = {}
    for subject, rows in zip(subjects, kept, strict=True):
        if rows is None:
            asked.setdefault(subject.using, []).extend(subject.slots)
    found = {using: _in_slots(slots, using) for using, slots in asked.items()}
    return [
        _first(found[subject.using].get(slot) for slot in subject.slots)
        if rows is None
        else _first(countdown_of(row) for row in rows if row.slot_taken)
        for subject, rows in zip(subjects, kept, strict=True)
    ]


def _in_slots(slots: list[str], using: str) -> dict[str, Countdown]:
    """What is pending in `slots`, by slot: found by the unique index."""
    found = {}
    for begin in range(0, len(slots), MOST_SLOTS):
        rows = Timeout.objects.using(using).filter(slot__in=slots[begin : begin + MOST_SLOTS], slot_taken=1)
        for slot, *values in rows.values_list("slot", "due_at", "state", clock.DatabaseNow(), "id"):
            found[slot] = Countdown(*values)
    return found


def _first(found: Iterable[Countdown | None]) -> Countdown | None:
    return next((one for one in found if one is not None), None)


def _nothing() -> Countdown:
    return Countdown(None, "", clock.now())


def _prefetched(obj: Model, subject: Subject) -> list[Timeout] | None:
    """The rounds of `subject` among the timeouts that were prefetched with `obj`; None: they were not."""
    kept = getattr(obj, "_prefetched_objects_cache", {})
    if not kept or subject.policy is None:
        return None
    place = (subject.content_type_id, subject.object_id)  # of a child's rows: those of this policy's table
    for field in obj._meta.private_fields:
        if isinstance(field, TimeoutRelation) and field.name in kept:
            rows = kept[field.name]
            if rows.db != subject.using or any(row._state.db != subject.using for row in rows):
                return None  # read from a replica, which may be behind
            mine = [row for row in rows if (row.content_type_id, row.object_id) == place]
            return [row for row in mine if row.policy in subject.labels and row.key == subject.key]
    return None
