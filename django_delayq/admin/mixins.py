"""Timeouts in the admin of your own models: `TimeoutAdminMixin` for its list, `TimeoutInline` for an object's page."""

from __future__ import annotations

from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Final, cast

from django import forms
from django.contrib import admin
from django.contrib.admin.options import IS_POPUP_VAR
from django.contrib.contenttypes.admin import GenericTabularInline
from django.contrib.contenttypes.forms import BaseGenericInlineFormSet
from django.contrib.contenttypes.models import ContentType
from django.db import router
from django.db.models import Model, Q, QuerySet, Subquery
from django.http import HttpRequest
from django.utils.crypto import salted_hmac
from django.utils.html import format_html
from django.utils.http import urlencode
from django.utils.inspect import get_func_args
from django.utils.translation import gettext_lazy as _

from django_delayq.admin import filters, render
from django_delayq.admin.actions import banners, permitted_actions, timeout_actions
from django_delayq.admin.changelist import ReadOnlyAdmin, address, column, named, related_links, visible_rows
from django_delayq.arming.watched import lock_with_owners
from django_delayq.ledger import search
from django_delayq.ledger.routing import database_of
from django_delayq.ledger.subjects import about_objects, about_outer_row, kind_of, tables_of
from django_delayq.models import Timeout
from django_delayq.operations import selection
from django_delayq.operations.selection import MAX_OBJECTS
from django_delayq.policy.policies import get_policies
from django_delayq.policy.watches import watches_on
from django_delayq.sql.key_types import pk_of

if TYPE_CHECKING:
    _Mixin = admin.ModelAdmin[Any]
else:
    _Mixin = object

VERSION: Final = "_delayq_version"
STALE: Final = _(
    "Nothing was saved: this was changed after the page was opened. Check it, and enter your change again."
)


class TimeoutsFilter(admin.SimpleListFilter):
    """Objects by their timeouts: the first `MAX_OBJECTS` of them, read through the ledger's indexes."""

    title = _("timeouts")
    parameter_name = "timeouts"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, Any]]:
        self.site = model_admin.admin_site
        return [(choice, filters.DUE_LABELS[choice]) for choice in ("overdue", "dead", "hour", "waiting")]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        value = self.value()
        if value not in {choice for choice, _title in self.lookup_choices}:
            return queryset
        rows = visible_rows(request, self.site)
        return queryset.filter(_objects_condition(queryset.model, str(value), rows))


def _objects_condition(model: type[Model], value: str, visible: Any) -> Q:
    """Return the condition on objects that have such `visible` rows; of too many, the most urgent ones.

    No index has the timeouts of one model in this order, but `delayq_policy` has those of each label and state.
    """
    using = database_of(model)
    tables = {kind_of(table, using): table for table in tables_of(model)}
    every = visible.using(using)
    labels = [label for policy in get_policies() if policy.concrete_model in tables.values() for label in policy.labels]
    labels += search.undeclared_in(every, filters.MAX_LABELS)
    order = search.LATEST if value == "dead" else search.SOONEST
    rows = every.filter(filters.due_condition(value)).order_by(*order.fields)
    columns = (*order.columns, "content_type_id", "object_id")
    found: list[Any] = []
    for label in labels:
        of_label = rows.filter(policy=label).values_list(*columns)[:MAX_OBJECTS]
        found += (values for values in of_label if values[-2] in tables)  # a former label may be of another model
    found.sort(reverse=order.descending)
    keys: dict[int, list[Any]] = {}
    for kind, object_id in dict.fromkeys(values[-2:] for values in found[:MAX_OBJECTS]):
        with suppress(ValueError):
            keys.setdefault(kind, []).append(pk_of(tables[kind], object_id))
    wanted = Q(pk__in=[])
    for kind, pks in keys.items():
        wanted |= Q(**{f"{cast('Any', tables[kind]._meta.pk).name}__in": pks})
    return wanted


class LockingAdminMixin(_Mixin):
    """Lock an object before its page is saved or it is deleted, and refuse a page that is older than the row.

    A page saves the columns that it shows, and its inlines theirs, as they were when it was opened. So it would write
    "waiting" over what a timeout has done since then. Instead it saves nothing, and shows an error.
    For models with policies, and models whose rows policies read. `TimeoutAdminMixin` includes it.
    """

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        """Return the objects from the writer: a page of an outdated replica would be refused, or not be noticed."""
        rows: QuerySet[Any] = super().get_queryset(request).using(database_of(self.model))
        return rows

    def get_formset_kwargs(self, request: HttpRequest, obj: Any, inline: Any, prefix: str) -> dict[str, Any]:
        """Return the arguments of the formset of an inline, whose rows are read from the writer, too."""
        given: dict[str, Any] = super().get_formset_kwargs(request, obj, inline, prefix)
        return given | {"queryset": given["queryset"].using(database_of(self.model))}

    def get_object(self, request: HttpRequest, object_id: str, from_field: str | None = None) -> Any:
        """Return the object, which is locked before it is changed, with the version of it that the visitor sees."""
        obj = super().get_object(request, object_id, from_field)
        may_write = self.has_change_permission(request, obj) or self.has_delete_permission(request, obj)
        if obj is None or not may_write or not (get_policies(type(obj)) or watches_on(type(obj))):
            return obj
        if is_posted := request.method == "POST":
            lock_with_owners(obj, router.db_for_write(type(obj), instance=obj))
            obj = super().get_object(request, object_id, from_field)
        if obj is not None:
            version = self._version_of(request, obj)
            obj.delayq_seen = request.GET.get(VERSION, version) if is_posted else version
            obj.delayq_is_stale = obj.delayq_seen != version
        return obj

    def _version_of(self, request: HttpRequest, obj: Any) -> str:
        """Return a digest of the row and of those that its inlines may change. It shows none of their values."""
        rows = [obj]
        for formset, inline in self.get_formsets_with_inlines(request, obj):
            if inline.has_change_permission(request, obj) or inline.has_delete_permission(request, obj):
                seen = inline.get_queryset(request).using(obj._state.db)
                rows += formset(instance=obj, queryset=seen).get_queryset()
        texts = [field.value_to_string(row) for row in rows for field in row._meta.concrete_fields]
        return salted_hmac(VERSION, repr(texts), algorithm="sha256").hexdigest()

    def get_form(self, request: Any, obj: Any = None, change: bool = False, **kwargs: Any) -> Any:
        """Return the class of the form; if the row has changed since it was opened, one that is never valid."""
        form = super().get_form(request, obj, change, **kwargs)
        refusing = {"clean": lambda bound: bound.add_error(None, STALE)}
        return type(form.__name__, (form,), refusing) if getattr(obj, "delayq_is_stale", False) else form

    def render_change_form(self, request: Any, context: Any, *args: Any, **kwargs: Any) -> Any:
        """Render the page, whose form posts the version that the visitor sees."""
        if seen := getattr(kwargs.get("obj"), "delayq_seen", ""):
            url = kwargs.get("form_url", "")
            kwargs["form_url"] = f"{url}{'&' if '?' in url else '?'}{urlencode({**request.GET.dict(), VERSION: seen})}"
        return super().render_change_form(request, context, *args, **kwargs)


class TimeoutAdminMixin(LockingAdminMixin):
    """Add a column *next deadline* to the list of your objects, a filter by timeouts, and the operations as actions.

    The column is part of the list's own query. List `"next_deadline"` in `list_display` to choose its position.
    Visitors who may not view timeouts see none of the three.
    """

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        """Return the objects from the writer, each with its soonest pending deadline, next attempt and policy."""
        rows: QuerySet[Any] = super().get_queryset(request)
        if not self._can_view_timeouts(request):
            return rows
        using = database_of(self.model)
        visible = visible_rows(request, self.admin_site)
        pending = visible.filter(about_outer_row(self.model, using), slot_taken=1).order_by("due_at", "id")
        columns = {"delayq_next_due": "due_at", "delayq_next_attempt": "run_at", "delayq_next_policy": "policy"}
        shown = {name: Subquery(pending.values(column)[:1]) for name, column in columns.items()}
        annotated: QuerySet[Any] = rows.annotate(**shown)
        return annotated

    def get_list_display(self, request: HttpRequest) -> Any:
        shown = [*super().get_list_display(request)]
        if not self._can_view_timeouts(request):
            return [column for column in shown if column != "next_deadline"]
        return shown if "next_deadline" in shown else [*shown, "next_deadline"]

    def get_list_filter(self, request: HttpRequest) -> Any:
        given = [*super().get_list_filter(request)]
        return [*given, TimeoutsFilter] if self._can_view_timeouts(request) else given

    def get_actions(self, request: HttpRequest, action_location: Any = None) -> dict[str, Any]:
        place = () if action_location is None else (action_location,)  # Django 6.1 passes where they are shown
        if not place or "action_location" in get_func_args(super().get_actions):
            found: dict[str, Any] = super().get_actions(request, *place)
        else:  # of a class for an older Django; on the page of one object Django itself ignores such a class, too
            found = super().get_actions(request) if action_location.name == "CHANGE_LIST" else {}
        if self.actions is not None and IS_POPUP_VAR not in request.GET:
            permitted = permitted_actions(request, self.admin_site)
            made = {action.__name__: self.get_action(action, *place) for action in timeout_actions(on_objects=True)}
            found |= {name: action for name, action in made.items() if action is not None and name in permitted}
        return found

    @property
    def media(self) -> forms.Media:
        return super().media + forms.Media(ReadOnlyAdmin.Media)

    @admin.display(description=_("next deadline"))
    def next_deadline(self, obj: Any) -> str:
        due = getattr(obj, "delayq_next_due", None)
        if due is None:
            return "-"
        name = obj.delayq_next_policy.rpartition(".")[2]
        left = render.pending_until(due, obj.delayq_next_attempt, attempts=0)
        return format_html('{}<br><span class="delayq-more">{} {}</span>', render.time_tag(due), name, left)

    def _can_view_timeouts(self, request: HttpRequest) -> bool:
        return bool(request.user.has_perm("django_delayq.view_timeout"))


class NewestTimeouts(BaseGenericInlineFormSet):  # type: ignore[type-arg]
    """The newest rows of one object and of those that it owns, read-only.

    It ignores posted data: the rows may have changed since the page was rendered, and a payment that arrives meanwhile
    must not prevent the object's own form from being saved.
    """

    shown = 10
    request: Any = None
    """That of the visitor, who may view only some models."""
    site: Any = None
    new_objects = changed_objects = deleted_objects = list[Any]()

    def __init__(self, data: Any = None, files: Any = None, *, queryset: Any = None, **kwargs: Any) -> None:
        self.visible = Timeout.objects.all() if queryset is None else queryset
        super().__init__(None, None, queryset=queryset, **kwargs)

    def get_queryset(self) -> Any:
        if not hasattr(self, "_queryset"):
            rows, obj = self.visible.none(), self.instance
            if obj is not None and obj.pk is not None:
                model, using = type(obj), database_of(type(obj), obj)
                wanted = about_objects(tables_of(model), [obj], using) | selection.related_to(model, obj.pk, using)
                rows = self.visible.using(using).filter(wanted)
            self._queryset = named(rows.defer("history", "payload").order_by("-id")[: self.shown], self.request.user)
        return self._queryset

    @cached_property
    def banners(self) -> list[dict[str, Any]]:
        """Return why the rows that are not settled do not fire."""
        waiting = [row for row in self.get_queryset() if not row.is_settled]
        labels, queues = {row.policy for row in waiting}, {row.queue for row in waiting}
        return banners(self.request, self.site, labels, queues)

    @cached_property
    def links(self) -> list[dict[str, str]]:
        """Return the links to all timeouts of the object, and of its owners."""
        obj = self.instance
        return [] if obj.pk is None else related_links(self.request, self.site, type(obj), obj.pk)

    def is_valid(self) -> bool:
        return True

    def save(self, commit: bool = True) -> list[Any]:
        return []


class TimeoutInline(ReadOnlyAdmin, GenericTabularInline):
    """Show the newest timeouts of the object, with links to their pages: `inlines = [TimeoutInline]`. Read-only.

    `shown` is their number, 10 by default. Visitors who may not view timeouts do not see it. Timeouts of the object's
    parents (multi-table inheritance) are included, and those of the objects whose policies name it as their `owner`.
    """

    model = Timeout
    formset: Any = NewestTimeouts
    template = "admin/django_delayq/timeouts_inline.html"
    shown = NewestTimeouts.shown
    fields = ("policy_name", "key", "state_badge", "deadline_shown", "attempts", "reason_shown")
    readonly_fields: ClassVar[Any] = ("object_shown", *fields)
    verbose_name_plural = _("timeouts, newest first")

    def get_fields(self, request: HttpRequest, obj: Any = None) -> Any:
        """Return the columns, for an owner with the object of each timeout."""
        is_owner = obj is not None and selection.is_related(type(obj))
        return ("object_shown", *self.fields) if is_owner else self.fields

    def get_formset(self, request: Any, obj: Any = None, **kwargs: Any) -> Any:
        made = super().get_formset(request, obj, **kwargs)
        own: Any = made
        own.shown, own.request, own.site = self.shown, request, self.admin_site
        return made

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        """Return the rows that the site shows to the visitor."""
        is_permitted = self.has_view_or_change_permission(request)
        return visible_rows(request, self.admin_site) if is_permitted else Timeout.objects.none()

    @admin.display(description=_("object"))
    def object_shown(self, row: Timeout) -> str:
        kind = ContentType.objects.db_manager(row._state.db).get_for_id(row.content_type_id)
        return render.titled(kind.name, row.object_id, getattr(row, "delayq_name", ""))

    @admin.display(description=_("policy"))
    def policy_name(self, row: Timeout) -> str:
        """Render the policy as a link to the timeout, in the row itself: themes leave Django's own link out."""
        name = row.policy.rpartition(".")[2]  # without the model's name, which the page shows already
        page = address(self.admin_site, "timeout_change", row.pk)
        return format_html('<a href="{}">{}</a>', page, name) if page else name

    state_badge = column(_("state"), lambda row: render.badge(row))
    deadline_shown = column(_("deadline"), render.deadline)
    reason_shown = column(_("reason"), lambda row: render.last_error_and_reason(row) or "-")
