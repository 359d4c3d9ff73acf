"""The operator's verbs as actions of lists: of the list of timeouts, and of your own objects'."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.contrib import messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.utils.translation import gettext as _

from django_delayq.admin.about import of_objects
from django_delayq.admin.operations import OPERATIONS
from django_delayq.admin.steering_pages import MOST, ask
from django_delayq.models import Timeout

if TYPE_CHECKING:
    from collections.abc import Callable

    from django.contrib.admin import ModelAdmin
    from django.db.models import QuerySet
    from django.http import HttpRequest, HttpResponse

    from django_delayq.admin.operations import Operation

    Action = Callable[["ModelAdmin[Any]", HttpRequest, QuerySet[Any]], HttpResponse | None]


def steering_actions(*, of_the_objects: bool = False) -> list[Any]:
    """An action for each operation: on the chosen rows, or on the rows about the chosen objects."""
    return [_action(operation, of_the_objects=of_the_objects) for operation in OPERATIONS.values()]


def _action(operation: Operation, *, of_the_objects: bool) -> Action:
    def act(model_admin: ModelAdmin[Any], request: HttpRequest, queryset: QuerySet[Any]) -> HttpResponse | None:
        ids = _of_objects(queryset, operation) if of_the_objects else _chosen(request, queryset)
        if not ids:
            messages.warning(request, _("There is no timeout among these for which this could be done."))
            return None
        if len(ids) > MOST:
            words = _("Only the first {most} of them at a time; for the rest choose again.")
            messages.warning(request, words.format(most=MOST))
        return ask(request, operation, ids[:MOST], model_admin.admin_site, back=request.get_full_path())

    act.__name__ = f"{operation.name}_timeouts"
    words = _("Timeouts: {what}").format(what=operation.button) if of_the_objects else operation.action
    act.short_description = words  # type: ignore[attr-defined]
    return act


def _chosen(request: HttpRequest, queryset: QuerySet[Any]) -> list[int]:
    """The keys of the rows that were ticked, wherever in the list they may be by now; else of the whole list."""
    if request.POST.get("select_across") not in {None, "", "0"}:
        return list(queryset.values_list("pk", flat=True)[: MOST + 1])
    return [int(pk) for pk in request.POST.getlist(ACTION_CHECKBOX_NAME) if pk.isascii() and pk.isdigit()]


def _of_objects(queryset: QuerySet[Any], operation: Operation) -> list[int]:
    """The keys of the rows about the chosen objects to which this can be done."""
    objects = list(queryset[:MOST])
    rows = of_objects(objects).filter(state__in=sorted(operation.states)) if objects else Timeout.objects.none()
    return list(rows.order_by("id").values_list("pk", flat=True)[: MOST + 1])
