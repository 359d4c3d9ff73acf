"""What operators have put in force for policies: a stop (pause or hold), a delay, guard rails.

`operations` and the brake write it.

Arming reads the delay in the query that reads the row, so the delay is never outdated and costs no query.

A firing reads the stop in the query that locks the row: see `stop_in_force`. `StopCache` is an optimization around it:
rows of stopped policies need not be locked to find out that they are. It also has the guard rails that operators have
set, which a firing follows within two seconds without a statement of its own.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Final, NamedTuple

from django.db import connections
from django.db.models import DurationField, Exists, F, Q, QuerySet, Subquery, Value

from django_delayq.conf import get_settings
from django_delayq.ledger.locking import for_update, is_private
from django_delayq.models import PolicyChange, PolicyControl, PolicySync, Timeout, attempt_expired
from django_delayq.policy.options import Brake, Late
from django_delayq.policy.policies import TimeoutPolicy, get_policies, get_policy, labels_of
from django_delayq.rounds.memory import iso
from django_delayq.sql.now import DatabaseNow, database_now, evaluated_at_execution
from django_delayq.sql.statements import Raw, compiled, selected, sql_of, upsert
from django_delayq.times.lengths import resized
from django_delayq.times.spans import Length

Stop = PolicyControl.Stop


def is_stop_in_force(control: PolicyControl, now: datetime) -> bool:
    """Return whether the policy of `control` is stopped at `now`: not if its pause is over.

    A hold that is over stops it until a worker has moved its deadlines: otherwise timeouts would fire before that.
    """
    until = control.until if control.stop == Stop.PAUSED else None
    return bool(control.stop) and (until is None or until > now)  # as `stop_in_force` in SQL


def resumed_at(control: PolicyControl) -> datetime | None:
    """Return when the last stop of the policy ended, or, of a pause with an end, ends by itself; None: there was none.

    No timeout could fire before, so lateness counts from then on.
    """
    return control.until if control.stop == Stop.PAUSED and control.until else control.resumed_at


def stop_in_force(policy: TimeoutPolicy[Any]) -> Exists:
    """Return an expression for whether `policy` is stopped by the database clock, in the snapshot of the statement.

    A firing reads it in the query that locks the row. A cached answer is not enough: the process may have been
    suspended since then, and would fire a policy that was paused meanwhile.

    EXISTS, not a join: FOR UPDATE would also lock the control, and firings would wait for each other.
    """
    return Exists(stops_in_force().filter(policy__in=policy.labels))


def stops_in_force(using: str | None = None) -> QuerySet[PolicyControl]:
    """Return the controls that stop their policy by the database clock."""
    stops = PolicyControl.objects.using(using).exclude(stop=Stop.NONE)
    return stops.filter(~Q(stop=Stop.PAUSED) | Q(until__isnull=True) | Q(until__gt=DatabaseNow()))


CACHE_SECONDS: Final = 1.0
"""A stop is in force everywhere after it. Without a cache, each firing would read the stops once more."""
GUARDS: Final = ("late", "brake", "shadow")
"""The guard rails that operators can set."""
BRAKE_ACTOR: Final = "brake"
"""The actor of a pause by the brake of the policy itself."""

_OF_STOP: Final = ("stop", "stopped_at", "until", "by", "reason")
_FIELDS: Final[Sequence[Any]] = PolicyControl._meta.concrete_fields
logger = logging.getLogger("django_delayq.operations")


@dataclass(frozen=True, slots=True)
class PolicyState:
    """The state of one policy: what is declared, and what operators have put in force."""

    policy: TimeoutPolicy[Any]
    stop: str = ""
    """`paused`, `held`, `releasing` (its rows are being moved before it resumes), or empty."""
    stopped_at: datetime | None = None
    until: datetime | None = None
    resumed_at: datetime | None = None
    """When a stop has last ended: lateness counts from then."""
    after: timedelta | None = None
    """The delay that an operator has set instead of the declared one."""
    by: str = ""
    reason: str = ""
    changed_at: datetime | None = None
    guards: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """What operators have set instead of the declared guard rails, as `PolicyControl.guards` has it:

    `late`: `{"after": seconds, "then": ...}` or None (off); `brake`: `{"most": ..., "per": seconds}` or None (off);
    `shadow`: percent; `by`: the actor of each. A guard that is missing is in force as declared.
    """

    @property
    def label(self) -> str:
        """Return the policy's present label."""
        return self.policy.label

    @property
    def is_stopped(self) -> bool:
        """Return whether its timeouts do not fire."""
        return bool(self.stop)

    @property
    def is_braked(self) -> bool:
        """Return whether its own brake has paused it."""
        return self.stop == Stop.PAUSED and self.by == BRAKE_ACTOR

    @property
    def length(self) -> Length | None:
        """Return the delay in force, a timedelta or a span; None if it is not the same for every object."""
        declared = self.policy.fixed_length
        if self.after is None:
            return declared
        return self.after if declared is None else resized(declared, self.after)

    @property
    def delay(self) -> timedelta | None:
        """Return the delay in force if it is a timedelta, and the same for every object."""
        return self.length if isinstance(self.length, timedelta) else None

    @property
    def late(self) -> Late | None:
        """Return the limit of lateness in force; None: there is none."""
        if "late" not in self.guards:
            return self.policy.late
        given = self.guards["late"]
        return None if given is None else Late(timedelta(seconds=given["after"]), given["then"])

    @property
    def brake(self) -> Brake | None:
        """Return the brake in force; None: there is none."""
        if "brake" not in self.guards:
            return self.policy.brake
        given = self.guards["brake"]
        return None if given is None else Brake(given["most"], timedelta(seconds=given["per"]))

    @property
    def shadow(self) -> int:
        """Return the percentage of objects in shadow mode: 100 if all of them are, 0 if it is off."""
        return int(self.guards.get("shadow", 100 if self.policy.shadow else 0))

    def set_by(self, guard: str) -> str:
        """Return the actor who has set `guard`, "late", "brake" or "shadow"; empty: it is as declared."""
        return str(self.guards.get("by", {}).get(guard, "")) if guard in self.guards else ""


def delay_in_force(policy: TimeoutPolicy[Any], using: str) -> Any:
    """Return an expression for the delay that an operator has set instead of the declared one, or NULL."""
    if policy.after is None:
        return Value(None, output_field=DurationField())
    return Subquery(_controls_of(policy, using).values("after")[:1], output_field=DurationField())


def read_delay(policy: TimeoutPolicy[Any], using: str) -> timedelta | None:
    """Return the same as `delay_in_force`, from a query of its own. Raises the errors of the database."""
    found = _delay.rows(using, policy)
    return found[0][0] if found else None


@compiled
def _delay(using: str, policy: TimeoutPolicy[Any]) -> QuerySet[PolicyControl, Any]:
    return _controls_of(policy, using).values_list("after")[:1]


def holds_ended(policy: TimeoutPolicy[Any], since: datetime, using: str) -> list[tuple[datetime, datetime]]:
    """Return begin and end of the holds of `policy` that ended after `since`, and moved deadlines."""
    changes = PolicyChange.objects.using(using).filter(policy__in=policy.labels, at__gt=since)
    return list(changes.filter(held_from__isnull=False).values_list("held_from", "held_until"))


def policy_states(using: str) -> list[PolicyState]:
    """Return the state of every declared policy, ordered by label, in one query. Expired pauses are left out."""
    changes = read_stop_changes(using)
    return [_state_of(policy, changes) for policy in sorted(get_policies(), key=lambda policy: policy.label)]


def policy_state(policy: str | TimeoutPolicy[Any], using: str) -> PolicyState:
    """Return the state of `policy`, a policy or its label, in one query. Raises UnknownPolicy."""
    return _state_of(get_policy(policy), read_stop_changes(using))


def lock_control(policy: TimeoutPolicy[Any], using: str) -> tuple[PolicyControl, datetime]:
    """Lock and return the control of `policy`, without a pause that is over; create it if it does not exist.

    Of several labels the newest control. A stop under another label becomes that of the returned one: `resume` must end
    every stop that firings see. Also return the time of the database.
    """
    rows = PolicyControl.objects.using(using)
    # One by one, by their keys: MySQL and MariaDB would lock every row of a table that is so small that they scan it.
    labels = _controls_of(policy, using).values_list("policy", flat=True)
    controls = [for_update(rows.filter(policy=label), using).get() for label in sorted(labels)]
    if not controls:
        # Several processes may create it at the same time; an upsert lets all of them continue with the row of the
        # first. It updates rather than ignores: for an ignored conflict MySQL and MariaDB take shared locks, which then
        # deadlock.
        upsert(rows, [PolicyControl(policy=policy.label, changed_at=database_now(using))], ("policy",), ("policy",))
        controls = [for_update(rows.filter(policy=policy.label), using).get()]
    control, now = _joined(controls), database_now(using)
    if former := [each.pk for each in controls if each is not control and each.stop]:
        rows.filter(pk__in=former).update(stop=Stop.NONE, stopped_at=None, until=None)
        control.save(using=using)
    if not is_stop_in_force(control, now):
        control.resumed_at, control.stop, control.until = resumed_at(control), Stop.NONE, None
    return control, now


def put_stop(control: PolicyControl, change: PolicyChange, stop: str, until: datetime | None, **details: Any) -> None:
    """Put `stop` in force, and note it in the new `change` with `details`. The caller saves both."""
    change.details = {"until": iso(until), **details}
    if control.stop != stop:
        control.stopped_at = change.at
    control.stop, control.until = stop, until
    change.what, change.finished_at = PolicyChange.What(stop), change.at


def _joined(controls: Sequence[PolicyControl]) -> PolicyControl:
    """Return the newest of the controls of one policy, with the stop among theirs that ends last.

    There are several if policies that had controls were joined into one.
    """
    newest = max(controls, key=lambda control: (control.changed_at, control.pk))
    stops = [control for control in controls if control.stop]
    if stops:
        last = max(stops, key=lambda control: (control.until is None, control.until or control.changed_at))
        for name in _OF_STOP:
            setattr(newest, name, getattr(last, name))
    return newest


class Stopped(dict[str, "datetime | None"]):
    """The present labels of stopped policies, each with the datetime at which its pause ends by itself.

    None for a hold, also for one with an end: it stops the policy until its deadlines have been moved.
    """

    def all_labels(self) -> list[str]:
        """Return the present and former labels under which the ledger may have rows of these policies."""
        return sorted({each for label in self for each in labels_of(label)})


class Guards(NamedTuple):
    """The guard rails of one policy that a firing follows."""

    late: Late | None = None
    """None also with `then="fire"`."""
    brake: Brake | None = None
    shadow: int = 0
    changed_at: datetime | None = None
    """When an operator, or a brake, last changed the policy. A brake counts from then on."""
    quiet: TimeoutPolicy[Any] | None = None
    """The policy itself, if it has `within=`: it fires nothing outside of these opening hours."""
    resumed_at: datetime | None = None
    """When a stop has last ended: lateness counts from then."""


class StopChanges(NamedTuple):
    """What operators have changed, and what else a worker reads every few seconds beside due timeouts."""

    asked_at: float
    """When it was asked, by `time.monotonic()`."""
    now: datetime
    """The time of the database."""
    has_expired: bool
    """Whether a row is `firing` although its worker has died."""
    wants_sync: bool
    """Whether a write that concerns very many objects has asked for a pass of the sync, which has not begun."""
    stopped: Stopped
    controls: dict[str, PolicyControl]
    """What operators have changed, by the present label of the policy."""
    guards: dict[TimeoutPolicy[Any], Guards]
    """What `StopCache.guards` has computed of them."""

    def ended_holds(self) -> list[PolicyControl]:
        """Return the controls of policies whose hold has reached its end, and which no process has resumed yet."""
        held = [control for control in self.controls.values() if control.stop == Stop.HELD]
        return [control for control in held if control.until is not None and control.until <= self.now]

    def stopped_now(self) -> set[str]:
        """Return the present labels of the policies that are stopped, without those whose pause is over by now."""
        now = self.now + timedelta(seconds=time.monotonic() - self.asked_at)
        return {label for label, until in self.stopped.items() if until is None or until > now}


def read_stop_changes(using: str) -> StopChanges:
    """Read all of it in one query, which is not cached. Raises the database's errors."""
    asked_at = time.monotonic()  # not when the answer arrives: a slow answer would be cached for longer
    rows = _controls.rows(using, get_settings().longest_lease)
    *_, now, has_expired, wants_sync = rows[0]
    changes = StopChanges(asked_at, now, bool(has_expired), bool(wants_sync), Stopped(), {}, {})
    by_label: dict[str, list[PolicyControl]] = {}
    for row in rows:
        if row[0] is not None:  # else there are no controls
            control = PolicyControl.from_db(using, [field.attname for field in _FIELDS], row[: len(_FIELDS)])
            by_label.setdefault(labels_of(control.policy)[0], []).append(control)
    for label, controls in by_label.items():
        control = changes.controls[label] = _joined(controls)
        if is_stop_in_force(control, now):
            changes.stopped[label] = control.until if control.stop == Stop.PAUSED else None
    return changes


class StopCache:
    """Which policies are stopped by the database clock, and the guard rails in force, cached for a second.

    One for each process. Every method raises the errors of the database.
    """

    def __init__(self) -> None:
        self._answers: dict[str, StopChanges] = {}

    def read(self, using: str) -> Stopped:
        """Query the database; return what is stopped."""
        return self.read_stop_changes(using).stopped

    def read_stop_changes(self, using: str) -> StopChanges:
        """Query the database, and keep the answer for the other methods, unless only this transaction may see it so."""
        changes = read_stop_changes(using)
        if not is_private(using):
            self._answers[using] = changes
        return changes

    def last(self, using: str) -> StopChanges:
        """Return the last answer, however old: a worker asks every few seconds."""
        return self._answers.get(using) or self.read_stop_changes(using)

    def recent(self, using: str) -> StopChanges:
        """Return an answer that is at most a second old."""
        answer = self._answers.get(using)
        if answer is None or time.monotonic() - answer.asked_at >= CACHE_SECONDS:
            answer = self.read_stop_changes(using)
        return answer

    def guards(self, policy: TimeoutPolicy[Any], using: str) -> Guards:
        """Return the guard rails of `policy` that were in force a second ago or later."""
        answer = self.recent(using)
        found = answer.guards.get(policy)
        if found is None:
            state = _state_of(policy, answer)
            late = None if state.late is None or state.late.then == "fire" else state.late
            found = answer.guards[policy] = Guards(
                *(late, state.brake, state.shadow, state.changed_at),
                quiet=None if policy.within is None else policy,
                resumed_at=state.resumed_at,
            )
        return found

    def confirmed(self, using: str, labels: Collection[str] | None = None) -> Stopped:
        """Return what is stopped; with `labels`, nothing unless one of these present labels is stopped.

        A stop that ended before the call is never in the answer, so that a policy that was just resumed is not left
        out for another minute. A stop that began within the last second may be missing.
        """
        cached = self.recent(using).stopped
        is_any = bool(cached) if labels is None else not cached.keys().isdisjoint(labels)
        return self.read(using) if is_any else Stopped()

    def forget(self) -> None:
        """Query the database at the next call, because this process has just changed a control."""
        self._answers.clear()

    def forget_stops(self) -> None:
        """Do so if a policy was stopped when it was queried last: it may have been resumed."""
        if any(answer.stopped for answer in list(self._answers.values())):
            self.forget()


stop_cache = StopCache()


def valid_guards(policy: TimeoutPolicy[Any], guards: Any) -> dict[str, Any]:
    """Return `guards`, or {} if they were written by hand and are wrong, so that no firing and no page fails."""
    state = PolicyState(policy, guards=guards)
    try:
        _ = state.late, state.brake, state.shadow, [state.set_by(guard) for guard in GUARDS]
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError):
        words = "The guard rails of %s in the ledger are wrong; the declared ones are in force"
        logger.exception(words, policy.label, extra={"event": "guards_wrong", "policy": policy.label})
        return {}
    return dict(guards)


@compiled
def _controls(using: str, longest_lease: timedelta) -> Raw:
    """Select all controls, with the time, and whether rows have expired and a sync is wanted; at least one row."""
    connection = connections[using]
    quoted, time_field = connection.ops.quote_name, PolicyControl._meta.get_field("changed_at")
    firing = Timeout.objects.using(using).filter(state=Timeout.State.FIRING, settled_at=None)
    expired, parameters = sql_of(firing.filter(attempt_expired(longest_lease)).values("pk"), using)
    asked = PolicySync.objects.using(using).filter(asked_at__isnull=False)
    asked = asked.filter(Q(began_at__isnull=True) | Q(began_at__lte=F("asked_at")))
    wanted, of_wanted = sql_of(asked.values("pk"), using)
    compiler = firing.query.get_compiler(using)
    with evaluated_at_execution():
        now, given = compiler.compile(DatabaseNow())
    columns = [selected(f"control.{quoted(field.column)}", field, connection) for field in _FIELDS]
    columns.append(selected(now, time_field, connection))
    sql = (
        f"SELECT {', '.join(columns)}, EXISTS ({expired}), EXISTS ({wanted}) FROM (SELECT 1 AS one) one"
        f" LEFT JOIN {quoted(PolicyControl._meta.db_table)} control ON 1 = 1"
    )
    return Raw(sql, [*given, *parameters, *of_wanted], [*_FIELDS, time_field])


def _controls_of(policy: TimeoutPolicy[Any], using: str) -> QuerySet[PolicyControl]:
    """Return the controls of `policy`, newest first, also those under a former label."""
    return PolicyControl.objects.using(using).filter(policy__in=policy.labels).order_by("-changed_at", "-id")


def _state_of(policy: TimeoutPolicy[Any], changes: StopChanges) -> PolicyState:
    control = changes.controls.get(policy.label)
    if control is None:
        return PolicyState(policy)
    names = ["after", "changed_at"]
    if not control.stop or is_stop_in_force(control, changes.now):
        names += _OF_STOP
    values = {name: getattr(control, name) for name in names} | {"resumed_at": resumed_at(control)}
    return PolicyState(policy, guards=valid_guards(policy, control.guards), **values)
