"""The ledger's list and detail page. Nothing is added, changed or deleted here but by the operator's actions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.contrib import admin
from django.contrib.admin.views.main import ChangeList
from django.db import transaction
from django.urls import path
from django.utils.html import format_html
from django.utils.translation import gettext_lazy as _

from django_delayq.admin import telling
from django_delayq.admin.actions import steering_actions
from django_delayq.admin.changelist import LedgerChangeList
from django_delayq.admin.filters import DueFilter, ObjectFilter, PolicyFilter, QueueFilter
from django_delayq.admin.objects import ObjectColumn
from django_delayq.admin.operations import OPERATIONS
from django_delayq.admin.reading import WindowPaginator
from django_delayq.admin.steering_pages import buttons, steer_view
from django_delayq.admin.wording import badge, clamped, deadline, policy_tag, time_tag
from django_delayq.ledger.locking import database_of
from django_delayq.models import Timeout
from django_delayq.scheduling.story import told_reason

if TYPE_CHECKING:
    from django.db.models import QuerySet
    from django.http import HttpRequest, HttpResponse

    _ModelAdmin = admin.ModelAdmin[Timeout]
else:
    _ModelAdmin = admin.ModelAdmin


@admin.register(Timeout)
class TimeoutAdmin(_ModelAdmin):
    """Who waits for what until when, and the story behind each row."""

    list_display = ("id", "object_shown", "policy_shown", "deadline", "state_and_reason", "attempts")
    list_filter = (DueFilter, "state", PolicyFilter, QueueFilter, ObjectFilter)
    search_fields = ("object_id", "key")
    search_help_text = _("In full, as the ledger has it.")
    sortable_by = ()
    ordering = ("-id",)
    actions = steering_actions()
    list_per_page = 50
    paginator = WindowPaginator
    show_full_result_count = False
    show_facets = admin.ShowFacets.NEVER  # they would count the table, once for each choice of each filter
    list_select_related = False  # a join would hide the rows whose kind of object is gone
    fieldsets = (
        (None, {"fields": ("policy", "object_shown", "key", "state_badge", "cause", "reason_shown")}),
        (_("Story"), {"fields": ("story",)}),
        (_("Failures"), {"fields": ("attempts", "failures")}),
        (_("Times"), {"fields": ("deadline", "next_attempt", "counts_from", "first_deadline", "created", "settled")}),
        (_("Details"), {"fields": ("payload_shown", "queue", "extensions", "idempotency_key")}),
    )

    class Media:
        css = {"all": ("django_delayq/admin.css",)}
        js = ("django_delayq/admin.js",)

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[ChangeList]:
        return LedgerChangeList

    def get_list_display(self, request: HttpRequest) -> Any:
        """With the column of objects made for this visitor, who may not look at all of them."""
        shown = ObjectColumn(request, self.admin_site)
        return [shown if name == "object_shown" else name for name in self.list_display]

    def get_readonly_fields(self, request: HttpRequest, obj: Timeout | None = None) -> Any:
        return [field for _title, options in self.get_fieldsets(request, obj) for field in options["fields"]]

    def get_fieldsets(self, request: HttpRequest, obj: Timeout | None = None) -> Any:
        """With the object made for this visitor."""
        shown = ObjectColumn(request, self.admin_site)
        return [
            (title, {**options, "fields": [shown if name == "object_shown" else name for name in options["fields"]]})
            for title, options in self.fieldsets
        ]

    def get_queryset(self, request: HttpRequest) -> QuerySet[Timeout]:
        """From the writer, as a replica may be behind; for the list without the columns that may be large."""
        rows = super().get_queryset(request).using(database_of(Timeout))
        match = request.resolver_match
        is_list = match is not None and str(match.url_name).endswith("_changelist")
        return rows.defer("history", "payload") if is_list else rows

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Any], search_term: str
    ) -> tuple[QuerySet[Any], bool]:
        """As they are: the change list has read the hits already."""
        return queryset, False

    @admin.display(description=_("policy"))
    def policy_shown(self, row: Timeout) -> str:
        """The policy's name, and below it the rest of its label and the key: most rows have none."""
        if not row.key:
            return policy_tag(row.policy)
        return format_html(
            '{}<br><span class="delayq-more">{}: <bdi>{}</bdi></span>', policy_tag(row.policy), _("key"), row.key
        )

    @admin.display(description=_("object"))
    def object_shown(self, row: Timeout) -> str:
        """The object's id; where there is a visitor, `ObjectColumn` stands in its place."""
        return row.object_id

    @admin.display(description=_("state"))
    def state_badge(self, row: Timeout) -> str:
        return badge(row.state)

    @admin.display(description=_("state and reason"))
    def state_and_reason(self, row: Timeout) -> str:
        """The state, and below it why."""
        if not row.reason:
            return badge(row.state)
        return format_html("{}{}", badge(row.state), clamped(told_reason(row.reason)))

    @admin.display(description=_("reason"))
    def reason_shown(self, row: Timeout) -> str:
        return told_reason(row.reason) or "-"

    @admin.display(description=_("deadline"))
    def deadline(self, row: Timeout) -> str:
        return deadline(row)

    @admin.display(description=_("next attempt"))
    def next_attempt(self, row: Timeout) -> str:
        return telling.next_attempt(row)

    @admin.display(description=_("counts from"))
    def counts_from(self, row: Timeout) -> str:
        return time_tag(row.since_at)

    @admin.display(description=_("first deadline"))
    def first_deadline(self, row: Timeout) -> str:
        return time_tag(row.first_due_at)

    @admin.display(description=_("created"))
    def created(self, row: Timeout) -> str:
        return time_tag(row.created_at)

    @admin.display(description=_("settled"))
    def settled(self, row: Timeout) -> str:
        return time_tag(row.settled_at)

    @admin.display(description=_("what happened"))
    def story(self, row: Timeout) -> str:
        return telling.story(row)

    @admin.display(description=_("payload"))
    def payload_shown(self, row: Timeout) -> str:
        return telling.payload(row)

    @admin.display(description=_("failures"))
    def failures(self, row: Timeout) -> str:
        return telling.failures(row)

    def get_urls(self) -> list[Any]:
        """With the pages that ask once more and then act."""

        def steer(request: HttpRequest, operation: str) -> HttpResponse:
            return steer_view(request, operation, self.admin_site)

        # Each page of rows is a transaction of its own, with its log: not one for all of them around the request.
        view = transaction.non_atomic_requests(self.admin_site.admin_view(steer))
        return [path("steer/<slug:operation>/", view, name="django_delayq_timeout_steer"), *super().get_urls()]

    def render_change_form(self, request: HttpRequest, context: Any, *args: Any, **kwargs: Any) -> Any:
        row = context.get("original")
        context["delayq_buttons"] = buttons(request, row, self.admin_site) if row else []
        return super().render_change_form(request, context, *args, **kwargs)

    def get_actions(self, request: HttpRequest, action_location: Any = None) -> dict[str, Any]:
        """Those that the visitor may do."""
        place = () if action_location is None else (action_location,)  # Django 6.1 says where they are to be shown
        allowed = {f"{name}_timeouts" for name, operation in OPERATIONS.items() if operation.is_allowed(request)}
        return {name: action for name, action in super().get_actions(request, *place).items() if name in allowed}

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Timeout | None = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Timeout | None = None) -> bool:
        return False
