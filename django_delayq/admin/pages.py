"""The pages of timeouts, policies, and the log of changes. They change nothing except by operations of `actions`."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from typing import Any, Final
from urllib.parse import urlencode

from django.contrib import admin
from django.contrib.admin.views.main import ChangeList
from django.core.exceptions import PermissionDenied
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse
from django.urls import path
from django.utils.html import format_html
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from django_delayq.admin import actions as operate
from django_delayq.admin import filters, render
from django_delayq.admin.changelist import (
    LedgerAdmin,
    LedgerChangeList,
    OwnFiltersChangeList,
    address,
    column,
    named,
    object_column,
    related_column,
    story_column,
)
from django_delayq.admin.reports import chart, report_view
from django_delayq.ledger.routing import database_of
from django_delayq.ledger.search import Count
from django_delayq.models import PolicyChange, PolicyControl, Timeout
from django_delayq.monitoring.snapshot import PolicyStatus, overview
from django_delayq.operations import selection
from django_delayq.operations.changes import unfinished
from django_delayq.operations.registry import POLICY_OPERATIONS, operations_for
from django_delayq.policy.policies import registry
from django_delayq.scheduling.story import operator_label, reason_label
from django_delayq.times import clock

COUNTS: Final[dict[str, tuple[Any, dict[str, str]]]] = {
    "due": (_("due now"), {"due": "overdue"}),
    "failing": (_("failing"), {"due": "failing"}),
    "dead": (_("dead"), {"state__exact": "dead"}),
    "pending": (_("pending"), {"state__exact": "pending"}),
    "held": (_("on hold"), {"state__exact": "held"}),
    "fired": (_("fired, last day"), {"state__exact": "fired"}),
    "skipped": (_("skipped, last day"), {"state__exact": "skipped"}),
}
"""The numbers of a policy: the label, and the filters of the list that shows the rows."""
URGENCIES: Final = {
    "braked": _("stopped by its brake"),
    "overdue": _("overdue"),
    "undeclared": _("not declared"),
    "failing": _("has failing timeouts"),
    "dead": _("has dead timeouts"),
    "late": _("fires late"),
    "fine": _("in order"),
}
PLOTTED: Final = {
    "in_time": (_("in time"), "cancelled"),
    "fired": (_("fired"), "fired"),
    "late": (_("fired late"), "fired"),
    "dead": (_("dead"), "dead"),
}
"""What the plot of the last hours shows, the lowest part first, with the state of the rows."""


@admin.register(Timeout)
class TimeoutAdmin(LedgerAdmin):
    """The timeouts: object, policy, deadline, state, and what happened to each."""

    list_filter = filters.TIMEOUT_FILTERS
    search_fields = ("object_id", "key")
    # Django parses `due_at__year=...` of an address. The template does not show its links: they read every row.
    date_hierarchy = "due_at"
    actions = operate.timeout_actions()
    list_per_page = 50

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[ChangeList]:
        return LedgerChangeList

    def get_list_display(self, request: HttpRequest) -> Any:
        shown = object_column(request, self.admin_site)
        return ("id", shown, "policy_shown", "deadline", "state_and_reason", "attempts_shown")

    def get_fieldsets(self, request: HttpRequest, obj: Timeout | None = None) -> Any:
        shown, related = object_column(request, self.admin_site), related_column(request, self.admin_site)
        times = ("deadline", "set_by", "next_attempt", "counts_from", "first_deadline", "created", "settled")
        return (
            (None, {"fields": ("policy", shown, related, "key", "state_badge", "cause", "reason_shown")}),
            (_("Story"), {"fields": (story_column(request),)}),
            (_("Failures"), {"fields": ("attempts", "failures")}),
            (_("Times"), {"fields": times}),
            (_("Details"), {"fields": ("payload_shown", "queue", "extensions", "idempotency_key")}),
        )

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Any], search_term: str
    ) -> tuple[QuerySet[Any], bool]:
        """Return `queryset`: the change list has read the hits already."""
        return queryset, False

    @admin.display(description=_("policy"))
    def policy_shown(self, row: Timeout) -> str:
        """Render the policy and the key. Most rows have no key."""
        policy = render.policy_tag(row.policy)
        with_key = '{}<br><span class="delayq-more">{}: <bdi>{}</bdi></span>'
        return format_html(with_key, policy, _("key"), row.key) if row.key else policy

    state_and_reason = column(_("state and reason"), lambda row: render.badge(row) + render.last_error_and_reason(row))
    attempts_shown = column(_("attempts"), render.attempts)
    state_badge = column(_("state"), lambda row: render.badge(row))
    reason_shown = column(_("reason"), lambda row: reason_label(row.reason) or "-")
    deadline = column(_("deadline"), render.deadline)
    set_by = column(_("set by"), lambda row: str(filters.SET_BY["policy" if row.is_computed else "hand"]))
    next_attempt = column(_("next attempt"), render.next_attempt)
    counts_from = column(_("counts from"), lambda row: render.time_tag(row.since_at))
    first_deadline = column(_("first deadline"), lambda row: render.time_tag(row.first_due_at))
    created = column(_("created"), lambda row: render.time_tag(row.created_at))
    settled = column(_("settled"), lambda row: render.time_tag(row.settled_at))
    payload_shown = column(_("payload"), render.payload)
    failures = column(_("failures"), render.failures)

    def get_urls(self) -> list[Any]:
        view = self.operating(operate.TimeoutOperationView)
        return [path("operate/<slug:operation>/", view, name="django_delayq_timeout_operate"), *super().get_urls()]

    def changelist_view(self, request: HttpRequest, extra_context: dict[str, Any] | None = None) -> Any:
        """Show the list, with a banner for each reason why its timeouts do not fire."""
        owner = selection.model_named(request.GET.get(filters.RELATED, ""))
        if owner is not None and not selection.may_view(request.user, owner):
            raise PermissionDenied
        policy = request.GET.get(filters.POLICY)
        shown = operate.banners(request, self.admin_site, [policy] if policy else None)
        return super().changelist_view(request, {"delayq_banners": shown, **(extra_context or {})})

    def render_change_form(self, request: HttpRequest, context: Any, *args: Any, **kwargs: Any) -> Any:
        row = context.get("original")
        context["delayq_buttons"] = operate.buttons(request, row, self.admin_site) if row else []
        if row is not None:
            labels = [] if row.is_settled else [row.policy]
            context["delayq_banners"] = operate.banners(request, self.admin_site, labels, [row.queue])
            (row,) = named([row], request.user)
            if row.delayq_name:  # type: ignore[attr-defined]
                about = render.titled("", row.object_id, row.delayq_name)  # type: ignore[attr-defined]
                text = gettext("{policy} of {object}: {state}")
                context["subtitle"] = text.format(policy=row.policy, object=about, state=render.state_label(row))
        return super().render_change_form(request, context, *args, **kwargs)

    def get_actions(self, request: HttpRequest, action_location: Any = None) -> dict[str, Any]:
        place = () if action_location is None else (action_location,)  # Django 6.1 passes where they are shown
        permitted = operate.permitted_actions(request, self.admin_site)
        return {name: each for name, each in super().get_actions(request, *place).items() if name in permitted}


@admin.register(PolicyControl)
class PolicyControlAdmin(LedgerAdmin):
    """One page with all policies, and a page for each operation on one of them."""

    def get_urls(self) -> list[Any]:
        one, several = map(self.operating, (operate.PolicyOperationView, operate.PoliciesOperationView))
        policies = self.admin_site.admin_view(self.changelist_view)
        report = self.admin_site.admin_view(partial(report_view, site=self.admin_site))
        return [
            path("", policies, name="django_delayq_policycontrol_changelist"),
            path("selected/<slug:operation>/", several, name="django_delayq_policycontrol_operate_selected"),
            path("<str:label>/report/", report, name="django_delayq_policycontrol_report"),
            path("<str:label>/<slug:operation>/", one, name="django_delayq_policycontrol_operate"),
        ]

    def changelist_view(self, request: HttpRequest, extra_context: dict[str, Any] | None = None) -> HttpResponse:
        if not self.has_view_permission(request):
            raise PermissionDenied
        request.current_app = self.admin_site.name
        context = {
            **self.admin_site.each_context(request),
            "title": self.opts.verbose_name_plural,
            "opts": self.model._meta,
            "media": self.media,
            "shown": self.overview(request),
            **(extra_context or {}),
        }
        return TemplateResponse(request, "admin/django_delayq/policycontrol/policies.html", context)

    def overview(self, request: HttpRequest) -> dict[str, Any]:
        """Return what the first page shows; nothing to visitors who may see neither policies nor timeouts."""
        site, using = self.admin_site, database_of(Timeout)
        listed = address(site, "timeout_changelist") if request.user.has_perm("django_delayq.view_timeout") else ""
        if not listed and not self.has_view_permission(request):
            return {}
        seen: Any = overview(using)
        changing = {registry.get(label) for label in unfinished(using).values_list("policy", flat=True)}
        names = [f"{clock.local(hour.begins_at):%H:%M}" for hour in seen.hours]
        ended = {kind: [Count(getattr(hour, kind)) for hour in seen.hours] for kind in PLOTTED}
        plot = chart(names, {kind: (PLOTTED[kind][0], counts) for kind, counts in ended.items()})
        for kind in plot["kinds"] if listed else ():
            kind["address"] = f"{listed}?state__exact={PLOTTED[kind['kind']][1]}"
        return {
            "seen": seen,
            "oldest": render.lag(seen.oldest_overdue_seconds),
            "versions": {worker.version for worker in seen.workers},
            "numbers": numbers(seen, listed),
            "plot": plot,
            "policies": [self._row(request, policy, listed, changing) for policy in seen.policies],
            "banners": operate.banners(request, site, seen=seen),
            "for_selected": [
                {"label": each.label, "address": address(site, "policycontrol_operate_selected", each.name)}
                for each in POLICY_OPERATIONS.values()
                if each.is_for_several and each.is_permitted(request.user)
            ],
        }

    def _row(self, request: HttpRequest, status: PolicyStatus, listed: str, changing: Any) -> dict[str, Any]:
        """Return what the page shows of one policy; no operations while one of them moves rows."""
        site, state = self.admin_site, status.state
        is_moving = state is not None and state.policy in changing
        offered = [] if state is None or is_moving else operations_for(request.user, state)
        hours = [f"{clock.local(clock.now() + timedelta(hours=number)):%H:%M}" for number in range(len(status.hours))]
        return {
            "status": status,
            "tag": render.policy_tag(status.label),
            "urgency": URGENCIES.get(status.urgency) or (state and PolicyControl.Stop(state.stop).label),
            "numbers": numbers(status, listed, status.label),
            **{name: render.lag(getattr(status, name)) for name in ("waited_seconds", "lag_p50", "lag_p99")},
            "chart": chart(hours, {"due": (_("Due in the next 24 hours"), status.hours)}),
            "report": address(site, "policycontrol_report", status.label) if listed else "",
            "is_moving": is_moving,
            "buttons": [
                {"operation": each, "address": address(site, "policycontrol_operate", status.label, each.name)}
                for each in offered
            ],
            **(render.in_force(state) if state is not None else {}),
        }


def numbers(of: Any, listed: str, policy: str = "") -> list[dict[str, Any]]:
    """Return the counts of a policy, or of all together, each with the address of its rows."""
    found = []
    for name, (label, asked) in COUNTS.items():
        if (count := getattr(of, name, None)) is not None:
            query = urlencode({"policy": policy, **asked} if policy else asked)
            shown = {"name": name, "label": label, "count": count, "address": f"{listed}?{query}" if listed else ""}
            found.append({**shown, "is_bad": bool(count.value) and name in {"failing", "dead"}})
    return found


@admin.register(PolicyChange)
class PolicyChangeAdmin(LedgerAdmin):
    """The changes of policies: policy, actor, reason and moved deadlines. They are few, so Django may count them."""

    list_display = ("at_shown", "policy_shown", "what", "by_shown", "reason_shown", "moved", "unmoved", "finished")
    list_filter = ("what",)

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[ChangeList]:
        return OwnFiltersChangeList

    at_shown = column(_("at"), lambda change: render.time_tag(change.at))
    policy_shown = column(_("policy"), lambda change: render.policy_tag(change.policy))
    by_shown = column(_("by"), lambda change: operator_label(change.by))
    reason_shown = column(_("reason"), lambda change: render.reason(change.reason))
    finished = column(_("finished"), lambda change: render.time_tag(change.finished_at))
