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

import copy
import logging
from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from functools import cached_property
from typing import Any, NamedTuple

from django.db import Error as DatabaseError
from django.db.models import Model
from django.utils.translation import gettext as _

from django_delayq.arming.changes import Failures
from django_delayq.arming.row_state import on_hold_among
from django_delayq.ledger.controls import PolicyState, Stop, policy_states
from django_delayq.ledger.error_texts import message_of
from django_delayq.ledger.locking import lock_in_slot_order, read_committed
from django_delayq.ledger.paging import Page, each_page, update_each
from django_delayq.ledger.planned import course_of, plan_of_row
from django_delayq.ledger.subjects import Subject, lock_newest, lock_subject, model_and_pk_of, objects_of, slots_of
from django_delayq.ledger.writing import hold_rows, resume_rows
from django_delayq.models import PolicyChange, Timeout
from django_delayq.policy.policies import TimeoutPolicy, registry
from django_delayq.policy.steps import HANDLER, Planned
from django_delayq.rounds import events
from django_delayq.sql.now import database_now
from django_delayq.sql.statements import CHUNK, chunks
from django_delayq.times.lengths import UNIT_LABELS, OwnTime, duration_label
from django_delayq.times.paths import read_relations

logger = logging.getLogger("django_delayq.worker")
State = Timeout.State
_failed = set[int]()
"""The rows for which this process has logged that their deadline cannot be computed."""


class Progress(NamedTuple):
    """How much of its time a round has used, and how much is left.

    In the time by which its deadline counts: open time of a calendar for `Working`, otherwise real time; without what
    its clock was stopped for. `str()` returns it in the active language: `2 h 10 min of office time left, 73 % used`.
    """

    used: timedelta
    """From when it began until now, or until its clock was stopped."""
    left: timedelta
    """Negative if the deadline has passed."""
    total: timedelta
    """Both together. An extension adds to it."""
    share: float
    """What is used of `total`: 0 to 1, and above 1 after the deadline. 1 if `total` is nothing."""
    running: bool
    """False: its clock is stopped, or has not begun. Of a paused one it runs, and outside of open hours, too."""
    due_at: datetime
    """The deadline. While its clock is stopped, the last one, which it does not keep."""
    is_open_time: bool
    """Whether the durations are open hours of a calendar."""

    def __str__(self) -> str:
        left, words = abs(self.left), _("{duration} left") if self.running else _("stopped, {duration} left")
        length = duration_label(left)
        if self.is_open_time and left >= timedelta(days=1):  # 24 open hours are not a day
            length = str(UNIT_LABELS["h"]).format(n=left // timedelta(hours=1))
        if self.is_open_time:
            length = _("{duration} of office time").format(duration=length)
        if self.left < timedelta(0):
            words = _("{duration} after the deadline")
        percent = int(round(100 * self.share, 6))  # 99 as long as something is left
        # `% u` is not a placeholder: xgettext:no-python-format
        return _("{time}, {percent} % used").format(time=words.format(duration=length), percent=percent)


class Facts:
    """What events of the locked rows of a page depend on beside them. Each is read at most once, when it is needed.

    So all objects of one model are read in one query.
    """

    def __init__(self, rows: Sequence[Timeout], using: str, read: Any = None, *, locks: bool = True) -> None:
        """Set the rows. `read`: objects that were read, or locked, by model and key: all that exist of a model.

        `locks=False`: only display them, and lock no object where a plain read may be outdated.
        """
        self.rows, self.using, self._locks = rows, using, locks
        self._read: dict[Any, Any] = {} if read is None else read
        self._followed = set[tuple[type[Model], tuple[str, ...]]]()

    def of(self, row: Timeout, relations: tuple[str, ...] = ()) -> Any:
        """Return the object of `row`, and read its `relations`, and those of the others; None: it does not exist."""
        model, pk = model_and_pk_of(row, self.using)
        if model is None:
            return None
        if model not in self._read:
            pks, rows = dict(objects_of(self.rows, self.using)).get(model, []), model._base_manager.using(self.using)
            self._read[model] = (read_committed(rows, self.using) if self._locks else rows).in_bulk(pks)
        if (model, relations) not in self._followed:
            read_relations(list(self._read[model].values()), relations)
            self._followed.add((model, relations))
        return self._read[model].get(pk)

    def needed(self, row: Timeout, policy: TimeoutPolicy[Any]) -> Any:
        """Return the object of `row` if the plan of its policy needs it, else None."""
        return self.of(row, policy.followed) if policy.plan_needs_object else None

    def next_at(self, row: Timeout, due_at: datetime | None = None, **given: Any) -> Planned:
        """Return what is next of `row`, which waits, if its deadline is `due_at`. `given`: see `Course`."""
        policy = registry.get(row.policy)
        if policy is None or not policy.has_plan:
            return Planned(due_at or row.due_at, row.step if policy is None else HANDLER)
        return next(plan_of_row(row, policy, self.needed(row, policy), due_at=due_at or row.due_at, **given))

    def opening(self, row: Timeout, at: datetime) -> datetime:
        """Return when the policy of `row` may act: at `at`, or at its next opening."""
        policy = registry.get(row.policy)
        return at if policy is None else policy.opening(at)

    def final_at(self, row: Timeout) -> datetime:
        """Return when the handler of `row` acts: at its deadline, or at the end of its grace."""
        policy = registry.get(row.policy)
        if policy is None or policy.grace is None:
            return row.due_at
        return policy.acts_at(row.due_at, self.needed(row, policy))

    @property
    def row(self) -> Timeout | None:
        """Return its only row, if there is one."""
        return next(iter(self.rows), None)

    @classmethod
    def of_page(cls, page: Page) -> Facts:
        """Return the facts of a page, whose objects were mostly read when they were locked."""
        return cls(page.rows, page.using, page.locked)

    @cached_property
    def now(self) -> datetime:
        """Return the time of the database."""
        return database_now(self.using)

    @cached_property
    def states(self) -> dict[TimeoutPolicy[Any], PolicyState]:
        """Return what operators have put in force for the policies."""
        return {state.policy: state for state in policy_states(self.using)}

    def time_of(self, row: Timeout) -> OwnTime:
        """Return the time in which the deadline of `row` counts. Reads the delay in force and the object, if needed.

        Real time also if its policy is not declared, or the object does not exist.
        """
        policy = registry.get(row.policy)
        if policy is None or policy.after is None or isinstance(policy.fixed_length, timedelta):
            return OwnTime(None, None, policy is not None and policy.grace is not None)
        obj = self.of(row, policy.followed) if policy.needs_object else None
        return policy.own_time(obj, self.states[policy].after)

    def stop_of(self, row: Timeout, policy: TimeoutPolicy[Any]) -> tuple[datetime, datetime, bool]:
        """Return begin and end of the stop of the clock of `row` that has not moved its deadline, and whether it lasts.

        Of its own, or of a hold of its policy. It may have had an end that no worker has noticed. Until now if it
        lasts; begin and end are equal if there is none.
        """
        if row.has_stopped_clock:
            end = self.now if row.held_when else min(row.held_until or self.now, self.now)
            begin = row.held_at or end
            return begin, max(begin, end), end == self.now  # also if the clock was set back
        state = self.states[policy]
        lasts = state.stop == Stop.HELD and (state.until is None or state.until > self.now)
        return *self.policy_hold(row, self.now), lasts

    def progress(self, row: Timeout) -> Progress | None:
        """Return how much of its time the round of `row` has used; None: it is settled, or that cannot be computed.

        It cannot if the policy is not declared, or if its calendar raises.
        """
        policy = registry.get(row.policy)
        if policy is not None and not row.is_settled:
            with Failures(policy).counting(row.pk):
                (begin, end, is_stopped), time = self.stop_of(row, policy), self.time_of(row)
                moved = time.after_stop(row.due_at, begin, end)
                course = course_of(row, policy, None, due_at=moved, time=time)
                course = course._replace(stops=[*course.stops, (begin, end)])
                own, total = course.total
                used = max(course.used(own, begin if is_stopped else self.now), timedelta(0))
                share, due_at = used / total if total else 1.0, row.due_at if is_stopped else moved
                running, is_open_time = not is_stopped and course.start <= self.now, own.calendar() is not None
                return Progress(used, total - used, total, share, running, due_at, is_open_time)
        return None

    def is_on_hold(self, row: Timeout) -> bool:
        """Return whether the condition `hold_when` of its policy holds on the object of `row`."""
        return (registry.get(row.policy), model_and_pk_of(row, self.using)[1]) in self._on_hold

    @cached_property
    def _on_hold(self) -> set[tuple[TimeoutPolicy[Any], Any]]:
        """Return the policies and the keys of the objects on which they hold, in one query for each policy."""
        places = [(registry.get(row.policy), model_and_pk_of(row, self.using)[1]) for row in self.rows]
        found = set[tuple[Any, Any]]()
        for policy in {policy for policy, _pk in places if policy is not None}:
            pks = [pk for each, pk in places if each is policy]
            found |= {(policy, pk) for pk in on_hold_among(policy, pks, self.using)}
        return found

    def policy_hold(self, row: Timeout, until: datetime) -> tuple[datetime, datetime]:
        """Return begin and end of the time for which a hold of its policy has stopped the clock of `row` until then.

        Its deadline has not moved by that yet. Equal: there is none.
        """
        policy = registry.get(row.policy)
        if policy is None or (state := self.states[policy]).stop not in {Stop.HELD, Stop.RELEASING}:
            return until, until
        begin, end = state.stopped_at, min(state.until or until, until)
        if state.stop == Stop.RELEASING:
            moving = [each for each in self._moving if each.policy in policy.labels]
            found = [each for each in moving if each.cursor < row.pk <= each.last_id]
            if not found:  # it has moved the row already, or the row began later
                return until, until
            begin, end = found[0].held_from, found[0].held_until
        begin = max(begin or until, self.counts_from(row, policy))
        return (begin, end) if begin < end else (until, until)

    @cached_property
    def _moving(self) -> list[PolicyChange]:
        """Return the ends of holds that still move deadlines."""
        return list(PolicyChange.objects.using(self.using).filter(held_from__isnull=False, finished_at=None))

    def counts_from(self, row: Timeout, policy: TimeoutPolicy[Any]) -> datetime:
        """Return since when the deadline of `row` counts. One that was scheduled during a hold moves by the rest of it.

        A row that was armed counts from its `since`, also if it was armed later: its object matched again, or the sync
        found it. Such a row may have a moved deadline, which its round had before.
        """
        begun = row.restarted_at or row.created_at
        if row.since_at is None or row.since_at >= begun:
            return begun
        natural = None
        with Failures(policy).counting(row.pk):  # if `after` raises, it does not show that the row was armed
            obj = self.of(row, policy.followed) if policy.needs_object else None
            if obj is not None or not policy.needs_object:
                natural = policy.due_of(obj, row.since_at, self.states[policy].after)
        is_armed = natural == row.due_at or (natural == row.first_due_at and row.restarted_at is None)
        return row.since_at if is_armed else begun


def lock_waiting(subject: Subject) -> Facts:
    """Lock the object of `subject`, then its waiting row; return its facts. Their `row` is None: nothing waits."""
    obj, row = lock_subject(subject), lock_newest(subject, pending=True)
    return Facts([] if row is None else [row], subject.using, {subject.model: {subject.pk: obj}})


def hold(rows: Iterable[Timeout], facts: Facts, **event: Any) -> list[Timeout]:
    """Stop the clocks of pending, locked rows by their condition; return them. `event`: see `hold_rows`."""
    return hold_rows([(row, events.stop(row, facts.now, facts)) for row in rows], facts.using, at=facts.now, **event)


def hold_new(facts: Facts, *, is_computed: bool, **event: Any) -> list[Timeout]:
    """Stop the clocks of the locked rows of `facts`, which were scheduled just now; return them.

    `is_computed`: see `events.stop_new`.
    """
    rests = [(row, events.stop_new(row, facts, is_computed=is_computed)) for row in facts.rows]
    return hold_rows(rests, facts.using, at=facts.now, **event)


def hold_scheduled(
    policy: TimeoutPolicy[Any], pks: Sequence[Any], key: str, using: str, *, is_computed: bool, kept: Sequence[int] = ()
) -> None:
    """Stop the clocks of those rows of the locked objects `pks` for which `hold_when` holds, but not of the ids `kept`.

    They were scheduled just now. `is_computed`: see `events.stop_new`.
    """
    for chunk in chunks(on_hold_among(policy, pks, using)):
        slots = [slot for _, _, slot in slots_of(policy, chunk, key, using)]
        rows = Timeout.objects.using(using).filter(slot__in=slots, slot_taken=1).exclude(pk__in=kept)
        hold_new(Facts(lock_in_slot_order(rows, using), using), is_computed=is_computed, by="hand")


def hold_by_hand(
    rows: Iterable[Timeout], facts: Facts, until: datetime | None, *, keep_deadline: bool = False, **event: Any
) -> list[Timeout]:
    """Hold pending or held, locked rows by hand, `until` a datetime or until they are resumed; return them.

    `keep_deadline`: see `events.stop_by_hand`.
    """
    rests = [(row, events.stop_by_hand(row, until, facts, keep_deadline=keep_deadline)) for row in rows]
    return hold_rows(rests, facts.using, at=facts.now, **event)


def if_resumed(row: Timeout, facts: Facts) -> Timeout:
    """Return a held row as it would be if its clock ran from now on, or since the end of its hold."""
    then = copy.copy(row)
    events.resume(then, min(row.held_until or facts.now, facts.now), facts, at=facts.now)
    return then


def end_hold_by_hand(rows: Sequence[Timeout], facts: Facts, **event: Any) -> list[Timeout]:
    """End the holds by hand of held, locked rows; return those whose clock runs now.

    The others stay held by the condition of their policy. A hold whose `held_until` has passed ended then: the clock
    has been running since, unless the condition had begun before. If nothing has noted that, it has begun now.
    """
    now, starts, noted = facts.now, list[tuple[Timeout, datetime]](), list[Timeout]()
    for row in rows:
        ended_at = now if row.held_when else min(row.held_until or now, now)
        if not facts.is_on_hold(row) or (ended_at < now and not row.is_paused):
            starts.append((row, ended_at))
            continue
        events.release_by_hand(row, ended_at, facts, **event)
        noted.append(row)
    resumed = resume_rows(starts, facts, **event)
    update_each(noted, facts.using, (State.HELD,))
    hold([row for row in resumed if facts.is_on_hold(row)], facts, by="save")
    return [row for row in resumed if not facts.is_on_hold(row)]


def end_passed(rows: Iterable[Timeout], facts: Facts) -> list[Timeout]:
    """End the holds by hand of those of the locked `rows` whose end has passed; return those whose clock runs now.

    Before a held row is moved: a new rest would otherwise count from the end of the hold.
    """
    ending = [row for row in rows if row.state == State.HELD and row.held_until is not None]
    if not ending:
        return []
    return end_hold_by_hand([row for row in ending if row.held_until <= facts.now], facts)  # type: ignore[operator]


def extended_from(row: Timeout) -> datetime:
    """Return from when an extension of the waiting `row` counts: its deadline.

    If that had passed when its clock was stopped, it counts from then on, because nothing of its time is left.
    """
    policy = registry.get(row.policy)
    has_grace = policy is not None and policy.grace is not None
    return row.due_at if has_grace or not row.has_stopped_clock else max(row.due_at, row.held_at or row.due_at)


def end_holds_by_hand(using: str) -> int:
    """Resume the rows whose hold by hand has reached its end; return how many. Raises the database's errors.

    Any worker may call it: each page is a transaction, which locks the objects, and then the rows. The deadlines count
    from the end of the hold, however late the worker is. A row whose function `after` raises stays held, and is logged.
    """
    now, ended = database_now(using), 0
    due = Timeout.objects.using(using).filter(held_until__lte=now).order_by("held_until", "id")

    def change(page: Page) -> int:
        done, facts = 0, Facts.of_page(page)
        for row in page.rows:
            try:
                done += len(end_passed([row], facts))
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
