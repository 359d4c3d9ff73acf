"""The ledger in Django's admin: who waits for what until when, and the story behind each row. Read-only.

Lists neither load the objects that timeouts are about nor count the table: with a million rows both would
take seconds, and a row whose object or policy is gone must show all the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.contrib import admin
from django.core.paginator import Paginator
from django.utils import timezone
from django.utils.functional import cached_property
from django.utils.html import format_html, format_html_join
from django.utils.translation import gettext_lazy as _

from django_delayq.models import Timeout
from django_delayq.policies import get_policies
from django_delayq.story import explain_timeout

if TYPE_CHECKING:
    from django.db.models import QuerySet
    from django.http import HttpRequest

    _Paginator = Paginator[Any]
    _ModelAdmin = admin.ModelAdmin[Timeout]
else:
    _Paginator, _ModelAdmin = Paginator, admin.ModelAdmin

MAX_COUNT = 10_000


class CappedPaginator(_Paginator):
    """Counts no further than `MAX_COUNT` rows: an exact COUNT(*) reads the whole table."""

    @cached_property
    def count(self) -> int:
        """The number of rows, or `MAX_COUNT` if there are more."""
        rows: Any = self.object_list
        return len(rows.order_by().values_list("pk", flat=True)[:MAX_COUNT])


class PolicyFilter(admin.SimpleListFilter):
    """By declared policy, without a DISTINCT over the table; former labels count as their policy."""

    title = _("policy")
    parameter_name = "policy"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        return [(policy.label, policy.label) for policy in sorted(get_policies(), key=lambda policy: policy.label)]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        chosen = next((policy for policy in get_policies() if policy.label == self.value()), None)
        return queryset if chosen is None else queryset.filter(policy__in=chosen.labels)


@admin.register(Timeout)
class TimeoutAdmin(_ModelAdmin):
    """List and detail; nothing can be added, changed or deleted here."""

    list_display = ("id", "policy", "object_shown", "key", "state", "deadline", "attempts", "reason")
    list_filter = ("state", PolicyFilter)
    search_fields = ("=object_id", "=key")
    search_help_text = _("object id or key")
    ordering = ("-id",)
    list_per_page = 50
    paginator = CappedPaginator
    show_full_result_count = False
    list_select_related = ("content_type",)
    fieldsets = (
        (None, {"fields": ("policy", "object_shown", "key", "queue", "state", "cause", "reason")}),
        (_("Times"), {"fields": ("due_at", "run_at", "since_at", "first_due_at", "created_at", "settled_at")}),
        (_("Story"), {"fields": ("story", "attempts", "extensions")}),
        (_("Details"), {"fields": ("payload", "failures", "idempotency_key")}),
    )

    def get_queryset(self, request: HttpRequest) -> QuerySet[Timeout]:
        """For the list without the columns that may be large."""
        rows = super().get_queryset(request)
        match = request.resolver_match
        is_list = match is not None and str(match.url_name).endswith("_changelist")
        return rows.defer("history", "payload") if is_list else rows

    @admin.display(description=_("object"))
    def object_shown(self, row: Timeout) -> str:
        """The object's kind and id, as the row has them; the object is not loaded."""
        return f"{row.content_type.model} {row.object_id}" if row.content_type_id else row.object_id

    @admin.display(description=_("deadline"), ordering="due_at")
    def deadline(self, row: Timeout) -> str:
        """Local time, with the seconds that decide."""
        moment = timezone.localtime(row.due_at) if timezone.is_aware(row.due_at) else row.due_at
        return f"{moment:%Y-%m-%d %H:%M:%S}"

    @admin.display(description=_("what happened"))
    def story(self, row: Timeout) -> str:
        """Every event of this round."""
        told = explain_timeout(row)
        lines = format_html_join("", "<li>{}</li>", ((str(event),) for event in told))
        outlook = "" if row.is_settled else told.outlook
        return format_html("<ol>{}</ol><p>{}</p>", lines, outlook)

    @admin.display(description=_("failures"))
    def failures(self, row: Timeout) -> str:
        """The tracebacks of the attempts that failed."""
        texts = ((error.get("at", ""), error.get("traceback", "")) for error in row.errors)
        return format_html_join("", "<details open><summary>{}</summary><pre>{}</pre></details>", texts) or "-"

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Timeout | None = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Timeout | None = None) -> bool:
        return False
