"""What the list can be narrowed by; each filter knows the condition that an index answers."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from django.contrib import admin
from django.contrib.contenttypes.models import ContentType
from django.db.models import Q
from django.utils.translation import gettext_lazy as _

from django_delayq import clock
from django_delayq.admin.dates import FIELD, condition
from django_delayq.admin.reading import BY_DEADLINE, LATELY, LATEST, NEWEST, SOONEST, Lead
from django_delayq.key_types import object_id_of, pk_of, root_of_key
from django_delayq.ledger.locking import database_of
from django_delayq.ledger.subjects import about, kind_of, tables_of
from django_delayq.models import Timeout
from django_delayq.policies import declared_queues, get_policies, registry

if TYPE_CHECKING:
    from django.db.models import QuerySet
    from django.http import HttpRequest

    from django_delayq.admin.dates import DateRange

MOST_LABELS: Final = 100
STATE, POLICY, DUE, OBJECT = "state__exact", "policy", "due", "object"


def labels_of(label: str) -> tuple[str, ...]:
    """The label with all former ones of its policy; of a policy that is not declared any more just itself."""
    policy = registry.get(label)
    return (label,) if policy is None else policy.labels


def labels_in(rows: QuerySet[Any]) -> list[str]:
    """Every label that rows have, by one probe of the index each; of too many the first ones."""
    found: list[str] = []
    labels = rows.order_by("policy").values_list("policy", flat=True)
    while len(found) < MOST_LABELS:
        after = labels.filter(policy__gt=found[-1]) if found else labels
        label = after.first()
        if label is None:
            break
        found.append(label)
    return found


class PolicyFilter(admin.SimpleListFilter):
    """By policy, without a DISTINCT over the table; former labels count as their policy."""

    title = _("policy")
    parameter_name = POLICY

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        declared = {policy.label for policy in get_policies()}
        used = labels_in(model_admin.get_queryset(request))
        gone = [label for label in used if registry.get(label) is None]
        said = [(label, _("{label} (not declared any more)").format(label=label)) for label in gone]
        return [*((label, label) for label in sorted(declared)), *said]

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
    """What wants attention."""

    title = _("attention")
    parameter_name = DUE

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, Any]]:
        return [
            ("hour", _("due in the next hour")),
            ("overdue", _("overdue")),
            ("retrying", _("failed, to be tried again")),
            ("dead", _("dead")),
        ]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        return queryset.filter(due_condition(self.value()))


class ObjectFilter(admin.SimpleListFilter):
    """The timeouts of one object; offered nowhere, but other pages link to it."""

    title = _("object")
    parameter_name = OBJECT

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        asked = request.GET.get(self.parameter_name)
        return [(asked, asked.replace(":", " "))] if asked else []

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        return queryset.filter(object_condition(self.value()))


def due_condition(value: str | None) -> Q:
    """The rows that want this kind of attention."""
    pending = Q(state=Timeout.State.PENDING, settled_at__isnull=True)
    now = clock.DatabaseNow()
    conditions = {
        "hour": pending & Q(run_at__gt=now, run_at__lte=clock.now() + timedelta(hours=1)),
        "overdue": pending & Q(run_at__lte=now),
        "retrying": pending & Q(attempts__gt=0),
        "dead": Q(state=Timeout.State.DEAD, settled_at__isnull=False),
    }
    return conditions.get(value or "", Q())


def object_condition(value: str | None) -> Q:
    """The rows about the object that `app.model:id` names, also as an object of its parents' kinds."""
    if not value:
        return Q()
    kind, _colon, object_id = value.partition(":")
    app, _dot, name = kind.partition(".")
    found = ContentType.objects.using(database_of(Timeout)).filter(app_label=app, model=name).first()
    if found is None:
        return Q(pk__in=[])
    model = found.model_class()
    if model is None:  # the model is gone: its rows keep their ids
        return Q(content_type=found.pk, object_id=object_id)
    try:
        key = pk_of(model, object_id)
        written, using = object_id_of(model, key), database_of(model)
    except ValueError:
        return Q(pk__in=[])
    own = [table for table in tables_of(model) if root_of_key(table) is root_of_key(model)]
    rows = Q(content_type__in=[kind_of(table, using) for table in own], object_id=written)
    parents = [table for table in tables_of(model) if table not in own]
    if parents:  # with other keys, which only the object itself knows
        rows |= about(parents, list(model._base_manager.using(using).filter(pk=key)), using)
    return rows


def leads(params: dict[str, Any], dates: DateRange | None, rows: QuerySet[Any]) -> list[Lead]:
    """The ways to read what `params` ask for, the narrowest first, the one to fall back on last."""
    found = []
    if params.get(OBJECT):
        found.append(Lead(object_condition(params[OBJECT]), NEWEST, frozenset({OBJECT})))
    by_state = _state_lead(params)
    if params.get(POLICY):
        found.extend(_policy_leads(labels_of(params[POLICY]), by_state))
    elif by_state is not None:
        found.extend(_settled_leads(by_state, rows) if by_state.order is LATELY else [by_state])
    if dates is not None:
        found.append(Lead(condition(dates), BY_DEADLINE, frozenset({FIELD})))
    return found or [Lead(Q(), NEWEST)]


def _policy_leads(labels: tuple[str, ...], by_state: Lead | None) -> list[Lead]:
    """By policy and state, which is one index; without a state some rows of each, for people who look around."""
    of_policy = Q(policy__in=labels)
    if by_state is None:
        states = tuple(Q(state=state) for state in Timeout.State.values)
        return [Lead(of_policy, NEWEST, frozenset({POLICY}), states)]
    order = SOONEST if by_state.order is SOONEST else LATEST
    return [Lead(of_policy & by_state.condition, order, by_state.parameters | {POLICY})]


def _settled_leads(by_state: Lead, rows: QuerySet[Any]) -> list[Lead]:
    """All of a settled state, policy by policy, if they are few, as dead ones should be; else by way of all settled."""
    of_each = tuple(Q(policy=label) for label in labels_in(rows))
    settled = Lead(Q(settled_at__isnull=False), LATELY)
    return [Lead(by_state.condition, LATELY, frozenset(), of_each), settled] if of_each else [settled]


def _state_lead(params: dict[str, Any]) -> Lead | None:
    state, due = params.get(STATE), params.get(DUE)
    if due in {"hour", "overdue"}:
        return Lead(due_condition(due), SOONEST, frozenset({DUE}))
    if due == "retrying":
        return Lead(Q(state=Timeout.State.PENDING, settled_at__isnull=True), SOONEST)
    answered = frozenset({DUE if due == "dead" else STATE})
    state = "dead" if due == "dead" else state
    if state not in Timeout.State.values:
        return None
    if Timeout.State(state).is_settled:
        return Lead(Q(state=state), LATELY, answered)
    return Lead(Q(state=state, settled_at__isnull=True), SOONEST, answered)
