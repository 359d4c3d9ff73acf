"""The filters of the list of timeouts, and for each combination the scans of an index that answer most of it."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

from django.contrib import admin
from django.contrib.admin.options import IncorrectLookupParameters
from django.db.models import Q, QuerySet
from django.http import HttpRequest
from django.utils import timezone
from django.utils.translation import gettext_lazy as _

from django_delayq.admin import render
from django_delayq.conf import ConfigError
from django_delayq.ledger import search
from django_delayq.ledger.routing import database_of
from django_delayq.models import Timeout
from django_delayq.operations import selection
from django_delayq.operations.selection import CONDITIONS
from django_delayq.policy.policies import declared_queues, get_policies, labels_of
from django_delayq.sql.now import DatabaseNow
from django_delayq.times import clock

State = Timeout.State

MAX_LABELS: Final = 100
"""Each is a query of its own within one statement. Labels that nothing declares any more may be many."""
STATE, POLICY, DUE, OBJECT, RELATED = "state__exact", "policy", "due", "object", "related"
DEADLINE: Final[tuple[str, ...]] = ("due_at__gte", "due_at__lt")
SET_BY: Final = {"policy": _("policy"), "hand": _("hand")}
"""Who may have set a deadline."""
DUE_LABELS: Final = {
    "hour": _("due in the next hour"),
    "overdue": _("overdue"),
    "failing": _("failing: an attempt has failed"),
    "waiting": _("pending, soonest first"),
    "dead": _("dead"),
}
DUE_STATES: Final = {**dict.fromkeys(DUE_LABELS, State.PENDING), "dead": State.DEAD}
"""The state of the rows of each choice of `DueFilter` and `mixins.TimeoutsFilter`."""


def due_condition(choice: str) -> Q:
    """Return the condition for a choice of `DueFilter` or `mixins.TimeoutsFilter`."""
    if choice not in DUE_STATES:
        return Q()
    more = CONDITIONS[choice](True) if choice in CONDITIONS else Q()
    soon = Q(run_at__gt=DatabaseNow(), run_at__lte=clock.now() + timedelta(hours=1))
    return Q(state=DUE_STATES[choice]) & (soon if choice == "hour" else more)


def condition(name: str, value: Any) -> Q:
    """Return the condition on rows of a filter. What names no object has no rows."""
    with suppress(ConfigError, LookupError, ValueError):
        return due_condition(value) if name == DUE else CONDITIONS[name](value)
    return Q(pk__in=[])


def object_label(value: str, user: Any) -> str:
    """Return how pages name the object `app.model:id` to this user: its model, and its name or id."""
    model, (label, _colon, object_id) = selection.model_named(value), value.partition(":")
    if model is None:
        return f"{label} {object_id}"
    name = selection.name_of(model, object_id, database_of(model), user)
    return render.titled(str(model._meta.verbose_name), object_id, name)


class ConditionFilter(admin.SimpleListFilter):
    """A filter by a condition."""

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        value = self.value()
        return queryset if value is None else queryset.filter(condition(str(self.parameter_name), value))


class PolicyFilter(ConditionFilter):
    """By policy, without a DISTINCT over the table. Former labels count as their policy."""

    title = _("policy")
    parameter_name = POLICY

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        declared = sorted(policy.label for policy in get_policies())
        gone = search.undeclared_in(model_admin.get_queryset(request), MAX_LABELS)
        named = [(label, _("{label} (no longer declared)").format(label=label)) for label in gone]
        return [*((label, label) for label in declared), *named]


class QueueFilter(ConditionFilter):
    """By queue."""

    title = _("queue")
    parameter_name = "queue"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        queues = dict.fromkeys([*declared_queues(), request.GET.get(self.parameter_name)])
        return [(queue, queue) for queue in queues if queue]


class DueFilter(ConditionFilter):
    """Timeouts that may need attention, and pending ones in the order in which they fall due."""

    title = _("urgency")
    parameter_name = DUE

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, Any]]:
        return [(choice, DUE_LABELS[choice]) for choice in ("waiting", "hour", "overdue", "failing", "dead")]


class SetByFilter(ConditionFilter):
    """By who has set the deadline."""

    title = _("deadline set by")
    parameter_name = "set_by"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, Any]]:
        return list(SET_BY.items())


class DeadlineFilter(admin.DateFieldListFilter):
    """By deadline: Django's preset periods, and two that lie ahead."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        today = clock.local(timezone.now()).replace(hour=0, minute=0, second=0, microsecond=0)
        since, until = self.lookup_kwarg_since, self.lookup_kwarg_until
        ahead: Any = tuple(
            (title, {since: str(today + timedelta(days=first)), until: str(today + timedelta(days=last))})
            for title, first, last in ((_("Tomorrow"), 1, 2), (_("Next 7 days"), 0, 7))
        )
        self.links = (*self.links[:2], *ahead, *self.links[2:])

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        """Return the rows of the period, in UTC: PostgreSQL refuses offsets that Django accepts."""
        given: dict[str, Any] = self.used_parameters
        return queryset.filter(**_period({name: values[-1] for name, values in given.items()}))


class ObjectFilter(ConditionFilter):
    """The timeouts of one object. Not offered here: other pages link to it."""

    title = _("object")
    parameter_name = OBJECT

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        asked = request.GET.get(self.parameter_name)
        return [(asked, object_label(asked, request.user))] if asked else []


class RelatedFilter(ObjectFilter):
    """The timeouts of one customer, merchant or team, across models. Not offered here either."""

    title = _("related object")
    parameter_name = RELATED


TIMEOUT_FILTERS: Final = (
    *(DueFilter, "state", PolicyFilter, ("due_at", DeadlineFilter), SetByFilter, QueueFilter),
    *(ObjectFilter, RelatedFilter),
)


@dataclass(frozen=True, slots=True)
class Scan:
    """Rows that one index gives in their order."""

    rows: Any
    parts: tuple[Any, ...] = ()
    """Given if an index has the rows only part by part: then the first rows of each part are read."""


def scans(params: dict[str, Any], rows: Any) -> list[Scan]:
    """Return the scans of `rows` that narrow down what `params` ask for, the narrowest first.

    The last one is used if no scan before it fits into one window. The filters choose among the rows of the window.
    """
    found, due, policy = list[Scan](), params.get(DUE, ""), params.get(POLICY)
    state = DUE_STATES.get(due) or params.get(STATE, "")
    of_policy = rows.of_labels(labels_of(policy)) if policy else rows
    for name in (OBJECT, RELATED):
        if params.get(name):
            found.append(Scan(rows.filter(condition(name, params[name])).order_by(*search.NEWEST.fields)))
    if state in {State.PENDING, State.HELD, State.FIRING}:
        period = due_condition(due) if due in {"hour", "overdue"} else Q()
        if due == "failing":  # few of many: an index has them policy by policy
            failing = rows.failing().order_by("-policy", "-state", "-attempts", "-id")
            labels = labels_of(policy) if policy else search.labels_in(rows, MAX_LABELS)
            parts = tuple(failing.filter(policy=label) for label in labels)
            found += [Scan(search.in_state(of_policy, state), parts)] if parts else []
        found.append(Scan(search.in_state(of_policy.filter(period), state)))
    elif state in State.values and policy:
        found.append(Scan(of_policy.filter(state=state).order_by(*search.LATEST.fields)))
    elif state in State.values:  # they may be few, as dead ones should be, and found policy by policy
        settled = rows.filter(settled_at__isnull=False).order_by(*search.LAST_SETTLED.fields)
        in_state = rows.filter(state=state).order_by(*search.LATEST.fields)
        parts = tuple(in_state.filter(policy=label) for label in search.labels_in(rows, MAX_LABELS))
        found += [Scan(settled, parts), Scan(settled)] if parts else [Scan(settled)]
    elif policy:  # an index has its rows state by state
        parts = tuple(of_policy.filter(state=each).order_by(*search.LATEST.fields) for each in State.values)
        found.append(Scan(of_policy.order_by(*search.NEWEST.fields), parts))
    if any(name in params for name in DEADLINE):
        found.append(Scan(rows.filter(**_period(params)).order_by(*search.BY_DEADLINE.fields)))
    return found or [Scan(rows.order_by(*search.NEWEST.fields))]


def _period(params: dict[str, Any]) -> dict[str, datetime]:
    try:
        period = {name: datetime.fromisoformat(params[name]) for name in DEADLINE if name in params}
        if any(at.year not in search.YEARS for at in period.values()):
            raise ValueError(f"{period} is too far away.")
    except (TypeError, ValueError) as error:
        raise IncorrectLookupParameters(error) from error
    return {name: clock.in_utc(clock.fitting(at)) for name, at in period.items()}
