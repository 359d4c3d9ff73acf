"""Stop the clock of a timeout, and let it run again: the rest of its time, and the deadline that follows from it.

A row is held while the condition `hold_when` of its policy holds, or a hold by hand lasts, which only `resume_timeout`
or its end ends. Its `remaining` counts in its policy's own time: open hours for a span with a calendar, else real time.

| event | the rest of its time, or its deadline |
| --- | --- |
| its clock is stopped | from now to the deadline, or to the next attempt if it waits for a retry or a snooze |
| it is armed while `hold_when` holds | all of it: from `since` to the deadline |
| it is paused by hand | its deadline stays where it is, and it fires when it is resumed, if that has passed |
| its deadline had passed, also unnoticed | nothing: it fires when its clock runs |
| its clock runs again | the deadline is now plus the rest |
| `when` stops holding | the cancelled row keeps the rest, with which the round continues when `when` holds again |
| `since` has another value | a new round, without the hold by hand |
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from django.db import Error as DatabaseError

from django_delayq.arming.row_state import is_on_hold, objects_of_policy, on_hold_among
from django_delayq.clock import database_now, within_calendar
from django_delayq.ledger.columns import far
from django_delayq.ledger.controls import Stop, policy_state, read_delay
from django_delayq.ledger.history import message_of
from django_delayq.ledger.holding import hold_rows, note_holds, resume_rows
from django_delayq.ledger.locking import lock_in_slot_order
from django_delayq.ledger.paging import Page, each_page
from django_delayq.ledger.planned import deadline_for, next_at, waits_longer
from django_delayq.ledger.statements import CHUNK, chunks
from django_delayq.ledger.subjects import model_and_pk_of, slots_of
from django_delayq.lengths import elapsed, forward
from django_delayq.models import PolicyChange, Timeout
from django_delayq.policies import registry
from django_delayq.spans import Length

if TYPE_CHECKING:
    from django_delayq.policies import TimeoutPolicy

logger = logging.getLogger("django_delayq.worker")
State = Timeout.State
_NOTHING = timedelta(0)
"""Less than nothing is not left: a deadline that had passed is due when its clock runs. But see `_least`."""
_failed = set[int]()
"""The rows for which this process has logged that their deadline cannot be computed."""


class OwnTime(NamedTuple):
    """The time in which the deadline of one object counts: open hours of the calendar of a span, else real time."""

    length: Length | None
    """None: real time."""
    obj: Any = None

    @classmethod
    def of(
        cls, policy: TimeoutPolicy[Any] | None, in_force: Callable[[], timedelta | None], read: Callable[[], Any]
    ) -> OwnTime:
        """Return the time of `policy`. Reads the delay in force, and the object, only if they matter.

        Real time also if the policy is not declared, or the object does not exist.
        """
        if policy is None or policy.after is None or isinstance(policy.fixed_length, timedelta):
            return cls(None)
        obj = read() if policy.needs_object else None
        return cls(policy.length_in_use(obj, in_force()), obj)

    @classmethod
    def for_data(cls, policy: TimeoutPolicy[Any], data: Any, in_force: timedelta | None) -> OwnTime:
        """Return the time of a deadline that is computed of `data`: values, an object, or None for constants alone."""
        return cls(policy.length_in_use(data, in_force), data)

    @classmethod
    def of_row(cls, row: Timeout, using: str) -> OwnTime:
        """Return the time of a row of the ledger."""
        policy = registry.get(row.policy)
        return cls.of(
            policy,
            lambda: read_delay(cast("TimeoutPolicy[Any]", policy), using),
            lambda: _object_of(row, policy, using),
        )

    def elapsed(self, start: datetime, end: datetime) -> timedelta:
        """Return how much of it lies between two datetimes; negative if `end` is earlier."""
        return end - start if self.length is None else elapsed(self.length, start, end, self.obj)

    def whole(self, since_at: datetime, due_at: datetime, now: datetime) -> timedelta:
        """Return the rest of a round whose clock is stopped from its beginning on: all of it.

        If it counts from a time that is ahead, also the time until then.
        """
        return max(self.elapsed(min(since_at, now), due_at), _NOTHING)

    def forward(self, start: datetime, by: timedelta) -> datetime:
        """Return when so much of it has passed since `start`. Raises InvalidDelay if that is beyond what is supported.

        In real time it is at the latest the last supported datetime.
        """
        if self.length is None or by < _NOTHING:
            return within_calendar(start, by) or far()
        return forward(self.length, start, by, self.obj)


def _object_of(row: Timeout, policy: TimeoutPolicy[Any] | None, using: str) -> Any:
    pk = model_and_pk_of(row, using)[1]
    return None if policy is None or pk is None else objects_of_policy(policy, [pk], using).get(pk)


def counts_from(
    row: Timeout, policy: TimeoutPolicy[Any], in_force: timedelta | None, read: Callable[[], Any]
) -> datetime:
    """Return since when the deadline of `row` counts. One that was scheduled during a hold moves by the rest of it.

    A row that was armed counts from its `since`, also if it was armed later: its object matched again, or the sync
    found it. Such a row may have a moved deadline, which its round had before.
    """
    begun = row.restarted_at or row.created_at
    if row.since_at is None or row.since_at >= begun:
        return begun
    natural = None
    try:
        obj = read() if policy.needs_object else None
        if obj is not None or not policy.needs_object:
            natural = policy.due_of(obj, row.since_at, in_force)
    except DatabaseError:
        raise
    except (Exception, SystemExit):  # noqa: BLE001 - if `after` raises, it does not show that the row was armed
        return begun
    is_armed = natural == row.due_at or (natural == row.first_due_at and row.restarted_at is None)
    return row.since_at if is_armed else begun


def _policy_hold(row: Timeout, now: datetime, using: str) -> tuple[datetime, datetime]:
    """Return begin and end of the time for which a hold of its policy has stopped the clock of `row` until now.

    Its deadline has not moved by that yet. Equal: there is none.
    """
    policy = registry.get(row.policy)
    state = policy_state(policy, using) if policy else None
    if policy is None or state is None or state.stop not in {Stop.HELD, Stop.RELEASING}:
        return now, now
    begin, end = state.stopped_at, min(state.until or now, now)
    if state.stop == Stop.RELEASING:
        moving = PolicyChange.objects.using(using).filter(policy__in=policy.labels, finished_at=None)
        change = moving.filter(held_from__isnull=False, cursor__lt=row.pk, last_id__gte=row.pk).first()
        if change is None:  # it has moved the row already, or the row began later
            return now, now
        begin, end = change.held_from, change.held_until
    since = counts_from(row, policy, read_delay(policy, using), lambda: _object_of(row, policy, using))
    begin = max(begin or now, since)
    return (begin, end) if begin < end else (now, now)


def rest_of(row: Timeout, now: datetime, using: str) -> timedelta:
    """Return the rest of the time of the pending, locked `row`, if its clock is stopped now.

    An attempt that waits for a retry or a snooze counts to that, so that stopping the clock makes no attempt earlier.
    Negative, in real time, if the deadline has passed, but not the grace of the policy.
    """
    end = deadline_for(row, row.run_at) if waits_longer(row) and not row.step else row.due_at
    time, (stopped, ended) = OwnTime.of_row(row, using), _policy_hold(row, now, using)
    rest = time.elapsed(stopped, end) - time.elapsed(ended, now)
    return rest if rest > _NOTHING else _least((end - stopped) - (now - ended), row)


def _least(rest: timedelta, row: Timeout) -> timedelta:
    """Return `rest`, and nothing instead of less than that, unless the policy of `row` has a grace."""
    policy = registry.get(row.policy)
    return rest if policy is not None and policy.grace is not None else max(rest, _NOTHING)


def hold(rows: Iterable[Timeout], using: str, now: datetime, **event: Any) -> list[Timeout]:
    """Stop the clocks of pending, locked rows; return them. `event`: see `hold_rows`."""
    return hold_rows([(row, rest_of(row, now, using)) for row in rows], using, at=now, **event)


def hold_new(rows: Iterable[Timeout], using: str, now: datetime, *, is_computed: bool, **event: Any) -> list[Timeout]:
    """Stop the clocks of locked rows that were scheduled just now; return them.

    `is_computed`: by `since` and `after` of their policy, so that the whole span is left. Otherwise it is the delay of
    the caller, from now on.
    """
    rests = []
    for row in rows:
        since_at = row.since_at if is_computed and row.since_at is not None else now
        rests.append((row, OwnTime.of_row(row, using).whole(since_at, row.due_at, now)))
        row.steps_over = ""  # those that it passed when it was scheduled are ahead when its clock runs
    return hold_rows(rests, using, at=now, **event)


def hold_scheduled(
    policy: TimeoutPolicy[Any],
    pks: Sequence[Any],
    key: str,
    using: str,
    *,
    is_computed: bool,
    kept: Collection[int] = (),
) -> None:
    """Stop the clocks of those rows of the locked objects `pks` for which `hold_when` holds, but not of the ids `kept`.

    They were scheduled just now. `is_computed`: see `hold_new`.
    """
    for chunk in chunks(on_hold_among(policy, pks, using)):
        slots = [slot for _, _, slot in slots_of(policy, chunk, key, using)]
        rows = Timeout.objects.using(using).filter(slot__in=slots, slot_taken=1).exclude(pk__in=kept)
        hold_new(lock_in_slot_order(rows, using), using, database_now(using), is_computed=is_computed, by="hand")


def hold_by_hand(
    rows: Iterable[Timeout],
    using: str,
    now: datetime,
    until: datetime | None,
    *,
    keep_deadline: bool = False,
    **event: Any,
) -> list[Timeout]:
    """Hold pending or held, locked rows by hand, `until` a datetime or until they are resumed; return them.

    `keep_deadline`: pause them, instead of stopping their clocks. A clock that is stopped already stays stopped.
    """
    rests = []
    for row in rows:
        rest = row.remaining or _NOTHING
        if not row.has_stopped_clock:
            _let_run(row)
            longer = row.run_at - next_at(row).at if waits_longer(row) else _NOTHING
            rest = longer if keep_deadline else rest_of(row, now, using)
            row.keeps_deadline = keep_deadline
        rests.append((row, rest))
        row.held_by_hand, row.held_until = True, until
    return hold_rows(rests, using, at=now, **event)


def _let_run(row: Timeout) -> None:
    """Make of a paused row, in memory, one that waits for its next attempt."""
    if row.is_paused:
        row.run_at, row.held_at = next_at(row).at + (row.remaining or _NOTHING), None


def resume(rows: Iterable[Timeout], using: str, now: datetime, **event: Any) -> list[Timeout]:
    """Let the clocks of held, locked rows run from now on; return the rows. `event`: see `hold_rows`."""
    deadlines = [(row, now, _deadline_from(row, now, using)) for row in rows]
    return resume_rows(deadlines, using, at=now, **event)


def deadline_if_resumed(row: Timeout, using: str, now: datetime) -> datetime:
    """Return the deadline of a held row if its clock ran from now on, or since the end of its hold."""
    return _deadline_from(row, min(row.held_until or now, now), using)


def attempt_if_resumed(row: Timeout, using: str, now: datetime) -> datetime:
    """Return when a held row would be tried next if its clock ran from now on, or since the end of its hold."""
    deadline = deadline_if_resumed(row, using, now)
    attempt = next_at(row, deadline).at
    return attempt + (row.remaining or _NOTHING) if row.is_paused else attempt


def _deadline_from(row: Timeout, start: datetime, using: str) -> datetime:
    if row.keeps_deadline:
        return row.due_at
    rest = row.remaining or _NOTHING
    return OwnTime.of_row(row, using).forward(start, rest) if rest else start


def end_hold_by_hand(
    rows: Sequence[Timeout], using: str, now: datetime, **event: Any
) -> tuple[list[Timeout], list[Timeout]]:
    """End the holds by hand of held, locked rows; return those whose clock runs now, and those that stay held.

    These are on hold by the condition of their policy. A hold whose `held_until` has passed ended then: the clock has
    been running since.
    """
    kept = [row for row in rows if is_held_by_condition(row, using)]
    for row in rows:
        ended_at = row.held_until
        if row not in kept and ended_at is not None and ended_at <= now:
            resume_rows([(row, ended_at, _deadline_from(row, ended_at, using))], using, at=now, **event)
        elif row not in kept:
            resume([row], using, now, **event)
        elif row.is_paused:  # from then on its condition has stopped its clock
            begin = min(ended_at or now, now)
            _let_run(row)
            row.remaining, row.held_at, row.keeps_deadline = rest_of(row, begin, using), begin, False
        row.held_by_hand, row.held_until = False, None
    note_holds(kept, using, what="resumed", at=now, **event)
    return [row for row in rows if row not in kept], kept


def is_held_by_condition(row: Timeout, using: str) -> bool:
    """Return whether the condition `hold_when` holds on the object of `row`, which is locked."""
    policy = registry.get(row.policy)
    if policy is None or policy.hold_when is None:
        return False
    pk = model_and_pk_of(row, using)[1]
    return pk is not None and is_on_hold(policy, pk, using)


def end_passed(rows: Iterable[Timeout], using: str) -> list[Timeout]:
    """End the holds by hand of those of the locked `rows` whose end has passed; return those whose clock runs now.

    Before a held row is moved: a new rest would otherwise count from the end of the hold.
    """
    ending = [row for row in rows if row.state == State.HELD and row.held_until is not None]
    if not ending:
        return []
    now = database_now(using)
    return end_hold_by_hand([row for row in ending if row.held_until <= now], using, now)[0]  # type: ignore[operator]


def retarget(row: Timeout, due_at: datetime, using: str, by: Length | None) -> None:
    """Set the rest of the time of `row`, if it is held, before its deadline is moved to `due_at`.

    Args:
        row: locked; it still has its former deadline.
        due_at: the new deadline.
        using: the database.
        by: the duration by which it is moved, which is added to the rest. None: the deadline is given, and the rest is
            the time from now to it.
    """
    if not row.has_stopped_clock:
        return
    time, rest = OwnTime.of_row(row, using), row.remaining or _NOTHING
    if by is None:
        rest = time.elapsed(database_now(using), due_at)
    else:
        rest += by if isinstance(by, timedelta) else time.elapsed(row.due_at, due_at)
    row.remaining = _least(rest, row)


def carried(
    due_at: datetime, rest: timedelta | None, former: datetime, computed: datetime, time: OwnTime
) -> tuple[datetime, timedelta | None]:
    """Return deadline and rest of a round that is computed again: holds have moved it as much as the former one.

    Args:
        due_at, rest: of the round until now; `rest` is None if its clock runs.
        former, computed: the deadline that the policy had computed, and the one that it computes now.
        time: in which it counts.
    """
    if rest is not None:
        rest = max(rest + time.elapsed(former, computed), _NOTHING)
    if due_at <= former:
        return computed, rest
    return time.forward(computed, time.elapsed(former, due_at)), rest


class Plan(NamedTuple):
    """A waiting round as its policy computes it again."""

    due_at: datetime
    rest: timedelta | None
    """The rest of its time; None: it is pending."""
    computed: datetime
    """The deadline before holds moved it."""
    terms: str

    def is_of(self, row: Timeout) -> bool:
        """Return whether `row` is so already."""
        return self == (row.due_at, row.remaining, row.computed_due_at, row.terms)


def plan_of(row: Timeout, computed: datetime, terms: str, time: OwnTime) -> Plan:
    """Return `row`, pending or held, with the deadline that its policy computes for it now.

    By how much holds and stopped clocks had moved a computed deadline, the new one is moved, too. Of a deadline that
    was set by hand that is unknown: the new one is as computed.

    Args:
        row: pending or held.
        computed, terms: the deadline, and with what values it is computed.
        time: in which it counts.
    """
    former = (row.computed_due_at or row.first_due_at) if row.is_computed else row.due_at
    due_at, rest = carried(row.due_at, row.remaining if row.has_stopped_clock else None, former, computed, time)
    return Plan(due_at, rest if row.has_stopped_clock else row.remaining, computed, terms)


FOLLOWED = ("first_due_at",)
"""The column that `follow` writes beside those of every move."""


def follow(row: Timeout, plan: Plan) -> None:
    """Set what `row` has of `plan` beside the deadline, before it is moved to that."""
    if not row.is_computed:  # the deadline counts from `since` again, and no caller has asked for another one
        row.restarted_at, row.is_requested, row.is_due_by_request = None, False, False
    row.remaining, row.terms = plan.rest, plan.terms
    row.computed_due_at = plan.computed
    # Never earlier: a row is pruned after its first deadline. Else it would be armed again if the value changed back.
    row.first_due_at = max(row.first_due_at, plan.computed)


def end_holds_by_hand(using: str) -> int:
    """Resume the rows whose hold by hand has reached its end; return how many. Raises the database's errors.

    Any worker may call it: each page is a transaction, which locks the objects, and then the rows. The deadlines count
    from the end of the hold, however late the worker is. A row whose function `after` raises stays held, and is logged.
    """
    now, ended = database_now(using), 0
    due = Timeout.objects.using(using).filter(held_until__lte=now).order_by("held_until", "id")

    def change(page: Page) -> int:
        done = 0
        for row in page.rows:
            try:
                done += len(end_passed([row], using))
            except DatabaseError:
                raise
            except Exception as error:  # noqa: BLE001 - `after` of the application
                logger.log(
                    logging.DEBUG if row.pk in _failed else logging.ERROR,
                    "The hold of timeout %s has ended, but its deadline cannot be computed: %s",
                    *(row.pk, message_of(error, row)),
                    extra={"event": "resume_failed", "policy": row.policy},
                )
                _failed.add(row.pk)
        return done

    while ids := list(due.filter(settled_at=None).values_list("pk", flat=True)[:CHUNK]):
        done = sum(each_page(due.filter(pk__in=ids), change))
        ended += done
        if done < len(ids):  # the rest is held by its condition, or cannot be computed
            break
    return ended
