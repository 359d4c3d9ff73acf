"""The policies page: what each policy is, how it performs, and what operators may do to it. And the log of changes."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any, Final
from urllib.parse import urlencode

from django.contrib import admin
from django.core.exceptions import PermissionDenied
from django.db import transaction
from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse
from django.urls import path, reverse
from django.utils.translation import gettext_lazy

from django_delayq import clock
from django_delayq.admin import render
from django_delayq.admin.actions import PolicyOperationView, brake_banners
from django_delayq.admin.changelist import LedgerAdmin, column
from django_delayq.ledger.controls import PolicyState
from django_delayq.ledger.locking import database_of
from django_delayq.ledger.search import NOTHING, Count
from django_delayq.models import PolicyChange, PolicyControl, Timeout
from django_delayq.monitoring.snapshot import PolicyStatus, policy_statuses
from django_delayq.operations.registry import operations_for
from django_delayq.operations.replan import unfinished
from django_delayq.policies import registry
from django_delayq.scheduling.story import operator_label, reason_label

COUNTS: Final[dict[str, tuple[Any, dict[str, str]]]] = {
    "pending": (gettext_lazy("pending"), {"state__exact": "pending"}),
    "due": (gettext_lazy("due now"), {"due": "overdue"}),
    "dead": (gettext_lazy("dead"), {"state__exact": "dead"}),
    "fired": (gettext_lazy("fired, last day"), {"state__exact": "fired"}),
    "skipped": (gettext_lazy("skipped, last day"), {"state__exact": "skipped"}),
}
"""The numbers of a policy: the label, and the filters of the list that shows the rows."""
BAR_STEP, CHART_HEIGHT = 20, 64
HOURS_PER_LABEL: Final = 6


@admin.register(PolicyControl)
class PolicyControlAdmin(LedgerAdmin):
    """One page with all policies, and a page for each operation on one of them."""

    def get_urls(self) -> list[Any]:
        # Moving rows commits page by page, so it must not run in a transaction around the request.
        operate = PolicyOperationView.as_view(site=self.admin_site)
        view = transaction.non_atomic_requests(self.admin_site.admin_view(operate))
        policies = self.admin_site.admin_view(self.changelist_view)
        return [
            path("", policies, name="django_delayq_policycontrol_changelist"),
            path("<str:label>/<slug:operation>/", view, name="django_delayq_policycontrol_operate"),
        ]

    def changelist_view(self, request: HttpRequest, extra_context: dict[str, Any] | None = None) -> HttpResponse:
        if not self.has_view_permission(request):
            raise PermissionDenied
        request.current_app = self.admin_site.name
        policies = self._policies(request)
        states = [policy["state"] for policy in policies if policy["state"] is not None]
        context = {
            **self.admin_site.each_context(request),
            "title": self.opts.verbose_name_plural,
            "opts": self.model._meta,
            "media": self.media,
            "policies": policies,
            "braked": brake_banners(request, states, self.admin_site),
            "can_view_timeouts": request.user.has_perm("django_delayq.view_timeout"),
            **(extra_context or {}),
        }
        return TemplateResponse(request, "admin/django_delayq/policycontrol/policies.html", context)

    def _policies(self, request: HttpRequest) -> list[dict[str, Any]]:
        using = database_of(Timeout)
        changing = {registry.get(label) for label in unfinished(using).values_list("policy", flat=True)}
        found = []
        for status in policy_statuses(using):
            state, shown = status.state, self._numbers(status)
            if state is not None:
                shown |= {
                    "is_moving": state.policy in changing,
                    "model_label": state.policy.model._meta.label,
                    "delay": render.delay_in_force(state),
                    "counts_from": render.counts_from(state.policy),
                    "condition": render.condition(state.policy),
                    "guards": render.guard_rails(state),
                    "stopped": render.stop(state),
                    "buttons": [] if state.policy in changing else self._buttons(request, state),
                }
            found.append(shown)
        return found

    def _numbers(self, status: PolicyStatus) -> dict[str, Any]:
        timeouts = reverse(f"{self.admin_site.name}:django_delayq_timeout_changelist")
        counts = [
            {
                "name": name,
                "label": label,
                "count": getattr(status, name),
                "address": f"{timeouts}?{urlencode({'policy': status.label, **filters})}",
            }
            for name, (label, filters) in COUNTS.items()
        ]
        return {
            "label": status.label,
            "state": status.state,
            "counts": counts,
            "lag_p50": render.lag(status.lag_p50),
            "lag_p99": render.lag(status.lag_p99),
            "chart": chart(status.hours, clock.now()),
        }

    def _buttons(self, request: HttpRequest, state: PolicyState) -> list[dict[str, str]]:
        name = f"{self.admin_site.name}:django_delayq_policycontrol_operate"
        return [
            {"label": str(each.label), "address": reverse(name, args=[state.label, each.name])}
            for each in operations_for(request.user, state)
        ]


def chart(hours: Sequence[Count], now: datetime) -> dict[str, Any]:
    """Return what the template draws: a bar for each of the next hours, and its row in the table."""
    highest, bars = max(hours, default=NOTHING), []
    for number, count in enumerate(hours):
        height = max(1, round(count.value * CHART_HEIGHT / highest.value)) if count.value else 0
        hour = now + timedelta(hours=number)
        place = {"x": number * BAR_STEP, "y": CHART_HEIGHT - height, "height": height}
        bar = {name: str(value) for name, value in place.items()}  # strings: the template would localize numbers
        bar |= {"count": str(count), "hour": f"{clock.local(hour):%H:%M}"}
        bars.append(bar | {"is_labelled": number % HOURS_PER_LABEL == 0})  # the axis has no room for all hours
    return {"bars": bars, "highest": str(highest), "total": str(sum(hours, NOTHING)), "is_empty": not highest.value}


@admin.register(PolicyChange)
class PolicyChangeAdmin(LedgerAdmin):
    """The changes of policies: policy, actor, reason and moved deadlines. They are few, so Django may count them."""

    list_display = ("at_shown", "policy_shown", "what", "by_shown", "reason_shown", "moved", "unmoved", "finished")
    list_filter = ("what",)

    at_shown = column(gettext_lazy("at"), lambda change: render.time_tag(change.at))
    policy_shown = column(gettext_lazy("policy"), lambda change: render.policy_tag(change.policy))
    by_shown = column(gettext_lazy("by"), lambda change: operator_label(change.by))
    reason_shown = column(
        gettext_lazy("reason"), lambda change: render.clamped(reason_label(change.reason)) if change.reason else "-"
    )
    finished = column(gettext_lazy("finished"), lambda change: render.time_tag(change.finished_at))
