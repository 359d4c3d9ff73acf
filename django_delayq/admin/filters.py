"""The filters of the list of timeouts, and for each combination the scans of an index that answer most of it."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any, Final

from django.apps import apps
from django.contrib import admin
from django.contrib.admin.options import IncorrectLookupParameters
from django.db.models import Exists, Model, Q, QuerySet
from django.http import HttpRequest
from django.utils import timezone
from django.utils.translation import gettext_lazy as _

from django_delayq import clock
from django_delayq.conf import ConfigError
from django_delayq.key_types import pk_of
from django_delayq.ledger import search
from django_delayq.ledger.locking import database_of
from django_delayq.ledger.search import Order, labels_of
from django_delayq.ledger.subjects import about, about_each, tables_of
from django_delayq.models import Timeout, TimeoutQuerySet
from django_delayq.operations import selection
from django_delayq.policies import declared_queues, get_policies, registry

MAX_LABELS: Final = 100
STATE, POLICY, DUE, OBJECT, OWNER = "state__exact", "policy", "due", "object", "owner"
DEADLINE: Final[tuple[str, ...]] = ("due_at__gte", "due_at__lt")
DUE_STATES: Final = {"hour": "pending", "overdue": "pending", "retrying": "pending", "dead": "dead"}
"""The state of the rows of each choice of `DueFilter`."""
DUE_LABELS: Final = {
    "hour": _("due in the next hour"),
    "overdue": _("overdue"),
    "retrying": _("failed, will be retried"),
    "waiting": _("pending, soonest first"),
    "dead": _("dead"),
}

State = Timeout.State


class PolicyFilter(admin.SimpleListFilter):
    """By policy, without a DISTINCT over the table. Former labels count as their policy."""

    title = _("policy")
    parameter_name = POLICY

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        declared = {policy.label for policy in get_policies()}
        used = search.labels_in(model_admin.get_queryset(request), MAX_LABELS)
        gone = [label for label in used if registry.get(label) is None]
        named = [(label, _("{label} (no longer declared)").format(label=label)) for label in gone]
        return [*((label, label) for label in sorted(declared)), *named]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        label = self.value()
        return queryset if label is None else queryset.filter(policy__in=labels_of(label))


class QueueFilter(admin.SimpleListFilter):
    """By queue."""

    title = _("queue")
    parameter_name = "queue"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        asked = request.GET.get(self.parameter_name)
        return [(queue, queue) for queue in dict.fromkeys([*declared_queues(), *([asked] if asked else [])])]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        return queryset if self.value() is None else queryset.filter(queue=self.value())


class DueFilter(admin.SimpleListFilter):
    """Timeouts that may need attention."""

    title = _("attention")
    parameter_name = DUE

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, Any]]:
        return [(choice, DUE_LABELS[choice]) for choice in ("hour", "overdue", "retrying", "dead")]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        return queryset.filter(due_condition(self.value()))


class DeadlineFilter(admin.DateFieldListFilter):
    """By deadline: Django's preset periods, and two that lie ahead."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        now = clock.local(timezone.now())
        today = now.replace(hour=0, minute=0, second=0, microsecond=0)
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


class ObjectFilter(admin.SimpleListFilter):
    """The timeouts of one object. Not offered here: other pages link to it."""

    title = _("object")
    parameter_name = OBJECT

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        asked = request.GET.get(self.parameter_name)
        return [(asked, object_label(asked))] if asked else []

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        return queryset.filter(object_condition(self.value()))


class OwnerFilter(ObjectFilter):
    """The timeouts of one customer, across models. Not offered here either."""

    title = _("owner")
    parameter_name = OWNER

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        return queryset if self.value() is None else queryset.filter(owner_condition(self.value()))


def due_condition(value: str | None) -> Q:
    """Return the condition for a choice of `DueFilter`."""
    pending = Q(state=State.PENDING, settled_at__isnull=True)
    conditions = {
        "hour": pending & due_period("hour"),
        "overdue": pending & due_period("overdue"),
        "retrying": pending & Q(attempts__gt=0),
        "dead": Q(state=State.DEAD, settled_at__isnull=False),
    }
    return conditions.get(value or "", Q())


def due_period(value: str) -> Q:
    """Return when the next attempt of a choice of `DueFilter` is; for most choices at any time."""
    now = clock.DatabaseNow()
    periods = {"hour": Q(run_at__gt=now, run_at__lte=clock.now() + timedelta(hours=1)), "overdue": Q(run_at__lte=now)}
    return periods.get(value, Q())


def rows_about(objects: QuerySet[Any], states: Iterable[str], most: int) -> TimeoutQuerySet:
    """Return the rows in `states` about the first `most` of `objects` that have any, also about their parents."""
    using = database_of(objects.model, objects)
    rows: TimeoutQuerySet = Timeout.objects.using(using).filter(state__in=sorted(states))
    having = objects.using(using).filter(Exists(rows.filter(about_each(objects.model, using))))
    return rows.filter(about(tables_of(objects.model), list(having[:most]), using))


def object_condition(value: str | None) -> Q:
    """Return the condition for the rows about the object `app.model:id`, also as an object of its parent models."""
    if not value:
        return Q()
    try:
        return selection.about_reference(value, database_of(Timeout))
    except (LookupError, ValueError):
        return Q(pk__in=[])


def owner_condition(value: str | None) -> Q:
    """Return the condition for the rows about the owner `app.model:id`, and about what belongs to it."""
    model = model_named(value)
    if model is None or not value:
        return Q(pk__in=[])
    try:
        key, using = pk_of(model, value.partition(":")[2]), database_of(model)
        return object_condition(value) | selection.owned_by(model, key, using)
    except (ConfigError, ValueError):
        return Q(pk__in=[])


def model_named(value: str | None) -> type[Model] | None:
    """Return the model of `app.model:id`; None if there is no such model."""
    with suppress(LookupError, ValueError):
        return apps.get_model((value or "").partition(":")[0])
    return None


def object_label(value: str) -> str:
    """Return how pages name the object `app.model:id`: its model and its id. The object itself is not loaded."""
    model, (label, _colon, object_id) = model_named(value), value.partition(":")
    return f"{model._meta.verbose_name if model else label} {object_id}"


@dataclass(frozen=True, slots=True)
class Scan:
    """Rows that one index gives in their order."""

    rows: Any
    answers: frozenset[str] = frozenset()
    """The parameters of the address that it answers in full, so that they filter nothing further."""
    parts: tuple[Any, ...] = ()
    """Given if an index has the rows only part by part: then the first rows of each part are read."""

    @property
    def order(self) -> Order:
        return search.Order.of(self.rows)


def scans(params: dict[str, Any], rows: Any) -> list[Scan]:
    """Return the scans of `rows` that narrow down what `params` ask for, the narrowest first.

    The last one is used if no scan before it fits into one window.
    """
    found, due, policy = [], params.get(DUE, ""), params.get(POLICY)
    state = DUE_STATES.get(due) or params.get(STATE, "")
    own, answers = (rows.of_labels(labels_of(policy)), [POLICY]) if policy else (rows, [])
    if params.get(OBJECT):
        found.append(_scan(rows.filter(object_condition(params[OBJECT])), search.NEWEST, OBJECT))
    if params.get(OWNER):
        found.append(_scan(rows.filter(owner_condition(params[OWNER])), search.NEWEST, OWNER))
    if state in {State.PENDING, State.FIRING}:
        if due in {"hour", "overdue"}:
            own = own.filter(due_condition(due))
        answers += {"hour": [DUE], "overdue": [DUE], "retrying": []}.get(due, [STATE])
        found.append(Scan(search.in_state(own, state), frozenset(answers)))
    elif state in State.values and policy:
        found.append(_scan(own.filter(state=state), search.LATEST, POLICY, DUE if due else STATE))
    elif state in State.values:  # they may be few, as dead ones should be, and found policy by policy
        settled = _scan(rows.filter(settled_at__isnull=False), search.LAST_SETTLED)
        parts = tuple(_part(rows, state=state, policy=label) for label in search.labels_in(rows, MAX_LABELS))
        found += [replace(settled, parts=parts), settled] if parts else [settled]
    elif policy:  # an index has its rows state by state
        parts = tuple(_part(own, state=each) for each in State.values)
        found.append(replace(_scan(own, search.NEWEST, POLICY), parts=parts))
    if any(name in params for name in DEADLINE):
        found.append(_scan(rows.filter(**_period(params)), search.BY_DEADLINE, *DEADLINE))
    return found or [_scan(rows, search.NEWEST)]


def _part(rows: Any, **condition: str) -> Any:
    return rows.filter(**condition).order_by(*search.LATEST.fields)


def _scan(rows: Any, order: Order, *answers: str) -> Scan:
    return Scan(rows.order_by(*order.fields), frozenset(answers))


def _period(params: dict[str, Any]) -> dict[str, datetime]:
    try:
        period = {name: datetime.fromisoformat(params[name]) for name in DEADLINE if name in params}
        if any(at.year not in search.YEARS for at in period.values()):
            raise ValueError(f"{period} is too far away.")
    except (TypeError, ValueError) as error:
        raise IncorrectLookupParameters(error) from error
    if timezone.is_aware(timezone.now()):
        return {name: clock.in_utc(clock.aware(at)) for name, at in period.items()}
    return period
