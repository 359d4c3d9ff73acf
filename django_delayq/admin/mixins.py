"""Deadlines in the admin of your own models: `class OrderAdmin(TimeoutAdminMixin, admin.ModelAdmin)`."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, cast

from django import forms
from django.contrib import admin
from django.contrib.admin.options import IS_POPUP_VAR
from django.db.models import Q, Subquery
from django.utils.html import format_html
from django.utils.translation import gettext_lazy as _

from django_delayq.admin.about import of_each
from django_delayq.admin.actions import steering_actions
from django_delayq.admin.filters import due_condition
from django_delayq.admin.operations import OPERATIONS
from django_delayq.admin.wording import pending_until, time_tag
from django_delayq.key_types import pk_of
from django_delayq.ledger.locking import database_of
from django_delayq.ledger.subjects import kind_of, tables_of
from django_delayq.models import Timeout

if TYPE_CHECKING:
    from django.db.models import Model, QuerySet
    from django.http import HttpRequest

    _Mixin = admin.ModelAdmin[Any]
else:
    _Mixin = object

MOST_OBJECTS: Final = 1_000


class TimeoutsFilter(admin.SimpleListFilter):
    """Objects by what their timeouts do; the first `MOST_OBJECTS` of them, read through the ledger's indexes."""

    title = _("timeouts")
    parameter_name = "timeouts"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, Any]]:
        return [
            ("hour", _("due in the next hour")),
            ("overdue", _("overdue")),
            ("waiting", _("waiting, the soonest first")),
            ("dead", _("dead")),
        ]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        value = self.value()
        if value not in {choice for choice, _words in self.lookup_choices}:
            return queryset
        return queryset.filter(_objects_by(queryset.model, str(value)))


def _objects_by(model: type[Model], value: str) -> Q:
    """The condition on objects whose timeouts are such, the most urgent ones."""
    using = database_of(model)
    tables = {kind_of(table, using): table for table in tables_of(model)}
    pending = Q(state=Timeout.State.PENDING, settled_at__isnull=True)
    rows = Timeout.objects.using(using).filter(pending if value == "waiting" else due_condition(value))
    rows = rows.filter(content_type__in=list(tables))
    rows = rows.order_by("-settled_at", "-id") if value == "dead" else rows.order_by("run_at", "id")
    keys: dict[int, list[Any]] = {}
    for kind, object_id in dict.fromkeys(rows.values_list("content_type_id", "object_id")[:MOST_OBJECTS]):
        with suppress(ValueError):
            keys.setdefault(kind, []).append(pk_of(tables[kind], object_id))
    found = Q(pk__in=[])
    for kind, pks in keys.items():
        found |= Q(**{f"{cast('Any', tables[kind]._meta.pk).name}__in": pks})
    return found


class TimeoutAdminMixin(_Mixin):
    """A column *next deadline* in the list of your objects, a filter by timeouts, and the operator's actions.

    The column comes with the list's own query, whatever its length. All three come by themselves; put
    `"next_deadline"` into `list_display` to say where the column stands. Who may not view timeouts gets neither.
    """

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        """With the soonest pending deadline of each object, its next attempt and its policy, all from the writer."""
        rows: QuerySet[Any] = super().get_queryset(request)
        if not self._sees_timeouts(request):
            return rows
        rows = rows.using(database_of(self.model))
        pending = of_each(self.model).filter(slot_taken=1).order_by("due_at", "id")
        found: QuerySet[Any] = rows.annotate(
            delayq_next_due=Subquery(pending.values("due_at")[:1]),
            delayq_next_attempt=Subquery(pending.values("run_at")[:1]),
            delayq_next_policy=Subquery(pending.values("policy")[:1]),
        )
        return found

    def get_list_display(self, request: HttpRequest) -> Any:
        shown = [*super().get_list_display(request)]
        if not self._sees_timeouts(request):
            return [column for column in shown if column != "next_deadline"]
        return shown if "next_deadline" in shown else [*shown, "next_deadline"]

    def get_list_filter(self, request: HttpRequest) -> Any:
        given = [*super().get_list_filter(request)]
        return [*given, TimeoutsFilter] if self._sees_timeouts(request) else given

    def get_actions(self, request: HttpRequest, action_location: Any = None) -> dict[str, Any]:
        """With those on timeouts that the visitor may do."""
        place = () if action_location is None else (action_location,)  # Django 6.1 says where they are to be shown
        found: dict[str, Any] = super().get_actions(request, *place)
        if self.actions is None or IS_POPUP_VAR in request.GET:
            return found
        for action in steering_actions(of_the_objects=True):
            operation = OPERATIONS[action.__name__.removesuffix("_timeouts")]
            made = self.get_action(action, *place)
            if made is not None and operation.is_allowed(request):
                found[action.__name__] = made
        return found

    @property
    def media(self) -> forms.Media:
        ours = forms.Media(css={"all": ("django_delayq/admin.css",)}, js=("django_delayq/admin.js",))
        return super().media + ours

    @admin.display(description=_("next deadline"))
    def next_deadline(self, obj: Any) -> str:
        """The soonest pending deadline, how long that is from now, and what happens then."""
        due = getattr(obj, "delayq_next_due", None)
        if due is None:
            return "-"
        name = obj.delayq_next_policy.rpartition(".")[2]
        left = pending_until(due, obj.delayq_next_attempt, attempts=0)
        return format_html('{}<br><span class="delayq-more">{} {}</span>', time_tag(due), name, left)

    def _sees_timeouts(self, request: HttpRequest) -> bool:
        return bool(request.user.has_perm("django_delayq.view_timeout"))
