"""Operations on timeouts: the list's actions and the page's buttons, the page that asks for confirmation, the result.

Changes are made by a POST of that page alone. They are written to Django's admin log.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from django.contrib import messages
from django.contrib.admin import AdminSite, ModelAdmin
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.contrib.admin.models import CHANGE, LogEntry
from django.contrib.admin.utils import quote
from django.core.exceptions import PermissionDenied
from django.db.models import QuerySet
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import reverse
from django.utils.http import url_has_allowed_host_and_scheme
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from django_delayq.admin import render
from django_delayq.admin.changelist import ObjectColumn
from django_delayq.admin.filters import rows_about
from django_delayq.admin.forms import FORMS, ReasonForm
from django_delayq.exceptions import DelayqError
from django_delayq.ledger.locking import database_of
from django_delayq.models import Timeout
from django_delayq.operations import Refusal, Result
from django_delayq.operations.registry import TIMEOUT_OPERATIONS, Operation

MAX_ROWS: Final = 1_000
"""For more rows use the commands, which report progress."""
MAX_ROWS_SHOWN: Final = 50
MAX_IDS_SHOWN: Final = 10


def timeout_actions(*, on_objects: bool = False) -> list[Any]:
    """Return an action for each operation: on the selected rows, or on the rows about the selected objects."""
    return [_action(operation, on_objects=on_objects) for operation in TIMEOUT_OPERATIONS.values()]


def permitted_actions(request: HttpRequest) -> set[str]:
    """Return the names of the actions that the visitor has permission for."""
    return {f"{name}_timeouts" for name, each in TIMEOUT_OPERATIONS.items() if each.is_permitted(request.user)}


def _action(operation: Operation, *, on_objects: bool) -> Any:
    def act(model_admin: ModelAdmin[Any], request: HttpRequest, queryset: QuerySet[Any]) -> HttpResponse | None:
        if on_objects:
            objects = list(queryset[:MAX_ROWS])
            rows: Any = rows_about(objects) if objects else Timeout.objects.none()
            rows = rows.filter(state__in=sorted(operation.states)).order_by("id")
            ids = list(rows.values_list("pk", flat=True)[: MAX_ROWS + 1])
        elif request.POST.get("select_across") in {None, "", "0"}:  # rows may have left the list since it was shown
            ids = [int(pk) for pk in request.POST.getlist(ACTION_CHECKBOX_NAME) if pk.isascii() and pk.isdigit()]
        else:
            ids = list(queryset.values_list("pk", flat=True)[: MAX_ROWS + 1])
        if not ids:
            messages.warning(request, _("None of the selected objects has a timeout for this operation."))
            return None
        if len(ids) > MAX_ROWS:
            text = _("Only the first {most} are included. Select again for the rest.")
            messages.warning(request, text.format(most=MAX_ROWS))
        return _ask(request, operation, ids[:MAX_ROWS], model_admin.admin_site, request.get_full_path())

    act.__name__ = f"{operation.name}_timeouts"
    text = _("Timeouts: {what}").format(what=operation.label) if on_objects else operation.action
    act.short_description = text  # type: ignore[attr-defined]
    return act


def buttons(request: HttpRequest, row: Timeout, site: AdminSite) -> list[dict[str, str]]:
    """Return labels and addresses of the operations that the visitor may do to this row now."""
    here = reverse(f"{site.name}:django_delayq_timeout_change", args=[quote(row.pk)])
    return [
        {"label": str(operation.label), "address": f"{_address(operation, site)}?ids={row.pk}&back={here}"}
        for operation in TIMEOUT_OPERATIONS.values()
        if operation.fits(row) and operation.is_permitted(request.user)
    ]


def operation_view(request: HttpRequest, name: str, site: AdminSite) -> HttpResponse:
    """Ask for confirmation (GET, or POST without `confirmed`), or act. Raises PermissionDenied, Http404."""
    operation = TIMEOUT_OPERATIONS.get(name)
    if operation is None:
        raise Http404
    given = request.POST if request.method == "POST" else request.GET
    ids = ids_in(given.get("ids", ""))
    if request.method != "POST" or "confirmed" not in request.POST:
        return _ask(request, operation, ids, site, request.GET.get("back", ""))
    _check(request, operation, ids)
    back = _safe_address(request, request.POST.get("back", ""))
    form = FORMS.get(name, ReasonForm)(request.POST)
    if not form.is_valid():
        return _ask(request, operation, ids, site, back, form=form)
    try:
        result = _act(request, operation, ids, form)
    except DelayqError as error:
        form.add_error(None, str(error))
        return _ask(request, operation, ids, site, back, form=form)
    _flash(request, operation, result, missing=len(ids) - result.changed - result.unchanged)
    return HttpResponseRedirect(back)


def ids_in(text: str) -> list[int]:
    """Return the ids in a comma-separated string, at most `MAX_ROWS`, without what is not a number."""
    return [int(part) for part in text.split(",")[:MAX_ROWS] if part.isascii() and part.isdigit() and len(part) < 19]


def _check(request: HttpRequest, operation: Operation, ids: Sequence[int]) -> None:
    if not operation.is_permitted(request.user):
        raise PermissionDenied
    if not ids:
        raise Http404


def _address(operation: Operation, site: AdminSite) -> str:
    return reverse(f"{site.name}:django_delayq_timeout_steer", args=[operation.name])


def _safe_address(request: HttpRequest, address: str) -> str:
    """Return `address` if it is on this site, otherwise the list of timeouts."""
    if address and url_has_allowed_host_and_scheme(
        address, allowed_hosts={request.get_host()}, require_https=request.is_secure()
    ):
        return address
    return reverse("admin:django_delayq_timeout_changelist")


def _ask(
    request: HttpRequest,
    operation: Operation,
    ids: Sequence[int],
    site: AdminSite,
    back: str,
    *,
    form: ReasonForm | None = None,
) -> HttpResponse:
    """Return the page that shows the rows and the consequences, and asks for a reason. It changes nothing."""
    _check(request, operation, ids)
    rows = Timeout.objects.using(database_of(Timeout)).filter(pk__in=ids).order_by("id")
    refused = {}
    if not operation.parameters:  # what is refused may depend on them
        refused = operation.call(rows, by=_actor(request), dry_run=True).refused
    expected = [
        ngettext("{n} of them will be left unchanged: {why}", "{n} of them will be left unchanged: {why}", n).format(
            n=n, why=why.label
        )
        for why, n in refused.items()
    ]
    column = ObjectColumn(request, site)
    context = {
        **site.each_context(request),
        "title": operation.question,
        "opts": Timeout._meta,
        "operation": operation,
        "form": form or FORMS.get(operation.name, ReasonForm)(),
        "ids": ",".join(map(str, ids)),
        "count": len(ids),
        "rows": [
            {"row": row, "object": column(row), "state": render.badge(row.state), "deadline": render.deadline(row)}
            for row in rows.defer("history", "payload")[:MAX_ROWS_SHOWN]
        ],
        "more": max(0, len(ids) - MAX_ROWS_SHOWN),
        "expected": expected,
        "back": _safe_address(request, back),
        "action": _address(operation, site),
    }
    request.current_app = site.name
    return TemplateResponse(request, "admin/django_delayq/steer.html", context)


def _act(request: HttpRequest, operation: Operation, ids: Sequence[int], form: ReasonForm) -> Result:
    using = database_of(Timeout)
    rows = Timeout.objects.using(using).filter(pk__in=ids)
    single = rows.first() if len(ids) == 1 else None  # sends its signal, as `cancel_timeout` does
    reason = form.cleaned_data["reason"]
    user_id: Any = request.user.pk
    message = str(operation.log_message).format(reason=reason)

    def log(page: Result) -> None:
        changed = Timeout.objects.using(using).filter(pk__in=page.ids).defer("history", "payload")
        LogEntry.objects.log_actions(user_id, changed, CHANGE, message)

    result: Result = operation.call(
        single or rows, by=_actor(request), reason=reason, progress=log, **form.parameters()
    )
    return result


def _actor(request: HttpRequest) -> str:
    return f"admin:{request.user.get_username()}"


def _flash(request: HttpRequest, operation: Operation, result: Result, missing: int) -> None:
    if result.changed:
        messages.success(request, (operation.done % result.changed).format(n=result.changed))
    elif not result.unchanged and not missing:
        messages.warning(request, _("Nothing was changed."))
    counts = dict(result.refused)
    if missing > 0:
        counts[Refusal.MISSING] = counts.get(Refusal.MISSING, 0) + missing
    for why, n in counts.items():
        text = ngettext("{n} timeout was left unchanged: {why}", "{n} timeouts were left unchanged: {why}", n)
        ids = [str(refused.id) for refused in result.refusals if refused.why == why]
        shown = f" ({', '.join(ids[:MAX_IDS_SHOWN])}{', …' if len(ids) > MAX_IDS_SHOWN else ''})" if ids else ""
        messages.warning(request, f"{text.format(n=n, why=why.label)}{shown}")
