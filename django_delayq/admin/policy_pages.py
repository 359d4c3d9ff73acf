"""Operations on a policy: the page that asks for confirmation and shows the consequences, the change, the result."""

from __future__ import annotations

import time
from typing import Any, Final

from django.contrib import messages
from django.contrib.admin import AdminSite
from django.contrib.admin.models import CHANGE, LogEntry
from django.core.exceptions import PermissionDenied
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import reverse
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from django_delayq import operations
from django_delayq.admin import render
from django_delayq.admin.forms import FORMS, ReasonForm
from django_delayq.exceptions import DelayqError
from django_delayq.ledger.controls import PolicyState, policy_state
from django_delayq.ledger.locking import database_of
from django_delayq.models import PolicyChange, PolicyControl
from django_delayq.operations.registry import POLICY_OPERATIONS, Operation
from django_delayq.policies import registry

MAX_SECONDS: Final = 2.0
"""A request moves rows for at most this long; a worker moves the rest."""


class _TimeIsUp(Exception):
    """The request has moved rows for `MAX_SECONDS`."""


def operation_view(request: HttpRequest, label: str, name: str, site: AdminSite) -> HttpResponse:
    """Ask (GET), show the consequences (POST), or act (POST with `confirmed`). Raises PermissionDenied, Http404."""
    operation, policy = POLICY_OPERATIONS.get(name), registry.get(label)
    if operation is None or policy is None:
        raise Http404
    if not operation.is_permitted(request.user):
        raise PermissionDenied
    state = policy_state(policy, database_of(policy.concrete_model))
    # A stop that is in force keeps its reason and end unless the visitor changes them. The form shows minutes.
    end = state.until and state.until.replace(second=0, microsecond=0)
    initial = {"reason": state.reason, "until": end} if state.stop and name in {"pause", "hold"} else {}
    form = FORMS.get(name, ReasonForm)(request.POST if request.method == "POST" else None, initial=initial)
    if request.method != "POST" or not form.is_valid():
        return _page(request, operation, state, site, form)
    goes_back = "back" in request.POST
    try:
        if form.needs_preview and (goes_back or "confirmed" not in request.POST):
            preview = None if goes_back else operations.preview_delay(policy, **form.parameters())
            return _page(request, operation, state, site, form, preview=preview)
        _act(request, operation, state, form)
    except (DelayqError, ValueError) as error:
        form.add_error(None, str(error))
        return _page(request, operation, state, site, form)
    return HttpResponseRedirect(reverse(f"{site.name}:django_delayq_policycontrol_changelist"))


def _page(
    request: HttpRequest,
    operation: Operation,
    state: PolicyState,
    site: AdminSite,
    form: ReasonForm,
    *,
    preview: operations.DelayPreview | None = None,
) -> HttpResponse:
    context = {
        **site.each_context(request),
        "title": operation.question,
        "opts": PolicyControl._meta,
        "operation": operation,
        "state": state,
        "form": form,
        "delay": render.delay_in_force(state),
        "stopped": render.stop(state),
        "preview": _preview_sentences(preview) if preview else [],
    }
    request.current_app = site.name
    return TemplateResponse(request, "admin/django_delayq/policycontrol/operate.html", context)


def _preview_sentences(preview: operations.DelayPreview) -> list[str]:
    delays = (preview.before, preview.after)
    before, after = (_("depends on the object") if value is None else render.delay(value) for value in delays)
    pending = f"{preview.pending}{'+' if preview.is_capped else ''}"
    sentences = [_("Delay in force: {delay}.").format(delay=before), _("New delay: {delay}.").format(delay=after)]
    if preview.mode == "keep":
        return [*sentences, _("Pending timeouts: {n}. None of them is moved.").format(n=pending)]
    sentences.append(_("Pending timeouts: {n}. All of them are moved.").format(n=pending))
    if preview.overdue is None:
        return [*sentences, _("It is unknown how many of them would be due immediately.")]
    due = ngettext("{n} of them would be due immediately.", "{n} of them would be due immediately.", preview.overdue)
    return [*sentences, due.format(n=preview.overdue)]


def _act(request: HttpRequest, operation: Operation, state: PolicyState, form: ReasonForm) -> None:
    """Change the policy, write the admin log, and report the result."""
    end = time.monotonic() + MAX_SECONDS

    def check_time(_rows: int) -> None:
        if time.monotonic() > end:
            raise _TimeIsUp

    using, reason = database_of(state.policy.concrete_model), form.cleaned_data["reason"]
    arguments = {"by": f"admin:{request.user.get_username()}", "reason": reason, **form.parameters()}
    if operation.moves_rows:
        arguments["progress"] = check_time
    try:
        change: PolicyChange | None = operation.call(state.policy, **arguments)
    except _TimeIsUp:
        change = PolicyChange.objects.using(using).filter(policy=state.label).order_by("-id").first()
    if change is None:
        unchanged = _("Nothing was changed.") if state.stop else _("{policy} is not stopped.")
        messages.warning(request, unchanged.format(policy=state.label))
        return
    controls = PolicyControl.objects.using(using).filter(policy__in=state.policy.labels).order_by("-changed_at", "-id")
    user_id: Any = request.user.pk
    message = str(operation.log_message).format(reason=reason)
    LogEntry.objects.log_actions(user_id, list(controls[:1]), CHANGE, message)
    result = _("{policy}: {what}.").format(policy=state.label, what=change.get_what_display())
    if change.finished_at is None:
        result += " " + _("Deadlines are still being moved. A worker continues within a minute.")
    elif change.moved or change.unmoved:
        moved = ngettext("{n} deadline was moved.", "{n} deadlines were moved.", change.moved)
        result += " " + moved.format(n=change.moved)
    messages.success(request, result)
