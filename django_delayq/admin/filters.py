"""The filters of the list of timeouts, and for each combination the scans of an index that answer most of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

from django.contrib import admin
from django.contrib.admin.options import IncorrectLookupParameters
from django.db import connections
from django.db.models import F, Func, Q, QuerySet, TextField
from django.db.models.lookups import Exact
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
from django_delayq.sql.dialects import dialect_of
from django_delayq.sql.now import DatabaseNow
from django_delayq.sql.statements import CHUNK
from django_delayq.times import clock

State = Timeout.State

MAX_LABELS: Final = 100
"""Each is a query of its own within one statement. Labels that nothing declares any more may be many."""
STATE, POLICY, DUE, OBJECT, RELATED, ERROR = "state__exact", "policy", "due", "object", "related", "error"
DEADLINE: Final[tuple[str, ...]] = ("due_at__gte", "due_at__lt")
SET_BY: Final = {"policy": _("policy"), "hand": _("hand")}
"""Who may have set a deadline."""
DUE_LABELS: Final = {
    "overdue": _("overdue"),
    "failing": _("failing: an attempt has failed"),
    "dead": _("dead"),
    "hour": _("due in the next hour"),
    "waiting": _("pending, soonest first"),
}
DUE_STATES: Final = {**dict.fromkeys(DUE_LABELS, State.PENDING), "dead": State.DEAD}
"""The state of the rows of each choice of the filter by urgency and `mixins.TimeoutsFilter`."""


def due_condition(choice: str) -> Q:
    """Return the condition for a choice of the filter by urgency or `mixins.TimeoutsFilter`."""
    if choice not in DUE_STATES:
        return Q()
    more = CONDITIONS[choice](True) if choice in CONDITIONS else Q()
    soon = Q(run_at__gt=DatabaseNow(), run_at__lte=clock.now() + timedelta(hours=1))
    return Q(state=DUE_STATES[choice]) & (soon if choice == "hour" else more)


def last_error(using: str) -> Func:
    """Return the type of the last error of a row, from its history: for the few rows of a window alone."""
    return Func(F("history"), template=dialect_of(connections[using]).last_error, output_field=TextField())


_CONDITIONS: Final[dict[str, Callable[[Any], Q]]] = {
    **CONDITIONS,
    DUE: due_condition,
    ERROR: lambda name: Q(Exact(last_error(database_of(Timeout)), name)),
}


def condition(name: str, value: Any) -> Q:
    """Return the condition on rows of a filter. What names no object has no rows."""
    with suppress(ConfigError, LookupError, ValueError):
        return _CONDITIONS[name](value)
    return Q(pk__in=[])


def object_label(value: str, user: Any) -> str:
    """Return how pages name the object `app.model:id` to this user: its model, and its name or id."""
    model, (label, _colon, object_id) = selection.model_named(value), value.partition(":")
    if model is None:
        return f"{label} {object_id}"
    name = selection.name_of(model, object_id, database_of(model), user)
    return render.titled(str(model._meta.verbose_name), object_id, name)


def _filter(name: str, label: Any, choices: Callable[[str | None, Any, Any], Iterable[tuple[str, Any]]]) -> Any:
    """Return a filter by the condition `name`. `choices`: of the value that is asked for, the request and the admin."""

    class ConditionFilter(admin.SimpleListFilter):
        title, parameter_name = label, name

        def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, Any]]:
            return list(choices(request.GET.get(name), request, model_admin))

        def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
            value = self.value()
            return queryset if value is None else queryset.filter(condition(name, value))

    return ConditionFilter


def _policies(_asked: str | None, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
    """Return the policies, without a DISTINCT over the table. Former labels count as their policy."""
    declared = sorted(policy.label for policy in get_policies())
    gone = search.undeclared_in(model_admin.get_queryset(request), MAX_LABELS)
    named = [(label, _("{label} (no longer declared)").format(label=label)) for label in gone]
    return [*((label, label) for label in declared), *named]


def _errors(asked: str | None, request: Any, model_admin: Any) -> list[tuple[str, str]]:
    """Return the types of errors of the first rows of the window, and their numbers, where rows have failed."""
    if not asked and request.GET.get(DUE, request.GET.get(STATE)) not in {"failing", State.DEAD}:
        return []
    ids: Sequence[int] = request.delayq_ids
    rows = model_admin.get_queryset(request).filter(pk__in=ids[:CHUNK])
    found = Counter(filter(None, rows.values_list(last_error(rows.db), flat=True)))
    named = [(name, f"{name} ({search.Count(n, len(ids) > CHUNK)})") for name, n in found.most_common()]
    return named if not asked or asked in found else [*named, (asked, asked)]


def _queues(asked: str | None, *_: Any) -> list[tuple[str, str]]:
    return [(queue, queue) for queue in dict.fromkeys([*declared_queues(), asked]) if queue]


def _object(asked: str | None, request: HttpRequest, _: Any) -> list[tuple[str, str]]:
    """Return the object that is asked for. Not offered here: other pages link to it."""
    return [(asked, object_label(asked, request.user))] if asked else []


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


TIMEOUT_FILTERS: Final = (
    _filter(DUE, _("urgency"), lambda *_: DUE_LABELS.items()),
    _filter(ERROR, _("last error"), _errors),
    "state",
    _filter(POLICY, _("policy"), _policies),
    ("due_at", DeadlineFilter),
    _filter("set_by", _("deadline set by"), lambda *_: SET_BY.items()),
    _filter("queue", _("queue"), _queues),
    _filter(OBJECT, _("object"), _object),
    _filter(RELATED, _("related object"), _object),
)
"""`object` is one object; `related` one customer, merchant or team, across models."""


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


def urgent(rows: Any) -> list[int]:
    """Return the ids of overdue and failing `rows`, the longest overdue first: at most `CHUNK` of each label."""
    overdue = search.in_state(rows.filter(due_condition("overdue")), State.PENDING)
    found = list(overdue.values_list("id", flat=True)[:CHUNK])
    failing = rows.failing().order_by("policy", "state", "attempts", "id").reverse()
    labels = [label for policy in get_policies() for label in policy.labels]
    counts = search.count_each({label: failing.filter(policy=label) for label in labels}, rows.db, cap=1)
    for label in labels:
        found += failing.filter(policy=label).values_list("id", flat=True)[:CHUNK] if counts[label].value else []
    return found


def _period(params: dict[str, Any]) -> dict[str, datetime]:
    try:
        period = {name: datetime.fromisoformat(params[name]) for name in DEADLINE if name in params}
        if any(at.year not in search.YEARS for at in period.values()):
            raise ValueError(f"{period} is too far away.")
    except (TypeError, ValueError) as error:
        raise IncorrectLookupParameters(error) from error
    return {name: clock.in_utc(clock.fitting(at)) for name, at in period.items()}
