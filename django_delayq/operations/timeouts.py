"""Cancel, fire, postpone and retry timeouts, also if their object or policy no longer exists.

`run_action` works page by page: lock the objects, lock the rows, refuse or change each row, report.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from typing import Any, Final, NamedTuple, TypeAlias, Unpack

from django.db.models import QuerySet, TextChoices
from django.dispatch import Signal
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from django_delayq import clock, signals
from django_delayq.delays import DelayArgs, check_length, counted, parse_delay, shifted
from django_delayq.exceptions import InvalidDelay
from django_delayq.ledger import writing
from django_delayq.ledger.controls import Stopped, stop_cache
from django_delayq.ledger.history import clean, record, record_death
from django_delayq.ledger.locking import as_it_is
from django_delayq.ledger.outbox import announce
from django_delayq.ledger.paging import Page, each_page
from django_delayq.models import Timeout, slot_of
from django_delayq.policies import registry

State = Timeout.State
logger = logging.getLogger("django_delayq.steering")

MAX_IDS: Final = 1_000
"""A result lists at most this many changed and as many refused rows. It counts all of them."""
MAX_ACTOR_LENGTH: Final = 150


class Refusal(TextChoices):
    """The reason why an operation leaves a row unchanged."""

    MISSING = "missing", _("it no longer exists")
    SETTLED = "settled", _("it is already settled")
    FIRING = "firing", _("it is firing now")
    DEAD = "dead", _("it is dead: retry it")
    NOT_DEAD = "not_dead", _("it is not dead")
    OBJECT_GONE = "object_gone", _("its object is gone")
    NOT_SETTLED = "not_settled", _("it is not settled yet")
    SLOT_TAKEN = "slot_taken", _("a newer round is pending")
    POLICY_UNKNOWN = "policy_unknown", _("its policy is no longer declared")
    POLICY_STOPPED = "policy_stopped", _("its policy is stopped: resume it first")
    NOT_LATER = "not_later", _("the new time is not later than its deadline")
    TOO_FAR = "too_far", _("the new deadline is too far in the future")


class Refused(NamedTuple):
    """A row that an operation left unchanged."""

    id: int
    why: Refusal


@dataclass(frozen=True, slots=True)
class Result:
    """The result of an operation on timeouts; with `dry_run`, the result that it would have.

    Attributes:
        verb: `cancel`, `fire_now`, `postpone`, `retry`, `refire`, `retire` or `adopt`.
        changed: the number of changed rows.
        refused: the number of unchanged rows by reason.
        ids: the first `MAX_IDS` changed rows. Each page that `progress` receives lists all of its rows.
        refusals: the first `MAX_IDS` unchanged rows.
        dry_run: nothing was written.
    """

    verb: str
    changed: int = 0
    refused: Mapping[Refusal, int] = field(default_factory=dict)
    ids: tuple[int, ...] = ()
    refusals: tuple[Refused, ...] = ()
    dry_run: bool = False

    @property
    def unchanged(self) -> int:
        return sum(self.refused.values())

    def __add__(self, other: Result) -> Result:
        return Result(
            self.verb,
            self.changed + other.changed,
            dict(Counter(self.refused) + Counter(other.refused)),
            (self.ids + other.ids)[:MAX_IDS],
            (self.refusals + other.refusals)[:MAX_IDS],
            self.dry_run,
        )


Target: TypeAlias = Timeout | QuerySet[Timeout] | Iterable[Timeout]
Progress: TypeAlias = Callable[[Result], object]


@dataclass
class Context:
    """What an operation knows about the page whose rows it changes."""

    page: Page
    by: str
    reason: str
    now: datetime
    """The time of the database."""

    @property
    def using(self) -> str:
        return self.page.using

    @cached_property
    def stopped(self) -> Stopped:
        return stop_cache.read(self.using)

    @cached_property
    def taken(self) -> set[str]:
        """Return the slots of the page's rows in which a round is pending, or will be."""
        slots = {slot for row in self.page.rows for slot in slots_of_row(row)}
        rows = Timeout.objects.using(self.using).filter(slot__in=slots, slot_taken=1)
        return set(as_it_is(rows, self.using).values_list("slot", flat=True))

    @property
    def event(self) -> dict[str, Any]:
        return {"at": self.now, "by": self.by, "reason": self.reason}


class Action(NamedTuple):
    """What an operation does with the rows of a page."""

    name: str
    signal: Signal
    """Sent for a single timeout, with the row, or with the one that `write` returns."""
    refuse: Callable[[Timeout, Context], Refusal | None]
    """Return why a row must stay unchanged, or None."""
    write: Callable[[list[Timeout], list[Timeout], Context], Sequence[Timeout] | None]
    """Change the first rows in ledger and Redis. The second ones were refused. Return new rows, if there are any."""


def cancel(
    target: Target, *, by: str, reason: str = "", dry_run: bool = False, progress: Progress | None = None
) -> Result:
    """Cancel pending and dead timeouts; those that are firing get no further attempt.

    Args:
        target: a `Timeout`, or a queryset or iterable of them. Each page of 500 is one transaction, or part of the
            caller's. TypeError: it is something else.
        by, reason: see `operations`.
        dry_run: count, and write nothing.
        progress: called with the result of each page, after its commit.
    """

    def refuse(row: Timeout, context: Context) -> Refusal | None:
        return None if row.state == State.DEAD else refuse_unless_pending(row, context)

    def write(rows: list[Timeout], refused: list[Timeout], context: Context) -> None:
        for row in rows:
            record_death(row, context.now)
            record(row, "cancel_requested", **context.event)
        for row in refused:
            if row.state == State.FIRING:
                writing.forbid_attempts(row, context.reason, by=context.by)
        writing.cancel_rows(rows, context.using, context.reason, context.now)

    action = Action("cancel", signals.timeout_cancelled, refuse, write)
    return run_action(target, action, by=by, reason=reason, dry_run=dry_run, progress=progress)


def fire_now(
    target: Target, *, by: str, reason: str = "", dry_run: bool = False, progress: Progress | None = None
) -> Result:
    """Make pending timeouts due now, so that a worker fires them, if `when` holds.

    A future deadline becomes now; a past one stays. Nothing fires in this process. Timeouts of a policy that is paused
    or on hold are refused. Arguments and errors are those of `cancel`.
    """

    def refuse(row: Timeout, context: Context) -> Refusal | None:
        policy = registry.get(row.policy)
        if why := refuse_unless_pending(row, context):
            return why
        if policy is None:
            return Refusal.POLICY_UNKNOWN
        return Refusal.POLICY_STOPPED if policy.label in context.stopped else None

    def write(rows: list[Timeout], refused: list[Timeout], context: Context) -> None:
        moves = [(row, min(row.due_at, context.now), context.now) for row in rows]
        writing.move_rows(moves, context.using, what="fire_requested", to=context.now, **context.event)

    action = Action("fire_now", signals.timeout_rescheduled, refuse, write)
    return run_action(target, action, by=by, reason=reason, dry_run=dry_run, progress=progress)


def postpone(
    target: Target,
    *,
    by: str,
    reason: str = "",
    dry_run: bool = False,
    progress: Progress | None = None,
    **delay: Unpack[DelayArgs],
) -> Result:
    """Give pending timeouts a later deadline: later by units or `after=`, or `at=` a datetime.

    A duration counts from the deadline, or from now if that has passed. `max_extensions` does not apply and is not
    used up. A retry or snooze that is due even later keeps its time. A deadline never becomes earlier: see `fire_now`.
    The other arguments and errors are those of `cancel`.

    Raises:
        InvalidDelay: no delay, a wrong one, or a datetime in the past.
    """
    given = parse_delay(dict(delay))
    if given is None:
        raise InvalidDelay(gettext("The new deadline is missing: give units, after= or at=."))
    if given.at is not None and given.at <= clock.now():
        words = gettext("{moment} is in the past. To fire it now, use fire_now.")
        raise InvalidDelay(words.format(moment=given.at))

    def postponed(row: Timeout, now: datetime) -> datetime:
        return given.at or shifted(max(row.due_at, now), check_length(given.after, "after"))

    def refuse(row: Timeout, context: Context) -> Refusal | None:
        if why := refuse_unless_pending(row, context):
            return why
        try:
            return None if postponed(row, context.now) > row.due_at else Refusal.NOT_LATER
        except InvalidDelay:
            return Refusal.TOO_FAR

    def write(rows: list[Timeout], refused: list[Timeout], context: Context) -> None:
        deadlines = [(row, postponed(row, context.now)) for row in rows]
        moves = [(row, due_at, writing.run_at_of(row, due_at)) for row, due_at in deadlines]
        writing.move_rows(moves, context.using, what="postponed", **context.event)

    action = Action("postpone", signals.timeout_rescheduled, refuse, write)
    return run_action(target, action, by=by, reason=reason, dry_run=dry_run, progress=progress)


def retry(
    target: Target, *, by: str, reason: str = "", dry_run: bool = False, progress: Progress | None = None
) -> Result:
    """Make dead timeouts pending and due now, with all their attempts; a worker fires them.

    The round stays the same, with its deadline and `idempotency_key`, so that an earlier attempt's effect outside the
    database is not repeated. Refused if the object is gone, the policy is no longer declared, or a newer round is
    pending. Arguments and errors are those of `cancel`.
    """

    def refuse(row: Timeout, context: Context) -> Refusal | None:
        return Refusal.NOT_DEAD if row.state != State.DEAD else refuse_round(row, context)

    def write(rows: list[Timeout], refused: list[Timeout], context: Context) -> None:
        for row in rows:
            record_death(row, context.now)
            record(row, "retried", to=context.now, **context.event)
        writing.revive(rows, context.using, context.now)

    action = Action("retry", signals.timeout_scheduled, refuse, write)
    return run_action(target, action, by=by, reason=reason, dry_run=dry_run, progress=progress)


def slots_of_row(row: Timeout) -> set[str]:
    """Return the slots of `row`, under the present and all former labels of its policy."""
    policy = registry.get(row.policy)
    labels = policy.labels if policy else ()
    return {row.slot, *(slot_of(label, row.content_type_id, row.object_id, row.key) for label in labels)}


def refuse_round(row: Timeout, context: Context) -> Refusal | None:
    """Return why no round can begin for the object of `row`, or None: then the slot is taken from now on."""
    if registry.get(row.policy) is None:
        return Refusal.POLICY_UNKNOWN
    if context.page.object_of(row) is None:
        return Refusal.OBJECT_GONE
    slots = slots_of_row(row)
    if slots & context.taken:
        return Refusal.SLOT_TAKEN
    context.taken.update(slots)
    return None


def refuse_unless_pending(row: Timeout, context: Context) -> Refusal | None:
    """Return why `row` is not pending, or None."""
    if row.state == State.PENDING:
        return None
    return {State.FIRING: Refusal.FIRING, State.DEAD: Refusal.DEAD}.get(State(row.state), Refusal.SETTLED)


def run_action(
    target: Target, action: Action, *, by: str, reason: str, dry_run: bool = False, progress: Progress | None = None
) -> Result:
    """Change each row of `target` that is not refused, and return what changed and what did not.

    Each page of 500 rows is one transaction, or part of the caller's transaction. Outside a transaction it may be
    interrupted between two pages and repeated. A single `Timeout` sends the signal; many send none.
    """
    by = checked_actor(by)
    if isinstance(target, Timeout) and target.pk is None:
        raise ValueError("This Timeout is not a row of the ledger.")

    def change(page: Page) -> Result:
        context = Context(page, by, reason, clock.database_now(page.using))
        missing = set(page.ids) - {row.pk for row in page.rows}
        refusals = [Refused(row_id, Refusal.MISSING) for row_id in sorted(missing)]
        accepted, refused = [], []
        for row in sorted(page.rows, key=lambda row: -row.pk):  # the newest round first: only one can be retried
            if why := action.refuse(row, context):
                refused.append(row)
                refusals.append(Refused(row.pk, why))
            else:
                accepted.append(row)
        accepted.sort(key=lambda row: (row.slot, row.pk))
        if not dry_run:
            new = action.write(accepted, refused, context)
            for row in (new or accepted) if isinstance(target, Timeout) else ():
                announce(action.signal, row, page.using)
        counts = dict(Counter(why for _, why in refusals))
        return Result(action.name, len(accepted), counts, tuple(row.pk for row in accepted), tuple(refusals), dry_run)

    total = Result(action.name, dry_run=dry_run)
    for result in each_page(target, change, pending_only=False, by_id=True, dry_run=dry_run):
        total += result
        if progress is not None:
            progress(result)
    if not dry_run:
        logger.info(
            "%s by %s: %s changed, %d did not",
            *(action.name, by, counted(total.changed, "timeout"), total.unchanged),
            extra={"event": "timeouts_steered", "verb": action.name, "by": by, "reason": reason},
        )
    return total


def checked_actor(by: str) -> str:
    """Return `by` as it is stored, such as `admin:alice`. Raises ValueError if it is empty or not a string."""
    if not isinstance(by, str) or not by.strip():
        raise ValueError(f"by= names who does it, such as 'admin:alice', and must not be {by!r}.")
    return clean(by.strip())[:MAX_ACTOR_LENGTH]
