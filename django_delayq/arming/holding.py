"""Stop the clock of a timeout, and let it run again: since when it is stopped, and the deadline that follows from it.

A row is held while the condition `hold_when` of its policy holds, or a hold by hand lasts, which only `resume_timeout`
or its end ends. It keeps its deadline, `due_at`, and `held_at`. When its clock runs again, `OwnTime.after_stop` moves
the deadline by what was stopped of its policy's own time: open hours for a span with a calendar, else real time. Each
stop is kept in `stops`, so that a deadline that is computed again is moved by the same. `remaining` is only displayed.

| event | since when its clock is stopped, or its deadline |
| --- | --- |
| its clock is stopped | since now, or since its policy is on hold; a retry or a snooze then waits as much longer |
| it is armed while `hold_when` holds | since the beginning, `since` |
| it is paused by hand | its deadline stays where it is, and it fires when it is resumed, if that has passed |
| its deadline had passed, also unnoticed | it fires when its clock runs |
| it is moved to a given deadline | since now; if it is moved by a duration, as before |
| its clock runs again | moved by what was stopped |
| `when` stops holding | its clock is stopped until `when` holds again, and the round continues |
| `since` has another value | a new round, without the hold by hand |
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from django.db import Error as DatabaseError

from django_delayq.arming.row_state import is_on_hold, objects_of_policy, on_hold_among
from django_delayq.ledger.controls import Stop, policy_state, read_delay
from django_delayq.ledger.errors import message_of
from django_delayq.ledger.locking import lock_in_slot_order
from django_delayq.ledger.paging import Page, each_page, update_each
from django_delayq.ledger.planned import deadline_for, next_at, waits_longer
from django_delayq.ledger.subjects import model_and_pk_of, slots_of
from django_delayq.ledger.writing import hold_rows, note_holds, resume_rows
from django_delayq.models import PolicyChange, Timeout
from django_delayq.policy.policies import registry
from django_delayq.rounds.memory import stops_of, with_stop
from django_delayq.sql.now import database_now
from django_delayq.sql.statements import CHUNK, chunks
from django_delayq.times.lengths import OwnTime
from django_delayq.times.spans import Length

if TYPE_CHECKING:
    from django_delayq.policy.policies import TimeoutPolicy

logger = logging.getLogger("django_delayq.worker")
State = Timeout.State
_failed = set[int]()
"""The rows for which this process has logged that their deadline cannot be computed."""


def time_of(
    policy: TimeoutPolicy[Any] | None, in_force: Callable[[], timedelta | None], read: Callable[[], Any]
) -> OwnTime:
    """Return the time in which deadlines of `policy` count. Reads the delay in force, and the object, if they matter.

    Real time also if the policy is not declared, or the object does not exist.
    """
    if policy is None or policy.after is None or isinstance(policy.fixed_length, timedelta):
        return OwnTime(None, None, policy is not None and policy.grace is not None)
    return policy.own_time(read() if policy.needs_object else None, in_force())


def time_of_row(row: Timeout, using: str) -> OwnTime:
    """Return the time in which the deadline of a row of the ledger counts."""
    policy = registry.get(row.policy)
    in_force = lambda: read_delay(cast("TimeoutPolicy[Any]", policy), using)  # noqa: E731
    return time_of(policy, in_force, lambda: _object_of(row, policy, using))


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


def stop(row: Timeout, at: datetime, using: str) -> timedelta:
    """Set since when the clock of the pending, locked `row` is stopped, in memory; return the rest of its time.

    That is since `at`, or since a hold of its policy began, which lasts. A hold that has ended, but has not moved its
    deadline yet, moves it now.
    """
    time, (stopped, ended) = time_of_row(row, using), _policy_hold(row, at, using)
    row.ready_at = row.run_at if waits_longer(row) else None
    if ended < at:
        row.asked_due_at = row.asked_due_at or row.due_at
        row.due_at = time.after_stop(row.due_at, stopped, ended)
        row.ready_at = row.ready_at and time.after_stop(row.ready_at, stopped, ended)
        row.stops, stopped = with_stop(row.stops, stopped, ended), at
        update_each([row], using)
    row.held_at = stopped
    return _rest(row, time, row.due_at)


def _rest(row: Timeout, time: OwnTime, due_at: datetime) -> timedelta:
    """Return the rest of the time of `row`, whose clock is stopped and whose deadline is `due_at`; at least nothing.

    An attempt that waits for a retry or a snooze counts to it. Negative, in real time, if the deadline had passed, but
    not the grace of its policy.
    """
    begin, waits = row.held_at or due_at, _waits_until(row)
    end = deadline_for(row, waits) if waits is not None and not row.step else due_at
    if end >= begin:
        return time.elapsed(begin, end)
    policy = registry.get(row.policy)
    return end - begin if policy is not None and policy.grace is not None else timedelta(0)


def _waits_until(row: Timeout) -> datetime | None:
    """Return until when a retry or a snooze of `row`, whose clock is stopped, was to wait; None: it was not."""
    return row.ready_at if row.ready_at and row.held_at and row.ready_at > row.held_at else None


def hold(rows: Iterable[Timeout], using: str, now: datetime, **event: Any) -> list[Timeout]:
    """Stop the clocks of pending, locked rows by their condition; return them. `event`: see `hold_rows`."""
    return hold_rows([(row, stop(row, now, using)) for row in rows], using, at=now, **event)


def hold_new(rows: Iterable[Timeout], using: str, now: datetime, *, is_computed: bool, **event: Any) -> list[Timeout]:
    """Stop the clocks of locked rows that were scheduled just now; return them.

    `is_computed`: by `since` and `after` of their policy, so that the whole span is left. Otherwise it is the delay of
    the caller, from now on.
    """
    rests = []
    for row in rows:
        row.held_at = min(row.since_at, now) if is_computed and row.since_at is not None else now
        row.ready_at = None
        row.steps_over = ""  # those that it passed when it was scheduled are ahead when its clock runs
        rests.append((row, _rest(row, time_of_row(row, using), row.due_at)))
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

    `keep_deadline`: pause them, instead of stopping their clocks. A clock that is stopped already stays stopped,
    and what is paused already stays paused since then.
    """
    rests = []
    for row in rows:
        rest = row.remaining or timedelta(0)
        if not (row.has_stopped_clock or (row.is_paused and keep_deadline)):
            _let_run(row)
            longer = row.run_at - next_at(row).at if waits_longer(row) else timedelta(0)
            rest = longer if keep_deadline else stop(row, now, using)
            row.keeps_deadline = keep_deadline
        elif not row.held_by_hand:
            row.held_when = True
        rests.append((row, rest))
        row.held_by_hand, row.held_until = True, until
    return hold_rows(rests, using, at=now, **event)


def _let_run(row: Timeout) -> None:
    """Make of a paused row, in memory, one that waits for its next attempt."""
    if row.is_paused:
        row.run_at, row.held_at = next_at(row).at + (row.remaining or timedelta(0)), None


def resume(
    rows: Iterable[Timeout], using: str, now: datetime, *, since: datetime | None = None, **event: Any
) -> list[Timeout]:
    """Let the clocks of held, locked rows run from now on, or `since` then; return them. `event`: see `hold_rows`."""
    deadlines, start = [], since or now
    for row in rows:
        due_at, row.ready_at = _resumed(row, start, using)
        deadlines.append((row, start, due_at))
    return resume_rows(deadlines, using, at=now, **event)


def _resumed(row: Timeout, start: datetime, using: str) -> tuple[datetime, datetime | None]:
    """Return the deadline of a held row if its clock runs from `start` on, and until when it waits for an attempt."""
    if row.keeps_deadline:
        return row.due_at, None
    time, stopped_at, waits = time_of_row(row, using), row.held_at or start, _waits_until(row)
    return time.after_stop(row.due_at, stopped_at, start), waits and time.after_stop(waits, stopped_at, start)


def deadline_if_resumed(row: Timeout, using: str, now: datetime) -> datetime:
    """Return the deadline of a held row if its clock ran from now on, or since the end of its hold."""
    return _resumed(row, min(row.held_until or now, now), using)[0]


def attempt_if_resumed(row: Timeout, using: str, now: datetime) -> datetime:
    """Return when a held row would be tried next if its clock ran from now on, or since the end of its hold."""
    resumed_at = min(row.held_until or now, now)
    due_at, waits = _resumed(row, resumed_at, using)
    stops = row.stops if row.is_paused else with_stop(row.stops, row.held_at or resumed_at, resumed_at)
    attempt = next_at(row, due_at, stops=stops_of(stops)).at
    return attempt + (row.remaining or timedelta(0)) if row.is_paused else max(attempt, waits or attempt)


def end_hold_by_hand(
    rows: Sequence[Timeout], using: str, now: datetime, **event: Any
) -> tuple[list[Timeout], list[Timeout]]:
    """End the holds by hand of held, locked rows; return those whose clock runs now, and those that stay held.

    These are on hold by the condition of their policy. A hold whose `held_until` has passed ended then: the clock has
    been running since, unless the condition had begun before. If nothing has noted that, it has begun now.
    """
    kept, noted = [row for row in rows if is_held_by_condition(row, using)], list[Timeout]()
    for row in rows:
        ended_at = now if row.held_when else min(row.held_until or now, now)
        if row in kept and row.is_paused:  # from then on its condition has stopped its clock
            _let_run(row)
            row.remaining, row.keeps_deadline = stop(row, ended_at, using), False
        elif row not in kept or ended_at < now:
            resume([row], using, now, since=ended_at, **event)
        if row.state == State.HELD:
            row.held_by_hand, row.held_until, row.held_when = False, None, False
            noted.append(row)
    note_holds(noted, using, what="resumed", at=now, **event)
    hold([row for row in kept if row not in noted], using, now, by="save")
    return [row for row in rows if row not in kept], kept


def is_held_by_condition(row: Timeout, using: str) -> bool:
    """Return whether the condition `hold_when` holds on the object of `row`, which is locked."""
    policy, (_, pk) = registry.get(row.policy), model_and_pk_of(row, using)
    return policy is not None and pk is not None and is_on_hold(policy, pk, using)


def end_passed(rows: Iterable[Timeout], using: str) -> list[Timeout]:
    """End the holds by hand of those of the locked `rows` whose end has passed; return those whose clock runs now.

    Before a held row is moved: a new rest would otherwise count from the end of the hold.
    """
    ending = [row for row in rows if row.state == State.HELD and row.held_until is not None]
    if not ending:
        return []
    now = database_now(using)
    return end_hold_by_hand([row for row in ending if row.held_until <= now], using, now)[0]  # type: ignore[operator]


def extended_from(row: Timeout) -> datetime:
    """Return from when an extension of the waiting `row` counts: its deadline.

    If that had passed when its clock was stopped, it counts from then on, because nothing of its time is left.
    """
    policy = registry.get(row.policy)
    has_grace = policy is not None and policy.grace is not None
    return row.due_at if has_grace or not row.has_stopped_clock else max(row.due_at, row.held_at or row.due_at)


def retarget(row: Timeout, due_at: datetime, using: str, by: Length | None) -> None:
    """Set the clock of `row`, if it is stopped, before its deadline is moved to `due_at`.

    Args:
        row: locked; it still has its former deadline.
        due_at: the new deadline.
        using: the database.
        by: the duration by which it is moved; the time for which it was stopped moves the new deadline, too.
            None: the deadline is given, and only a stop from now on moves it.
    """
    if not row.has_stopped_clock:
        return
    if by is None:
        now = database_now(using)
        row.stops, row.held_at = with_stop(row.stops, row.held_at or now, now), now
    row.remaining = _rest(row, time_of_row(row, using), due_at)


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

    What has stopped its clock in this round moves it, measured in its present time: the same facts in another order
    lead to the same deadline.

    Args:
        row: pending or held.
        computed, terms: the deadline, and with what values it is computed.
        time: in which it counts.
    """
    due_at = time.after_stops(computed, stops_of(row.stops))
    rest = _rest(row, time, due_at) if row.has_stopped_clock else row.remaining
    return Plan(due_at, rest, computed, terms)


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
