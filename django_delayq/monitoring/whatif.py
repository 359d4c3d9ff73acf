"""Compute from the ledger what another delay of a policy would have done to its past rounds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final, NamedTuple

from django.db.models import Q
from django.utils.translation import gettext as _

from django_delayq.arming.row_state import objects_of_policy
from django_delayq.ledger.controls import PolicyState, policy_state
from django_delayq.ledger.planned import acts_at
from django_delayq.ledger.rollups import read_settled
from django_delayq.ledger.routing import database_of
from django_delayq.ledger.search import LAST_SETTLED
from django_delayq.models import Timeout, ending_of
from django_delayq.operations.policies import check_delay
from django_delayq.operations.selection import where as about_where
from django_delayq.policy.policies import TimeoutPolicy, get_policy
from django_delayq.rounds.memory import stops_of
from django_delayq.sql.key_types import keys_in
from django_delayq.sql.now import database_now
from django_delayq.times import clock
from django_delayq.times.clock import within_calendar
from django_delayq.times.spans import Length

LAST: Final = timedelta(days=30)
"""Which rounds count by default: those that the ledger keeps by default."""
KNOWN_END: Final = frozenset({"in_time", "ended_late", "cancelled"})
"""When these rounds would have ended is known, whatever the deadline had been: their end does not depend on it."""


class PastRound(NamedTuple):
    """The columns of a settled row that are needed."""

    settled_at: datetime
    id: int
    policy: str
    state: str
    cause: str
    due_at: datetime
    created_at: datetime
    since_at: datetime | None
    terms: str | None
    stops: Any
    remaining: timedelta | None
    keeps_deadline: bool
    object_id: str
    key: str


@dataclass(frozen=True, slots=True)
class WhatIf:
    """The answer of `what_if`.

    Attributes:
        policy: the label of the policy.
        before, after: the delay in force, and the other one; None: it differs from object to object.
        first: the rounds were settled since then.
        rounds: how many there were. Of each `since` of an object, those that would not have begun do not count.
        in_time: how many ended by their condition before their deadline.
        fired: how many fired.
        ended_first: how many that ended in time would have fired first, with the other delay. Exact. An end at the very
            time of the other deadline is in time, as in reports.
        would_fire, would_fire_at_most: how many would have fired with the other delay: between these two numbers. They
            are equal for a shorter delay. With a longer one, it is unknown when rounds that fired would have ended.
        hand_set: how many have a deadline that was set by hand, which the delay does not change.
        unknown: how many have no other deadline: their object is gone or exempt, or its calendar raises. They count as
            they were.
    """

    policy: str
    before: Length | None
    after: Length | None
    first: datetime
    rounds: int = 0
    in_time: int = 0
    fired: int = 0
    ended_first: int = 0
    would_fire: int = 0
    would_fire_at_most: int = 0
    hand_set: int = 0
    unknown: int = 0

    @property
    def is_exact(self) -> bool:
        """Return whether the number of rounds that would have fired is known."""
        return self.would_fire == self.would_fire_at_most


def what_if(
    policy: str | TimeoutPolicy[Any],
    after: timedelta | None,
    *,
    last: timedelta = LAST,
    where: Iterable[str] = (),
    limit: int | None = None,
) -> WhatIf:
    """Return what the delay `after` would have done to the rounds of a policy that were settled in the last time.

    The deadline of each round is computed as the policy does, from its `since`, in the calendar and zone of a declared
    span, with the values that its object has now. Nothing is written.

    Args:
        policy: the policy, or its label.
        after: the other delay, see `operations.change_delay`; None: the declared one.
        last: how long ago the rounds were settled at most. Pruned ones are missing.
        where: only rounds of objects with these values: `channel__merchant=7`.
        limit: only the last rounds, of so many rows that are read at most; see `WhatIf.first`.

    Raises:
        UnknownPolicy: there is no such policy.
        ValueError: `where` has no such path, or no such value.
        InvalidDelay: the policy has no such delay, as for `operations.change_delay`.
    """
    found = get_policy(policy)
    check_delay(found, after)
    using = database_of(found.concrete_model)
    now = database_now(using)
    first = within_calendar(now, -last) or now
    rows = Timeout.objects.using(using)
    about = about_where(found.concrete_model, where, using, only=found.concrete_model) if where else Q()
    if limit is None:
        pages: Iterable[Sequence[PastRound]] = read_settled(rows.filter(about), first, now, PastRound)
    else:
        newest = rows.filter(about, settled_at__gte=first, settled_at__lt=now).order_by(*LAST_SETTLED.fields)
        page = [PastRound(*values) for values in reversed(newest.values_list(*PastRound._fields)[:limit])]
        pages, first = [page], page[0].settled_at if len(page) == limit else first
    lived = _Relived(found, after, using)
    for rounds in pages:
        lived.add([each for each in rounds if each.policy in found.labels])
    before, length = policy_state(found, using).length, PolicyState(found, after=after).length
    return WhatIf(found.label, before, length, first, **lived.counts)


def sentences(found: WhatIf) -> list[str]:
    """Return translated sentences for an operator who is about to change the delay."""
    lived = _("Rounds that were settled since {time}: {n}. In time: {in_time}. Fired: {fired}.")
    time = f"{clock.local(found.first):%Y-%m-%d %H:%M}"
    lines = [lived.format(time=time, n=found.rounds, in_time=found.in_time, fired=found.fired)]
    lines.append(_("With this delay, of those in time would have fired first: {n}.").format(n=found.ended_first))
    if found.is_exact:
        lines.append(_("Would have fired in total: {n}.").format(n=found.would_fire))
    else:
        words = _("Would have fired in total: {n} to {most}. It is unknown when those that fired would have ended.")
        lines.append(words.format(n=found.would_fire, most=found.would_fire_at_most))
    if found.hand_set:
        lines.append(_("Their deadline was set by hand, and stays: {n}.").format(n=found.hand_set))
    if found.unknown:
        lines.append(_("Their other deadline is unknown: {n}.").format(n=found.unknown))
    return lines


class _Relived:
    """Counts what would have become of rounds, which are given in the order in which they were settled."""

    def __init__(self, policy: TimeoutPolicy[Any], after: timedelta | None, using: str) -> None:
        self._policy, self._after, self._using = policy, after, using
        self._closed = set[tuple[str, str, datetime | None]]()
        """The objects, keys and `since` of rounds that would have fired: they are not armed again."""
        self.counts = Counter[str]()

    def add(self, rounds: Collection[PastRound]) -> None:
        """Count some rounds."""
        policy, objects, pks = self._policy, {}, dict[str, Any]()
        if policy.needs_object or policy.within is not None or policy.grace is not None:
            pks = keys_in(policy.concrete_model, {each.object_id for each in rounds})
            objects = objects_of_policy(policy, set(pks.values()), self._using)
        for each in rounds:
            self._add(each, objects.get(pks.get(each.object_id)))

    def _add(self, row: PastRound, obj: Any) -> None:
        place = (row.object_id, row.key, row.since_at)
        if place in self._closed:
            return
        counts, ending = self.counts, ending_of(row)
        counts["rounds"] += 1
        counts.update({name: 1 for name in ("in_time", "fired") if name == ending})
        fires_at = self._fires_at(row, obj)
        if fires_at is None or row.terms is None:
            counts["hand_set" if row.terms is None else "unknown"] += 1
            would_fire = at_most = int(ending == "fired")
        elif ending in KNOWN_END:
            would_fire = at_most = int(fires_at < row.settled_at)
        else:  # its condition held until then, but it is unknown for how long it would have held
            would_fire, at_most = int(fires_at <= row.settled_at), 1
        counts["ended_first"] += would_fire if ending == "in_time" else 0
        counts["would_fire"] += would_fire
        counts["would_fire_at_most"] += at_most
        if would_fire and row.since_at is not None:
            self._closed.add(place)

    def _fires_at(self, row: PastRound, obj: Any) -> datetime | None:
        """Return when the round would have fired at the earliest: not before it was armed; None: unknown."""
        policy = self._policy
        if row.terms is None or (obj is None and policy.needs_object):
            return None
        try:
            due_at = policy.due_of(obj, row.since_at or row.created_at, self._after)
            if due_at is None:
                return None
            due_at = policy.own_time(obj, self._after).after_stops(due_at, stops_of(row.stops))
            return max(policy.opening(acts_at(policy, due_at, obj), obj), row.created_at)
        except Exception:  # noqa: BLE001 - of the application: a callable, or a calendar
            return None
