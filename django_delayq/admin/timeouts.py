"""The list of timeouts, and the page of each. They change nothing except by the operations of `actions`."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.contrib.admin.views.main import ChangeList
from django.core.exceptions import PermissionDenied
from django.db import transaction
from django.db.models import QuerySet
from django.http import HttpRequest
from django.urls import path
from django.utils.html import format_html
from django.utils.translation import gettext_lazy as _

from django_delayq.admin import render
from django_delayq.admin.actions import (
    TimeoutOperationView,
    brake_banners,
    buttons,
    permitted_actions,
    timeout_actions,
)
from django_delayq.admin.changelist import (
    LedgerAdmin,
    LedgerChangeList,
    ObjectColumn,
    RelatedColumn,
    WindowPaginator,
    column,
)
from django_delayq.admin.filters import (
    OWNER,
    DeadlineFilter,
    DueFilter,
    ObjectFilter,
    OwnerFilter,
    PolicyFilter,
    QueueFilter,
    model_named,
)
from django_delayq.ledger.controls import policy_states
from django_delayq.ledger.locking import database_of
from django_delayq.models import Timeout
from django_delayq.operations.selection import may_view
from django_delayq.scheduling.story import reason_label


@admin.register(Timeout)
class TimeoutAdmin(LedgerAdmin):
    """The timeouts: object, policy, deadline, state, and what happened to each."""

    list_filter = (DueFilter, "state", PolicyFilter, ("due_at", DeadlineFilter), QueueFilter, ObjectFilter, OwnerFilter)
    search_fields = ("object_id", "key")
    # Django parses `due_at__year=...` of an address. The template does not show its links: they read every row.
    date_hierarchy = "due_at"
    actions = timeout_actions()
    list_per_page = 50
    paginator = WindowPaginator
    list_select_related = False  # a join would hide the rows whose kind of object is gone

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[ChangeList]:
        return LedgerChangeList

    def get_list_display(self, request: HttpRequest) -> Any:
        shown = ObjectColumn(request, self.admin_site)
        return ("id", shown, "policy_shown", "deadline", "state_and_reason", "attempts")

    def get_readonly_fields(self, request: HttpRequest, obj: Timeout | None = None) -> Any:
        return [field for _title, options in self.get_fieldsets(request, obj) for field in options["fields"]]

    def get_fieldsets(self, request: HttpRequest, obj: Timeout | None = None) -> Any:
        shown, related = ObjectColumn(request, self.admin_site), RelatedColumn(request, self.admin_site)
        times = ("deadline", "next_attempt", "counts_from", "first_deadline", "created", "settled")
        return (
            (None, {"fields": ("policy", shown, related, "key", "state_badge", "cause", "reason_shown")}),
            (_("Story"), {"fields": ("story",)}),
            (_("Failures"), {"fields": ("attempts", "failures")}),
            (_("Times"), {"fields": times}),
            (_("Details"), {"fields": ("payload_shown", "queue", "extensions", "idempotency_key")}),
        )

    def get_queryset(self, request: HttpRequest) -> QuerySet[Timeout]:
        """Return the rows; for the list without large columns."""
        rows = super().get_queryset(request)
        match = request.resolver_match
        is_list = match is not None and str(match.url_name).endswith("_changelist")
        return rows.defer("history", "payload") if is_list else rows

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Any], search_term: str
    ) -> tuple[QuerySet[Any], bool]:
        """Return `queryset`: the change list has read the hits already."""
        return queryset, False

    @admin.display(description=_("policy"))
    def policy_shown(self, row: Timeout) -> str:
        """Render the policy and the key. Most rows have no key."""
        policy = render.policy_tag(row.policy)
        if not row.key:
            return policy
        return format_html('{}<br><span class="delayq-more">{}: <bdi>{}</bdi></span>', policy, _("key"), row.key)

    @admin.display(description=_("state and reason"))
    def state_and_reason(self, row: Timeout) -> str:
        if not row.reason:
            return render.badge(row.state)
        return format_html("{}{}", render.badge(row.state), render.clamped(reason_label(row.reason)))

    state_badge = column(_("state"), lambda row: render.badge(row.state))
    reason_shown = column(_("reason"), lambda row: reason_label(row.reason) or "-")
    deadline = column(_("deadline"), render.deadline)
    next_attempt = column(_("next attempt"), render.next_attempt)
    counts_from = column(_("counts from"), lambda row: render.time_tag(row.since_at))
    first_deadline = column(_("first deadline"), lambda row: render.time_tag(row.first_due_at))
    created = column(_("created"), lambda row: render.time_tag(row.created_at))
    settled = column(_("settled"), lambda row: render.time_tag(row.settled_at))
    story = column(_("what happened"), render.story)
    payload_shown = column(_("payload"), render.payload)
    failures = column(_("failures"), render.failures)

    def get_urls(self) -> list[Any]:
        # Each page of rows is a transaction of its own, with its log, so there must be none around the request.
        operate = TimeoutOperationView.as_view(site=self.admin_site)
        view = transaction.non_atomic_requests(self.admin_site.admin_view(operate))
        return [path("steer/<slug:operation>/", view, name="django_delayq_timeout_steer"), *super().get_urls()]

    def changelist_view(self, request: HttpRequest, extra_context: dict[str, Any] | None = None) -> Any:
        """Show the list, with a banner if the brake of a policy has paused it: its timeouts are overdue."""
        owner = model_named(request.GET.get(OWNER))
        if owner is not None and not may_view(request.user, owner):
            raise PermissionDenied
        braked = brake_banners(request, policy_states(database_of(Timeout)), self.admin_site)
        return super().changelist_view(request, {"braked": braked, **(extra_context or {})})

    def render_change_form(self, request: HttpRequest, context: Any, *args: Any, **kwargs: Any) -> Any:
        row = context.get("original")
        context["delayq_buttons"] = buttons(request, row, self.admin_site) if row else []
        return super().render_change_form(request, context, *args, **kwargs)

    def get_actions(self, request: HttpRequest, action_location: Any = None) -> dict[str, Any]:
        place = () if action_location is None else (action_location,)  # Django 6.1 passes where they are shown
        permitted = permitted_actions(request, self.admin_site)
        return {name: each for name, each in super().get_actions(request, *place).items() if name in permitted}
