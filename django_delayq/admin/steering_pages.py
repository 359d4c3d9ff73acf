"""From a choice of rows over a page that asks once more to the deed, the log, and the answer. Changes by POST alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from django.contrib import messages
from django.contrib.admin.models import CHANGE, LogEntry
from django.contrib.admin.utils import quote
from django.core.exceptions import PermissionDenied
from django.http import Http404, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import reverse
from django.utils.http import url_has_allowed_host_and_scheme
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from django_delayq.admin.objects import ObjectColumn
from django_delayq.admin.operations import OPERATIONS, Operation, ReasonForm
from django_delayq.admin.wording import badge, deadline
from django_delayq.exceptions import DelayqError
from django_delayq.ledger.locking import database_of
from django_delayq.models import Timeout
from django_delayq.operations.runner import Refusal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from django.contrib.admin import AdminSite
    from django.db.models import QuerySet
    from django.http import HttpRequest, HttpResponse

    from django_delayq.operations import Result

MOST: Final = 1_000
"""So many rows at a time. More are done by the commands, which say how far they are."""
LISTED: Final = 50
NAMED: Final = 10


def steer_view(request: HttpRequest, operation: str, site: AdminSite) -> HttpResponse:
    """Asks (GET, or POST without `confirmed`), or acts (POST with it). Raises PermissionDenied, Http404."""
    chosen = OPERATIONS.get(operation)
    if chosen is None:
        raise Http404
    ids = ids_of((request.POST if request.method == "POST" else request.GET).get("ids", ""))
    if request.method == "POST" and "confirmed" in request.POST:
        return _act(request, chosen, ids, site)
    return ask(request, chosen, ids, site, back=request.GET.get("back", ""))


def ask(
    request: HttpRequest,
    operation: Operation,
    ids: Sequence[int],
    site: AdminSite,
    *,
    form: ReasonForm | None = None,
    back: str = "",
) -> HttpResponse:
    """The page that says what would happen to which rows, and asks for a reason. Changes nothing."""
    if not operation.is_allowed(request):
        raise PermissionDenied
    if not ids:
        raise Http404
    rows = Timeout.objects.using(database_of(Timeout)).filter(pk__in=ids).order_by("id")
    shown = ObjectColumn(request, site)
    context = {
        **site.each_context(request),
        "title": operation.question,
        "opts": Timeout._meta,
        "operation": operation,
        "form": form or operation.form(),
        "ids": ",".join(map(str, ids)),
        "count": len(ids),
        "rows": [
            {"row": row, "object": shown(row), "state": badge(row.state), "deadline": deadline(row)}
            for row in rows.defer("history", "payload")[:LISTED]
        ],
        "more": max(0, len(ids) - LISTED),
        "foreseen": _foreseen(operation, rows),
        "back": safe_address(request, back),
        "action": reverse(f"{site.name}:django_delayq_timeout_steer", args=[operation.name]),
    }
    request.current_app = site.name
    return TemplateResponse(request, "admin/django_delayq/steer.html", context)


def _act(request: HttpRequest, operation: Operation, ids: Sequence[int], site: AdminSite) -> HttpResponse:
    """It is done, logged and told; or the form is shown again."""
    if not operation.is_allowed(request):
        raise PermissionDenied
    if not ids:
        raise Http404
    back = safe_address(request, request.POST.get("back", ""))
    form = operation.form(request.POST)
    if not form.is_valid():
        return ask(request, operation, ids, site, form=form, back=back)
    try:
        result = _done(request, operation, ids, form)
    except DelayqError as error:
        form.add_error(None, str(error))
        return ask(request, operation, ids, site, form=form, back=back)
    tell(request, operation, result, missing=len(ids) - result.changed - result.unchanged)
    return HttpResponseRedirect(back)


def _done(request: HttpRequest, operation: Operation, ids: Sequence[int], form: ReasonForm) -> Result:
    rows = Timeout.objects.using(database_of(Timeout)).filter(pk__in=ids)
    reason = form.cleaned_data["reason"]
    alone = rows.first() if len(ids) == 1 else None  # a single row sends its signal, as cancel_timeout does
    who: Any = request.user.pk
    note = str(operation.noted).format(reason=reason)

    def log(page: Result) -> None:
        changed = Timeout.objects.using(database_of(Timeout)).filter(pk__in=page.ids).defer("history", "payload")
        LogEntry.objects.log_actions(who, changed, CHANGE, note)

    by = f"admin:{request.user.get_username()}"
    return operation.verb(alone or rows, by=by, reason=reason, progress=log, **form.delay())


def tell(request: HttpRequest, operation: Operation, result: Result, missing: int) -> None:
    """How many changed; which did not, and why."""
    if result.changed:
        messages.success(request, (operation.done % result.changed).format(n=result.changed))
    elif not result.unchanged and not missing:
        messages.warning(request, _("Nothing was changed."))
    for why, count in result.refused.items():
        places = [str(refused.id) for refused in result.refusals if refused.why == why]
        messages.warning(request, _left_alone(count, str(why.label), places))
    if missing > 0:
        messages.warning(request, _left_alone(missing, str(Refusal.MISSING.label), []))


def _left_alone(count: int, why: str, ids: list[str]) -> str:
    words = ngettext("{n} timeout was left alone: {why}", "{n} timeouts were left alone: {why}", count)
    told = words.format(n=count, why=why)
    if not ids:
        return told
    return f"{told} ({', '.join(ids[:NAMED])}{', …' if len(ids) > NAMED else ''})"


def _foreseen(operation: Operation, rows: QuerySet[Timeout]) -> list[str]:
    """What would be refused, as far as that can be said without knowing more than the rows."""
    if operation.form is not ReasonForm:
        return []
    result = operation.verb(rows, by="nobody", dry_run=True)
    return [_left_alone_would_be(count, str(why.label)) for why, count in result.refused.items()]


def _left_alone_would_be(count: int, why: str) -> str:
    words = ngettext("{n} of them will be left alone: {why}", "{n} of them will be left alone: {why}", count)
    return words.format(n=count, why=why)


def ids_of(text: str) -> list[int]:
    """The ids in a comma-separated text, `MOST` at most; nothing that is no number."""
    return [int(part) for part in text.split(",")[:MOST] if part.isascii() and part.isdigit() and len(part) < 19]


def safe_address(request: HttpRequest, address: str) -> str:
    """`address` if it leads nowhere but back to this site, else the list of timeouts."""
    if address and url_has_allowed_host_and_scheme(
        address, allowed_hosts={request.get_host()}, require_https=request.is_secure()
    ):
        return address
    return reverse("admin:django_delayq_timeout_changelist")


def buttons(request: HttpRequest, row: Timeout, site: AdminSite) -> list[dict[str, str]]:
    """What the visitor may do to this row now: words and addresses."""
    here = reverse(f"{site.name}:django_delayq_timeout_change", args=[quote(row.pk)])
    return [
        {
            "words": str(operation.button),
            "address": f"{reverse(f'{site.name}:django_delayq_timeout_steer', args=[operation.name])}"
            f"?ids={row.pk}&back={here}",
        }
        for operation in OPERATIONS.values()
        if row.state in operation.states and operation.is_allowed(request)
    ]
