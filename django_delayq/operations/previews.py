"""What an operation would do, for the page, command or response in which an operator confirms it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any, Final

from django.db.models import Count as RowCount
from django.db.models import DateTimeField, DurationField, ExpressionWrapper, F, Q, QuerySet, Value
from django.utils.translation import gettext as _
from django.utils.translation import ngettext, ngettext_lazy

from django_delayq.arming.holding import Facts
from django_delayq.ledger.controls import PolicyState, policy_state, policy_states
from django_delayq.ledger.paging import Page, each_page
from django_delayq.ledger.routing import database_of
from django_delayq.ledger.search import NOTHING, Count, count
from django_delayq.models import WAITING, PolicyChange, PolicyControl, Timeout
from django_delayq.operations.changes import moves_of_hold
from django_delayq.operations.policies import Mode, new_delay
from django_delayq.operations.replanning import Plans
from django_delayq.operations.runner import Refusal, Result
from django_delayq.operations.selection import names_of
from django_delayq.policy.options import Brake
from django_delayq.policy.policies import TimeoutPolicy, get_policy
from django_delayq.rounds.events import Plan
from django_delayq.sql.now import database_now
from django_delayq.sql.statements import CHUNK
from django_delayq.times import clock
from django_delayq.times.lengths import duration_label, length_label
from django_delayq.times.spans import Length

State, Stop = Timeout.State, PolicyControl.Stop

MAX_COUNT: Final = 100_000
"""A preview counts, and examines, at most this many rows."""
MAX_COMPUTED: Final = 10_000
"""So many deadlines are computed for a preview, in about a second: a page must not take longer."""


DEADLINES_CHANGE: Final = ngettext_lazy("{n} deadline will change.", "{n} deadlines will change.")


@dataclass(frozen=True, slots=True)
class Preview:
    """What an operation would do now. The admin, commands and REST show it to the operator who confirms it.

    Attributes:
        changed: how many timeouts it would change, or concern.
        will: what happens to these `{n}`, by number; None: nothing but what follows.
        due: how many are due and would fire at once; None: it makes none fire.
        ids: of the timeouts that would fire at once, or else would change, the three that are due first.
        refused: how many would stay unchanged, by reason.
        brakes: by policy, the brakes that would stop it again, because they allow fewer firings than are due.
        notes: what else will happen, in sentences.
    """

    changed: Count = NOTHING
    will: Any = None
    due: Count | None = None
    ids: Sequence[int] = ()
    refused: Mapping[Refusal, int] = field(default_factory=dict)
    brakes: Mapping[str, Brake] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def names(self, user: Any = None) -> list[str]:
        """Return what people call the objects of `ids`: see `selection.names_of`."""
        using = database_of(Timeout)
        rows = Timeout.objects.using(using).filter(pk__in=self.ids).only("content_type", "object_id", "due_at")
        found = sorted(rows, key=lambda row: (row.due_at, row.pk))
        names = names_of(found, using, user)
        return [names.get((row.content_type_id, row.object_id)) or row.object_id for row in found]

    def sentences(self, user: Any = None) -> list[str]:
        """Return it in the language that is active."""
        said = [] if self.will is None else [str(self.will % self.changed.value).format(n=self.changed)]
        if self.due is not None:
            words = ngettext("{n} is due and fires now.", "{n} are due and fire now.", self.due.value)
            said.append(words.format(n=self.due) if self.due.value else _("None is due now."))
        if names := self.names(user):
            said.append(_("The first: {names}.").format(names=", ".join(names)))
        for label, brake in self.brakes.items():
            words = _("The brake of {policy} allows {n} in {duration}: it will stop it again. Change it first.")
            said.append(words.format(policy=label, n=brake.most, duration=duration_label(brake.per)))
        for why, n in self.refused.items():
            words = ngettext(
                "{n} of them will be left unchanged: {why}", "{n} of them will be left unchanged: {why}", n
            )
            said.append(words.format(n=n, why=why.label))
        return [*said, *self.notes]


def preview_timeouts(result: Result, will: Any) -> Preview:
    """Return the preview of an operation on timeouts, of which the dry run has this result."""
    states = policy_states(database_of(Timeout)) if result.due else []
    due = {**result.due, **{state.label: 0 for state in states if state.is_stopped}}
    brakes = {label: brake for state in states for label, brake in _stopping(state, due.get(state.label, 0)).items()}
    fires = Count(sum(due.values())) if any(due.values()) else None
    return Preview(Count(result.changed), will, fires, result.first, result.refused, brakes)


def preview_waiting(policy: str | TimeoutPolicy[Any], **_arguments: Any) -> Preview:
    """Return the preview of a stop, or of a guard rail: how many timeouts it concerns."""
    found = get_policy(policy)
    rows = rows_of(found, database_of(found.concrete_model))
    will = ngettext_lazy("{n} timeout is pending.", "{n} timeouts are pending.")
    return Preview(count(rows, MAX_COUNT), will, ids=_first(rows))


def preview_resume(policy: str | TimeoutPolicy[Any], *, shift: bool = True) -> Preview:
    """Return what `resume` would do now: how many deadlines it moves, and how many timeouts fire at once.

    After a hold it computes the deadlines of at most `MAX_COMPUTED` rows. Of limits of lateness, it knows timedeltas.
    """
    found = get_policy(policy)
    using = database_of(found.concrete_model)
    state, now = policy_state(found, using), database_now(using)
    due = rows_of(found, using).filter(run_at__lte=now)
    if not state.is_stopped:
        return Preview(notes=(_("{policy} is not stopped.").format(policy=found.label),))
    if state.stop == Stop.HELD and shift:
        n = count(due, MAX_COUNT)
        change = PolicyChange(held_from=state.stopped_at, held_until=min(state.until or now, now))
        words = ngettext("If deadlines are not moved, {n} fires.", "If deadlines are not moved, {n} fire.", n.value)
        return replace(_after_hold(found, state, using, change), notes=(words.format(n=n),) * bool(n.value))
    late, notes = state.late, list[str]()
    if late is not None and late.then != "fire" and isinstance(late.after, timedelta):
        is_late = Q(attempts=0, is_requested=False, step="", run_at__lt=now - late.after)
        n, due = count(due.filter(is_late), MAX_COUNT), due.exclude(is_late)
        words = ngettext("{n} is too late, and becomes: {state}", "{n} are too late, and become: {state}", n.value)
        notes += [words.format(n=n, state=(State.DEAD if late.then == "dead" else State.SKIPPED).label)] * bool(n.value)
    fires = count(due, MAX_COUNT)
    return Preview(due=fires, ids=_first(due), brakes=_stopping(state, fires.value), notes=tuple(notes))


def _after_hold(policy: TimeoutPolicy[Any], state: PolicyState, using: str, change: PolicyChange) -> Preview:
    """Return what the end of a hold does."""
    moved, examined, due = 0, 0, list[tuple[datetime, int]]()

    def examine(page: Page) -> int:
        moves = {row.pk: run_at for row, _due_at, run_at in moves_of_hold(Facts.of_page(page), change, policy)}
        at = {row.pk: moves.get(row.pk, row.run_at) for row in page.rows if row.state == State.PENDING}
        due.extend((run_at, pk) for pk, run_at in at.items() if run_at <= change.held_until)
        return len(moves)

    rows = Timeout.objects.using(using).waiting().of_labels(policy.labels)
    for number in each_page(rows, examine, by_id="pk", dry_run=True):
        moved, examined = moved + number, examined + CHUNK
        if examined >= MAX_COMPUTED:
            break
    fires, first = Count(len(due), examined >= MAX_COMPUTED), tuple(row_id for _run_at, row_id in sorted(due)[:3])
    return Preview(fires._replace(value=moved), DEADLINES_CHANGE, fires, first, brakes=_stopping(state, len(due)))


def _stopping(state: PolicyState, due: int) -> dict[str, Brake]:
    """Return, by its label, the brake of a policy that would stop it when `due` timeouts fire; empty: none would."""
    return {state.label: state.brake} if state.brake is not None and due > state.brake.most else {}


def rows_of(policy: TimeoutPolicy[Any], using: str, state: str = Timeout.State.PENDING) -> QuerySet[Timeout]:
    """Return the rows of `policy` in `state`, the soonest first."""
    rows: QuerySet[Timeout] = Timeout.objects.using(using).filter(state=state).of_labels(policy.labels)
    return rows.order_by("policy", "state", "run_at", "id")


def _first(rows: QuerySet[Timeout], most: int = 3) -> tuple[int, ...]:
    return tuple(rows.values_list("pk", flat=True)[: min(most, 3)])  # as many as a sentence names, if there are so many


@dataclass(frozen=True, slots=True, kw_only=True)
class DelayPreview(Preview):
    """The effect of another delay on pending timeouts.

    Attributes:
        before: the delay in force; None: it differs from object to object.
        after: the new delay; None: as before.
        pending: the number of pending and held timeouts that the change concerns, among the first `MAX_COUNT`.
        overdue: how many of the new deadlines of pending ones have passed; None: it cannot be computed beforehand.
        is_capped: there are more than `MAX_COUNT`.
        hand_set: how many others keep their deadlines, because they were set by hand, among the same.
    """

    before: Length | None
    after: Length | None
    mode: Mode
    overdue: int | None
    hand_set: int = 0

    @property
    def pending(self) -> int:
        return self.changed.value

    @property
    def is_capped(self) -> bool:
        return self.changed.is_capped


def preview_delay(
    policy: str | TimeoutPolicy[Any], after: timedelta | None, mode: Mode = "recompute", *, hand_set: bool = False
) -> DelayPreview:
    """Return what `change_delay` would do. Writes nothing, and raises the same."""
    found = get_policy(policy)
    using = database_of(found.concrete_model)
    before, now = policy_state(found, using), clock.now()
    new, shift = new_delay(found, after, mode, before.delay)
    follows = Q(terms__isnull=False) if mode == "recompute" and not hand_set else Q()
    is_due = Q(due_at__lte=now - shift) if mode != "recompute" else None if new is None else _is_overdue(new, now)
    wanted = {"examined": Q(), "number": follows, "overdue": follows & (is_due or Q())}
    # In one reading of the index. If each were counted alone, the database would look for the first of them everywhere.
    counts = {name: RowCount("pk", filter=condition) for name, condition in wanted.items()}
    seen = {state: rows_of(found, using, state)[: MAX_COUNT + 1].aggregate(**counts) for state in WAITING}
    examined, number = (sum(each[name] for each in seen.values()) for name in ("examined", "number"))
    of_pending, pending = seen[State.PENDING], rows_of(found, using).filter(follows)
    overdue = None if is_due is None else of_pending["overdue"]
    length = PolicyState(found, after=after).length
    if overdue is None and length is not None and examined <= MAX_COMPUTED:  # a span
        overdue = sum(each_page(pending, lambda page: _count_overdue(page, found, after, now), dry_run=True))
    kept = min(examined - number, MAX_COUNT)
    keeps = mode == "keep"
    fires = None if overdue is None or keeps or before.is_stopped else Count(overdue)
    own: dict[str, Any] = {"before": before.length, "after": length, "mode": mode, "overdue": overdue, "hand_set": kept}
    return DelayPreview(
        Count(min(number, MAX_COUNT), examined > MAX_COUNT),
        ngettext_lazy("{n} deadline stays.", "{n} deadlines stay.") if keeps else DEADLINES_CHANGE,
        due=fires,
        ids=_first(pending.filter(is_due), overdue) if is_due and overdue else _first(pending, of_pending["number"]),
        brakes=_stopping(before, fires.value if fires else 0),
        notes=_told(before.length, length, kept, overdue),
        **own,
    )


def _told(before: Length | None, after: Length | None, hand_set: int, overdue: int | None) -> tuple[str, ...]:
    """Return what else a change of the delay means, in sentences."""
    old, new = (_("depends on the object") if each is None else length_label(each) for each in (before, after))
    told = [_("Delay in force: {delay}.").format(delay=old), _("New delay: {delay}.").format(delay=new)]
    if hand_set:
        words = ngettext(
            "{n} other deadline was set by hand, and stays.",
            "{n} other deadlines were set by hand, and stay.",
            hand_set,
        )
        told.append(words.format(n=hand_set))
    if overdue is None:
        told.append(_("It is unknown how many of them would be due immediately."))
    return tuple(told)


def _is_overdue(delay: timedelta, now: datetime) -> Q:
    """Return the condition that a row would be due by now if its deadline were computed again with this delay.

    By how much holds have moved a computed deadline, they move the new one.
    """
    begun, due_at, computed = Value(now - delay, DateTimeField()), F("due_at"), F("computed_due_at")
    moved = ExpressionWrapper(due_at - computed, DurationField())
    is_moved = Q(terms__isnull=False, due_at__gt=computed)
    begun_if_moved = ExpressionWrapper(begun - moved, DateTimeField())
    # A row without `since` counts from when it was scheduled, and is never due before.
    unset = Q(since_at__isnull=True) if delay >= timedelta(0) else Q(pk__in=[])
    return Q(
        Q(~is_moved, Q(since_at__lte=begun) | (unset & Q(created_at__lte=begun)))
        | Q(is_moved, Q(since_at__lte=begun_if_moved) | (unset & Q(created_at__lte=begun_if_moved)))
    )


def _count_overdue(page: Page, policy: TimeoutPolicy[Any], after: timedelta | None, now: datetime) -> int:
    """Return how many of the rows of `page` would be due by now if their deadlines were computed again."""
    plans = Plans(Facts.of_page(page), page.rows, {policy: after})
    found = [plan for row in page.rows if isinstance(plan := plans.of(row), Plan)]
    return sum(plan.due_at <= now for plan in found)
