"""Arm, move and cancel what the declared policies want for rows as they are now in the database.

Level-triggered: not what a save changed counts, but what holds. So a save that was missed is made good by the
next one, or by `sync`.

| the row says | the ledger has | we do |
| --- | --- | --- |
| `when` holds, `since` is set | nothing, and the round is open and not too old | arm |
| `when` holds, `since` is set | one pending, from the same `since` | nothing: its deadline may be set by hand |
| `when` holds, `since` is set | one pending, from another `since` | move it; cancel it if the new round is closed |
| `when` does not hold, or `since` is empty | one pending | cancel it; the round stays open |
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from django.contrib.contenttypes.models import ContentType
from django.db import connections

from django_delayq import clock
from django_delayq.arming.row_state import CLOSING, Observed, observe_many, observe_one
from django_delayq.key_types import object_id_of
from django_delayq.ledger import writing
from django_delayq.ledger.announcing import announce, push, withdraw
from django_delayq.ledger.locking import as_it_is, lock_objects, transaction_of
from django_delayq.ledger.subjects import subject_at
from django_delayq.models import Timeout
from django_delayq.signals import timeout_cancelled, timeout_rescheduled, timeout_scheduled

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from datetime import datetime, timedelta

    from django.db.models import Model

    from django_delayq.policies import TimeoutPolicy

Cause = Timeout.Cause


@dataclass(slots=True)
class Plan:
    """What is to be written for some rows of one model."""

    insert: list[Timeout] = field(default_factory=list)
    move: list[tuple[int, datetime, datetime]] = field(default_factory=list)
    cancel: list[tuple[int, Timeout.Cause, str]] = field(default_factory=list)
    """Id, cause, and the queue in whose entries Redis may have it."""
    too_old: list[Observed] = field(default_factory=list)

    @property
    def size(self) -> int:
        """How many rows would change."""
        return len(self.insert) + len(self.move) + len(self.cancel)


def arm_one(model: type[Model], policies: Sequence[TimeoutPolicy[Any]], pk: Any, using: str, oldest: timedelta) -> None:
    """The ledger has for the row `pk` what `policies` want; the row stays locked until the transaction ends.

    Joins the caller's transaction or opens one. `oldest`: a round overdue by this or more is not armed.
    """
    connection = connections[using]
    # Whoever saved outside a transaction does not hold the row. If the look waits for it, it then shows the row as it
    # is now, but the ledger as it was before the waiting: a round closed meanwhile would be armed again. PostgreSQL
    # always does that; MySQL and MariaDB do since they read the delay in force, which they do before they wait.
    may_be_stale = connection.features.has_select_for_update and not connection.in_atomic_block
    with transaction_of(using):
        plan = decide(observe_one(model, policies, pk, using), using, oldest)
        if may_be_stale and plan.size:
            plan = decide(observe_one(model, policies, pk, using), using, oldest)
        carry_out(plan, using, signals=True)


def arm_many(
    model: type[Model],
    policies: Sequence[TimeoutPolicy[Any]],
    pks: Collection[Any],
    using: str,
    oldest: timedelta | None,
    *,
    dry_run: bool = False,
) -> Plan:
    """The same for several rows in one transaction, without signals; returns what was written.

    `dry_run`: nothing is written, only told. `oldest=None`: however old.
    """
    with transaction_of(using):
        if not dry_run:
            lock_objects(model, pks, using)
        plan = decide(observe_many(model, policies, pks, using), using, oldest)
        if not dry_run:
            carry_out(plan, using, signals=False)
    return plan


def decide(seen: Sequence[Observed], using: str, oldest: timedelta | None) -> Plan:
    """What the table above says for each observation."""
    plan, objects = Plan(), _Objects(using)
    for one in seen:
        if one.holds and callable(one.policy.since):
            one = replace(one, since_at=one.policy.since_of(objects.of(one)))  # noqa: PLW2901
        if not one.holds:
            if one.pending_id is not None:
                plan.cancel.append((one.pending_id, Cause.CONDITION, one.policy.queue))
        elif one.pending_id is not None:
            if one.pending_since != one.since_at:
                _decide_move(one, one.pending_id, plan, objects, oldest)
        elif one.since_at is not None and not _is_closed(one, using):
            _decide_arm(one, plan, objects, oldest)
    return plan


def _decide_arm(one: Observed, plan: Plan, objects: _Objects, oldest: timedelta | None) -> None:
    due_at = one.policy.due_of(objects.of(one) if callable(one.policy.after) else None, one.since_at, one.after)
    if due_at is None:
        return
    if _is_too_old(due_at, oldest):
        plan.too_old.append(one)
        return
    subject = subject_at(one.policy, one.pk, "", objects.using)
    plan.insert.append(writing.new_row(subject, due_at, one.since_at))


def _decide_move(one: Observed, pending_id: int, plan: Plan, objects: _Objects, oldest: timedelta | None) -> None:
    due_at = None
    if one.since_at is not None:
        due_at = one.policy.due_of(objects.of(one) if callable(one.policy.after) else None, one.since_at, one.after)
    if one.since_at is None or due_at is None:
        plan.cancel.append((pending_id, Cause.CONDITION, one.policy.queue))
    elif _is_closed(one, objects.using):
        plan.cancel.append((pending_id, Cause.SUPERSEDED, one.policy.queue))
    elif _is_too_old(due_at, oldest):
        plan.cancel.append((pending_id, Cause.LATE, one.policy.queue))
    else:
        plan.move.append((pending_id, one.since_at, due_at))


def carry_out(plan: Plan, using: str, *, signals: bool) -> None:
    """`plan` is written; Redis and, with `signals`, their receivers learn of it on commit."""
    if plan.insert:
        writing.insert(plan.insert, using)
        push(plan.insert, using, earlier_only=True)
    moved = _move(plan, using) if plan.move else []
    cancelled = _cancel(plan, using, signals=signals) if plan.cancel else []
    if signals:
        told = ((timeout_scheduled, plan.insert), (timeout_rescheduled, moved), (timeout_cancelled, cancelled))
        for signal, rows in told:
            for row in rows:
                announce(signal, row, using)


def _move(plan: Plan, using: str) -> list[Timeout]:
    targets = {row_id: (since_at, due_at) for row_id, since_at, due_at in plan.move}
    rows = writing.locked(Timeout.objects.using(using).filter(pk__in=list(targets), slot_taken=1), using)
    for row in rows:
        writing.restart(row, *targets[row.pk])
    push(rows, using)
    return rows


def _cancel(plan: Plan, using: str, *, signals: bool) -> list[Timeout]:
    causes = {row_id: cause for row_id, cause, _ in plan.cancel}
    for cause in sorted(set(causes.values())):
        ids = [row_id for row_id, its_cause in causes.items() if its_cause == cause]
        for chunk in writing.chunks(ids):
            if len(chunk) > 1:  # in the order of their slots, like everybody
                writing.locked(Timeout.objects.using(using).filter(pk__in=chunk, slot_taken=1), using)
            writing.cancel(chunk, using, Cause(cause))
    # A row that waits in another queue than its policy names now keeps its entry, which costs a worker a look.
    withdraw([(queue, row_id) for row_id, _, queue in plan.cancel], using)
    if not (signals and timeout_cancelled.has_listeners()):
        return []
    return list(Timeout.objects.using(using).filter(pk__in=list(causes), state=Timeout.State.CANCELLED))


def cancel_of_deleted(model: type[Model], pks: Collection[Any], using: str) -> int:
    """Whatever is pending for the rows `pks` of `model` that are gone is cancelled; returns how many.

    Of every policy and key. No signals, as there may be very many.
    """
    content_type = ContentType.objects.db_manager(using).get_for_model(model)
    cancelled = 0
    with transaction_of(using):
        for chunk in writing.chunks(sorted(pks, key=str)):
            left = model._base_manager.using(using).filter(pk__in=chunk).values_list("pk", flat=True)
            gone = {object_id_of(model, pk) for pk in chunk} - {object_id_of(model, pk) for pk in left}
            rows = Timeout.objects.using(using).filter(content_type=content_type.pk, object_id__in=gone, slot_taken=1)
            found = writing.locked(rows.only("id", "queue", "slot"), using)
            cancelled += writing.cancel([row.pk for row in found], using, Cause.GONE) if found else 0
            withdraw([(row.queue, row.pk) for row in found], using)
    return cancelled


def _is_closed(one: Observed, using: str) -> bool:
    if one.closed is not None:
        return one.closed
    subject = subject_at(one.policy, one.pk, "", using)
    return bool(as_it_is(subject.rounds().filter(CLOSING, since_at=one.since_at), using).values_list("pk")[:1])


def _is_too_old(due_at: datetime, oldest: timedelta | None) -> bool:
    return oldest is not None and clock.now() - due_at >= oldest


class _Objects:
    """The observed rows as objects, for policies whose `since` or `after` is a callable; read only if needed."""

    def __init__(self, using: str) -> None:
        self.using = using
        self._read: dict[tuple[type[Model], Any], Any] = {}

    def of(self, one: Observed) -> Any:
        key = (one.policy.model, one.pk)
        if key not in self._read:
            rows = one.policy.model._base_manager.using(self.using).filter(pk=one.pk)
            self._read[key] = as_it_is(rows, self.using).get()
        return self._read[key]
