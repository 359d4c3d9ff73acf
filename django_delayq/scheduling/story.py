"""The story of a timeout: every round of one policy for one object, as events in order, readable as text."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any, cast

from django.db.models import Q
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from django_delayq.arming.changes import Arming, Changes, Failures
from django_delayq.arming.reconcile import diff, oldest_in_sync
from django_delayq.arming.row_state import RowState, condition_holds, row_states
from django_delayq.conf import get_settings
from django_delayq.ledger import advances
from django_delayq.ledger.controls import BRAKE_ACTOR, policy_state
from django_delayq.ledger.error_texts import message_of
from django_delayq.ledger.locking import rows_of
from django_delayq.ledger.subjects import Subject, current_round, subject_of
from django_delayq.models import Timeout
from django_delayq.policy.policies import M, TimeoutPolicy, registry
from django_delayq.policy.reads import condition_columns, condition_text
from django_delayq.policy.terms import values_in
from django_delayq.rounds.memory import BRAKED, DIED, SINCE_CHANGED, moment
from django_delayq.times import clock
from django_delayq.times.lengths import UNIT_LABELS, duration_label

State = Timeout.State
MAX_ROUNDS = 200
"""An object may have very many: a policy that schedules itself each minute makes 43,000 in `RETENTION`."""
EVENT_LABELS = {
    "scheduled": gettext_lazy("scheduled"),
    "rescheduled": gettext_lazy("rescheduled"),
    "extended": gettext_lazy("extended"),
    "failed": gettext_lazy("failed"),
    "snoozed": gettext_lazy("snoozed"),
    "retried": gettext_lazy("retried"),
    "postponed": gettext_lazy("postponed"),
    "deadline_changed": gettext_lazy("deadline changed"),
    "cancel_requested": gettext_lazy("cancellation requested"),
    "fire_requested": gettext_lazy("firing requested"),
    "replanned": gettext_lazy("replanned with its policy"),
    "recomputed": gettext_lazy("computed again, because its data has changed"),
    "hold_ended": gettext_lazy("moved by the hold of its policy"),
    "refired": gettext_lazy("fired again by the new round"),
    "refires": gettext_lazy("repeats the round"),
    "retired": gettext_lazy("its policy was retired"),
    "adopted": gettext_lazy("adopted by another installation"),
    "resumed": gettext_lazy("its clock runs again"),
    "erased": gettext_lazy("personal data erased"),
    "suspected": gettext_lazy("suspected of killing a worker"),
    **{state.value: state.label for state in State},
    "held": gettext_lazy("its clock is stopped"),
    "paused": gettext_lazy("paused, its deadline stays"),
    "step": gettext_lazy("step ran"),
    "step_skipped": gettext_lazy("step skipped"),
    "step_dead": gettext_lazy("step dead"),
    "steps_passed": gettext_lazy("missed and passed"),
    "step_late": gettext_lazy("step passed"),
    "step_shadowed": gettext_lazy("step not called in shadow mode"),
}
"""Names of the events in a history, translated; other events are displayed as they are stored."""
RETRIED_EVENTS = frozenset(("failed", "snoozed"))
"""Events whose `to` is the next attempt, and not another deadline."""
REASON_LABELS = {
    DIED: gettext_lazy("The process died 3 times while this timeout ran alone in it."),
    SINCE_CHANGED: gettext_lazy("what it counts from has changed"),
}
"""The reasons that the library itself stores, translated; other reasons are displayed as they are stored."""
_NUMBERS_OF_BRAKE = re.compile(BRAKED.replace(".", r"\.").replace("{", "(?P<").replace("}", ">.+)"))
ACTOR_LABELS = {"hand": gettext_lazy("by hand"), "save": gettext_lazy("by a save of its object")}
"""Actors that are not operators."""


@dataclass(frozen=True, slots=True)
class StoryEvent:
    """An event of one round; `str()` returns it as a line of text."""

    at: datetime
    what: str
    timeout_id: int
    by: str = ""
    reason: str = ""
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Return what happened, translated, with the other timeout or the step that it is about."""
        label = f"{EVENT_LABELS.get(self.what, self.what)} {self.details.get('timeout', '')}".strip()
        return f"{label}: {self.details['step']}" if "step" in self.details else label

    def parts(self, write: Callable[..., str], shown: Callable[[datetime], str]) -> Iterator[str]:
        """Yield what else is known of it. `write` formats a message, and `shown` renders a datetime."""
        if self.what == "suspected" and "number" in self.details:
            yield _("death {number}").format(number=self.details["number"])
        if "until" in self.details:
            yield write(_("until {until}"), until=shown(moment(str(self.details["until"]))))
        if self.what == "held":
            yield _("{duration} left").format(duration=duration_label(self.details.get("rest", 0)))
        if "to" in self.details:
            words = _("next attempt {moment}") if self.what in RETRIED_EVENTS else _("to {moment}")
            yield write(words, moment=shown(moment(str(self.details["to"]))))
        if "error" in self.details:
            yield f"{self.details['error']}: {self.details.get('message', '')}"
        if "late" in self.details:
            yield late_label(self.details["late"])
        if self.by:
            yield actor_label(self.by)

    def __str__(self) -> str:
        parts = self.parts(str.format, lambda at: _local(at, "milliseconds"))
        line = ", ".join([f"{_local(self.at, 'milliseconds')}  {self.name}", *parts])
        return line + (f" ({reason_label(self.reason)})" if self.reason else "")


@dataclass(frozen=True, slots=True)
class Story:
    """The events of the newest 200 rounds, oldest first, and a sentence on the present state."""

    title: str
    events: tuple[StoryEvent, ...]
    outlook: str
    note: str = ""
    """A sentence if there are more rounds; empty: all are shown."""
    deadline: str = ""
    """A sentence on who has set the deadline of the pending timeout; empty: there is none, or none that is computed."""

    def __iter__(self) -> Iterator[StoryEvent]:
        return iter(self.events)

    def __len__(self) -> int:
        return len(self.events)

    def __str__(self) -> str:
        lines = [self.note, *self.events, self.deadline, self.outlook]
        return "\n".join([self.title, *(f"  {line}" for line in lines if line)])


def actor_label(who: str) -> str:
    """Return the actor, translated."""
    return str(ACTOR_LABELS[who]) if who in ACTOR_LABELS else _("by {who}").format(who=who)


def operator_label(by: str) -> str:
    """Return the actor of a change of a policy, translated if it is the brake of the policy itself."""
    return _("its brake") if by == BRAKE_ACTOR else by


def reason_label(reason: str) -> str:
    """Return the reason, translated if the library gave it."""
    if numbers := _NUMBERS_OF_BRAKE.fullmatch(reason):
        words = _("{count} timeouts fired within {per}; the brake allows {most}.")
        units = re.findall(r"([\d.]+) (d|h|min|s)", numbers["per"])
        per = " ".join(str(UNIT_LABELS[unit]).format(n=number) for number, unit in units)
        return words.format(**{**numbers.groupdict(), "per": per})
    return str(REASON_LABELS.get(reason, reason))


def explain_timeout(obj: M, policy: str | TimeoutPolicy[M] | None = None, key: str = "") -> Story:
    """Return what happened to a timeout, when and why, who did it, and what will happen next. Only reads.

    `obj` may be a `Timeout`: then the story contains only its round.

    Raises:
        UnknownPolicy: no such policy.
        ValueError: `obj` is not saved.
    """
    return story_of(subject_of(obj, policy, key))


def story_of(subject: Subject) -> Story:
    """Return the story of a subject, also of one whose object no longer exists. Only reads."""
    found = list(subject.rounds()[: MAX_ROUNDS + 1])
    rounds = sorted(found[:MAX_ROUNDS], key=lambda row: row.pk)
    events = sorted((event for row in rounds for event in events_of(row)), key=lambda event: event.at)
    title = _("{policy} of {object}").format(policy=subject.labels[0], object=subject.object_and_key)
    note = _("Only the newest {count} rounds are shown.").format(count=MAX_ROUNDS) if len(found) > MAX_ROUNDS else ""
    current = current_round(rounds)
    is_waiting = current is not None and current.is_waiting
    deadline = deadline_label(current) if current is not None and is_waiting else ""
    return Story(title, tuple(events), _outlook(subject, current), note, deadline)


def events_of(row: Timeout) -> Iterator[StoryEvent]:
    """Yield the events of one round: scheduled, those of its history, and how it was settled."""
    # `first_due_at` may be that of a round that this one replaced.
    first_due = next((event["from"] for event in row.history if "from" in event), None)
    scheduled_for = row.due_at if first_due is None else moment(first_due)
    reason = "" if row.is_settled else row.reason
    yield StoryEvent(row.created_at, "scheduled", row.pk, reason=reason, details={"to": scheduled_for})
    for event in row.history:
        details = {name: value for name, value in event.items() if name not in ("at", "what", "by", "reason")}
        by, reason = event.get("by", ""), event.get("reason", "")
        yield StoryEvent(moment(event["at"]), event["what"], row.pk, by, reason, details)
    if row.settled_at is not None:
        # From the deadline, which people know: lateness does not count a snooze.
        late = (row.settled_at - advances.passed_at(row)).total_seconds() if row.state == State.FIRED else None
        details = {"cause": row.cause, **({} if late is None else {"late": late})}
        reason = row.reason or str(row.get_cause_display())
        yield StoryEvent(row.settled_at, row.state, row.pk, reason=reason, details=details)


def condition_values(subject: Subject) -> str:
    """Return what the object's own columns in the condition contain now, such as `status = "paid"`; empty: unknown.

    A story does not have them, because its reader may not be permitted to view the object.
    """
    policy = subject.policy
    fields = (condition_columns(policy) if policy is not None and policy.when is not None else None) or set()
    own = {} if policy is None else dict.fromkeys(policy.concrete_model._meta.concrete_fields)
    names = [field.name for field in own if field in fields]
    if policy is None or not names:
        return ""
    found = rows_of(policy.concrete_model, subject.using).filter(pk=subject.pk).values(*names).first()
    return condition_text(Q(**found)) if found else ""


def _outlook(subject: Subject, current: Timeout | None) -> str:
    if current is None or current.is_settled:
        return _why_nothing_is_pending(subject)
    if current.state == State.FIRING:
        return (
            _("Its step {step} is running now.").format(step=current.step) if current.step else _("It is firing now.")
        )
    if current.state == State.HELD:
        return hold_label(current)
    if stopped := _why_stopped(subject) or _why_skipped(subject, current):
        return stopped
    text = _("It is due at {moment} unless it is cancelled or moved.")
    is_quiet = subject.policy is not None and subject.policy.within is not None and not current.snoozes
    has_grace = subject.policy is not None and subject.policy.grace is not None
    if current.attempts and current.step:
        text = _("Attempt {number} of its step {step} is due at {moment}. Its deadline is {deadline}.")
    elif current.attempts:
        text = _("Attempt {number} is due at {moment}.")
    elif current.step:
        text = _("Its step {step} is due at {moment}. Its deadline is {deadline}.")
    elif has_grace and current.run_at > current.due_at:
        text = _("Its deadline is {deadline}. It acts at {moment}, after its grace.")
    elif is_quiet and current.run_at > current.due_at:
        text = _("Its deadline is {deadline}. It waits for the next opening hours of its policy, at {moment}.")
    moment, deadline = _local(current.run_at), _local(current.due_at)
    return text.format(number=current.attempts + 1, moment=moment, deadline=deadline, step=current.step)


def hold_label(row: Timeout) -> str:
    """Return why the clock of a held row is stopped, and the rest of its time, as a sentence about it."""
    if row.is_paused:
        text = _("It is paused until {until}. Its deadline stays {deadline}.")
        if row.held_until is None:
            text = _("It is paused until it is resumed. Its deadline stays {deadline}.")
    elif row.held_by_hand and row.held_until is not None:
        text = _("Its clock is stopped by hand until {until}; {duration} of its time is left.")
    elif row.held_by_hand:
        text = _("Its clock is stopped by hand until it is resumed; {duration} of its time is left.")
    else:
        text = _(
            "Its clock is stopped while the condition hold_when of its policy holds; {duration} of its time is left."
        )
    until = _local(row.held_until) if row.held_until else ""
    rest = duration_label(row.time_left)
    return text.format(until=until, duration=rest, deadline=_local(row.due_at))


def deadline_label(row: Timeout) -> str:
    """Return who has set the deadline of a row, and with which values, as a sentence.

    Empty if its policy computes none, so that it must have been set by hand.
    """
    policy = registry.get(row.policy)
    if policy is None or policy.after is None:
        return ""
    if not row.is_computed:
        return _("Its deadline was set by hand, and does not follow its data.")
    values = values_in(row.terms, policy)
    if not values:
        return _("Its deadline was computed by its policy.")
    shown = "; ".join(f"{path} = {_value_label(value)}" for path, value in values.items())
    return _("Its deadline was computed by its policy with {values}.").format(values=shown)


def _value_label(value: Any) -> str:
    if isinstance(value, Decimal):
        return f"{value.normalize():f}"
    return duration_label(value) if isinstance(value, timedelta) else str(value)


def late_label(seconds: float) -> str:
    """Return how long after its deadline a timeout fired; before it, if an operator had it fired early."""
    words = _("{duration} after the deadline") if seconds >= 0 else _("{duration} before the deadline")
    return words.format(duration=duration_label(abs(seconds)))


def _why_stopped(subject: Subject) -> str:
    """Return why the pending round does not fire although it may be due; empty: its policy is declared, not stopped."""
    if subject.policy is None:
        return undeclared_label()
    state = policy_state(subject.policy, subject.using)
    return stop_label(state.stop, state.until, state.by, state.reason) if state.is_stopped else ""


def undeclared_label() -> str:
    """Return why a row of an undeclared policy does not fire."""
    return _("Its policy is no longer declared: it does not fire until the policy is declared again.")


def stop_label(stop: str, until: datetime | None, by: str, reason: str) -> str:
    """Return why the rows of a policy with this stop do not fire, as a sentence about one of them."""
    text = {
        "paused": _("Its policy is paused until {until} by {who}.")
        if until
        else _("Its policy is paused by {who} until an operator resumes it."),
        "held": _("Its policy is held until {until} by {who}. Its deadlines are moved by the duration of the hold.")
        if until
        else _("Its policy is held by {who}. Its deadlines are moved by the duration of the hold."),
        "releasing": _("Its policy was on hold. It resumes when all deadlines have been moved."),
    }[stop]
    text = text.format(who=operator_label(by), until=_local(until) if until else "")
    return f"{text} ({reason_label(reason)})" if reason else text


def _why_skipped(subject: Subject, pending: Timeout) -> str:
    """Return why the pending round would be skipped at present; empty: nothing prevents it from firing."""
    policy = cast("TimeoutPolicy[Any]", subject.policy)
    if condition_holds(policy, subject.pk, subject.using):
        return ""
    text = _("It is due at {moment}, but the object no longer exists: it will be skipped.")
    if rows_of(policy.concrete_model, subject.using).filter(pk=subject.pk).exists():
        text = _(
            "It is due at {moment}, but the condition of the policy does not hold: "
            "it will be skipped unless that changes."
        )
    return text.format(moment=_local(pending.run_at))


def _why_nothing_is_pending(subject: Subject) -> str:
    policy = subject.policy
    if policy is None:
        return _("Nothing is pending: the policy is no longer declared.")
    if not policy.is_automatic or subject.key:
        return _("Nothing is pending: this policy is scheduled by hand.")
    failures = Failures(policy)
    with failures.counting(subject.pk):
        states = row_states([policy], [subject.pk], subject.using)
        changes = diff(states, Arming(subject.using, get_settings().catch_up))
        by_workers = diff(states, Arming(subject.using, oldest_in_sync(policy)))
    if failures.first is not None:  # code of the application, which often is what should be explained
        error = failures.first[1]
        text = _("Nothing is pending: its deadline cannot be computed. {error}: {message}")
        return text.format(error=type(error).__name__, message=message_of(error))
    why = _why_not_armed(policy, states[0] if states else None, changes, by_workers)
    if changes.too_old and (ahead := advances.total(subject.using)):
        words = _("The clock of this installation is {duration} ahead: deadlines are earlier by it.")
        why += " " + words.format(duration=duration_label(ahead))
    return why


def _why_not_armed(policy: TimeoutPolicy[Any], state: RowState | None, changes: Changes, by_workers: Changes) -> str:
    if state is None:
        return _("Nothing is pending: the object no longer exists.")
    if not state.holds:
        return _("Nothing is pending: the condition of the policy does not hold.")
    if changes.too_old:
        text = _(
            "Nothing is pending: the deadline passed too long ago (CATCH_UP). schedule_timeout() schedules this "
            "one; delayq_sync --policy {policy} --backfill arms all such rounds of the policy."
        )
        return text.format(policy=policy.label)
    if changes.insert and by_workers.too_old:
        return _("Nothing is pending: the deadline passed too long ago for the workers to arm it. Saving arms it.")
    if changes.insert:
        return _("Nothing is pending, but it should be: the next save or sync_timeouts() arms it.")
    if isinstance(policy.since, str) and state.since_at is None:
        return _("Nothing is pending: the time that it counts from is not set, or too far in the future.")
    return _("Nothing is pending: this round is closed, or the object is exempt.")


def _local(at: datetime, precision: str = "seconds") -> str:
    """Return local time: events show milliseconds, sentences about the present show seconds, as the admin does."""
    return clock.local(at).replace(tzinfo=None).isoformat(" ", precision)
