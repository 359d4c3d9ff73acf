"""The policies page: what each policy is, how it does, and what operators may do to it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from django.contrib import admin
from django.core.exceptions import PermissionDenied
from django.db import transaction
from django.template.response import TemplateResponse
from django.urls import path, reverse
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from django_delayq import clock
from django_delayq.admin import describing
from django_delayq.admin.chart import chart
from django_delayq.admin.policy_operations import POLICY_OPERATIONS
from django_delayq.admin.policy_pages import operation_view, unfinished_labels
from django_delayq.admin.reading import WindowPaginator
from django_delayq.admin.wording import clamped, policy_tag, time_tag
from django_delayq.ledger import controls
from django_delayq.ledger.locking import database_of
from django_delayq.models import PolicyChange, PolicyControl, Timeout
from django_delayq.monitoring import snapshot as status

if TYPE_CHECKING:
    from django.db.models import QuerySet
    from django.http import HttpRequest, HttpResponse

    from django_delayq.ledger.controls import PolicyState
    from django_delayq.monitoring.snapshot import PolicyStatus

    _Controls = admin.ModelAdmin[PolicyControl]
    _Changes = admin.ModelAdmin[PolicyChange]
else:
    _Controls = _Changes = admin.ModelAdmin

COUNTED: dict[str, tuple[Any, dict[str, str]]] = {
    "pending": (gettext_lazy("pending"), {"state__exact": "pending"}),
    "due": (gettext_lazy("due now"), {"due": "overdue"}),
    "dead": (gettext_lazy("dead"), {"state__exact": "dead"}),
    "fired": (gettext_lazy("fired, last day"), {"state__exact": "fired"}),
    "skipped": (gettext_lazy("skipped, last day"), {"state__exact": "skipped"}),
}
"""The numbers of a policy: their words, and the filters of the list that shows the rows."""


@admin.register(PolicyControl)
class PolicyControlAdmin(_Controls):
    """One page with all policies, and a page for each thing that may be done to one of them."""

    class Media:
        css = {"all": ("django_delayq/admin.css",)}
        js = ("django_delayq/admin.js",)

    def get_urls(self) -> list[Any]:
        """The pages that ask once more and then act; there is no page for a single row."""

        def operate(request: HttpRequest, label: str, operation: str) -> HttpResponse:
            return operation_view(request, label, operation, self.admin_site)

        # Moving rows commits page by page: not inside the request's transaction, if there is one.
        view = transaction.non_atomic_requests(self.admin_site.admin_view(operate))
        listed = self.admin_site.admin_view(self.changelist_view)
        return [
            path("", listed, name="django_delayq_policycontrol_changelist"),
            path("<str:label>/<slug:operation>/", view, name="django_delayq_policycontrol_operate"),
        ]

    def changelist_view(self, request: HttpRequest, extra_context: dict[str, Any] | None = None) -> HttpResponse:
        """All policies. Raises PermissionDenied."""
        if not self.has_view_permission(request):
            raise PermissionDenied
        request.current_app = self.admin_site.name
        context = {
            **self.admin_site.each_context(request),
            "title": _("Policies"),
            "opts": self.model._meta,
            "media": self.media,
            "policies": self._policies(request),
            "sees_timeouts": request.user.has_perm("django_delayq.view_timeout"),
            **(extra_context or {}),
        }
        return TemplateResponse(request, "admin/django_delayq/policycontrol/policies.html", context)

    def _policies(self, request: HttpRequest) -> list[dict[str, Any]]:
        using = database_of(Timeout)
        moving = unfinished_labels(using)
        states = {state.label: state for state in controls.policy_states(using)}
        listed = reverse(f"{self.admin_site.name}:django_delayq_timeout_changelist")
        found = []
        for counted in status.policy_statuses(using):
            state = states.get(counted.label)
            found.append(
                {
                    **_numbers(counted, listed),
                    "label": counted.label,
                    "state": state,
                    **(_described(state) if state else {}),
                    "is_moving": counted.label in moving,
                    "buttons": self._buttons(request, state) if state and counted.label not in moving else [],
                }
            )
        return found

    def _buttons(self, request: HttpRequest, state: PolicyState) -> list[dict[str, str]]:
        name = f"{self.admin_site.name}:django_delayq_policycontrol_operate"
        return [
            {"words": str(operation.button), "address": reverse(name, args=[state.label, operation.name])}
            for operation in POLICY_OPERATIONS.values()
            if operation.fits(state) and operation.is_allowed(request)
        ]

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False


def _described(state: PolicyState) -> dict[str, Any]:
    policy = state.policy
    return {
        "model": policy.model._meta.verbose_name,
        "model_label": policy.model._meta.label,
        "delay": describing.delay_in_force(state),
        "counts_from": describing.counts_from(policy),
        "condition": describing.condition(policy),
        "handler": describing.handler(policy),
        "queue": policy.queue,
        "stopped": describing.stopped(state),
    }


def _numbers(counted: PolicyStatus, listed: str) -> dict[str, Any]:
    return {
        "counts": [
            {
                "name": name,
                "words": words,
                "count": getattr(counted, name),
                "address": f"{listed}?{urlencode({'policy': counted.label, **filters})}",
            }
            for name, (words, filters) in COUNTED.items()
        ],
        "lag_p50": describing.seconds(counted.lag_p50),
        "lag_p99": describing.seconds(counted.lag_p99),
        "chart": chart([(hour.value, hour.is_capped) for hour in counted.hours], clock.now()),
    }


@admin.register(PolicyChange)
class PolicyChangeAdmin(_Changes):
    """Who did what to which policy, when and why. Read-only."""

    list_display = ("at_shown", "policy_shown", "what", "by", "reason_shown", "moved", "unmoved", "finished")
    ordering = ("-id",)
    sortable_by = ()
    paginator = WindowPaginator
    show_full_result_count = False
    show_facets = admin.ShowFacets.NEVER
    list_filter = ("what",)

    class Media:
        css = {"all": ("django_delayq/admin.css",)}

    def get_queryset(self, request: HttpRequest) -> QuerySet[PolicyChange]:
        """From the writer, as a replica may be behind."""
        return super().get_queryset(request).using(database_of(Timeout))

    @admin.display(description=gettext_lazy("at"))
    def at_shown(self, change: PolicyChange) -> str:
        return time_tag(change.at)

    @admin.display(description=gettext_lazy("policy"))
    def policy_shown(self, change: PolicyChange) -> str:
        return policy_tag(change.policy)

    @admin.display(description=gettext_lazy("reason"))
    def reason_shown(self, change: PolicyChange) -> str:
        return clamped(change.reason) if change.reason else "-"

    @admin.display(description=gettext_lazy("finished"))
    def finished(self, change: PolicyChange) -> str:
        return time_tag(change.finished_at)

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False
