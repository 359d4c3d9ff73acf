"""From a button on the policies page over a page that asks once more to the deed, the log and the answer."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

from django.contrib import messages
from django.contrib.admin.models import CHANGE, LogEntry
from django.core.exceptions import PermissionDenied
from django.http import Http404, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import reverse
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from django_delayq import operations
from django_delayq.admin import describing
from django_delayq.admin.policy_operations import POLICY_OPERATIONS, DelayForm, PolicyOperation
from django_delayq.exceptions import DelayqError
from django_delayq.ledger import controls
from django_delayq.ledger.locking import database_of
from django_delayq.models import PolicyChange, PolicyControl
from django_delayq.policies import registry

if TYPE_CHECKING:
    from django.contrib.admin import AdminSite
    from django.http import HttpRequest, HttpResponse

    from django_delayq.admin.operations import ReasonForm
    from django_delayq.ledger.controls import PolicyState

PATIENCE_SECONDS: Final = 2.0
"""So long a page moves rows before it leaves the rest to a worker: nobody waits minutes for an answer."""


class _Enough(Exception):
    """The page has moved rows for long enough."""


def unfinished_labels(using: str) -> set[str]:
    """The labels of the policies whose rows are being moved by an earlier change."""
    found = PolicyChange.objects.using(using).filter(finished_at__isnull=True).values_list("policy", flat=True)
    policies = [(label, registry.get(label)) for label in found]
    return {policy.label if policy else label for label, policy in policies}


def operation_view(request: HttpRequest, label: str, operation: str, site: AdminSite) -> HttpResponse:
    """Asks (GET), shows what it would mean (POST), or acts (POST with `confirmed`).

    Raises PermissionDenied, and Http404 for a policy or an operation that there is not.
    """
    chosen, policy = POLICY_OPERATIONS.get(operation), registry.get(label)
    if chosen is None or policy is None:
        raise Http404
    if not chosen.is_allowed(request):
        raise PermissionDenied
    state = controls.policy_state(policy, database_of(policy.concrete_model))
    if request.method != "POST":
        return _ask(request, chosen, state, site, chosen.form(initial=chosen.initial(state)))
    form = chosen.form(request.POST, initial=chosen.initial(state))
    try:
        if not form.is_valid():
            return _ask(request, chosen, state, site, form)
        if isinstance(form, DelayForm) and ("confirmed" not in request.POST or "back" in request.POST):
            preview = (
                None
                if "back" in request.POST
                else operations.preview_delay(policy, form.after, form.cleaned_data["mode"])
            )
            return _ask(request, chosen, state, site, form, preview=preview)
        _act(request, chosen, state, form)
    except (DelayqError, ValueError) as error:
        form.add_error(None, str(error))
        return _ask(request, chosen, state, site, form)
    return HttpResponseRedirect(reverse(f"{site.name}:django_delayq_policycontrol_changelist"))


def _ask(
    request: HttpRequest,
    operation: PolicyOperation,
    state: PolicyState,
    site: AdminSite,
    form: ReasonForm,
    *,
    preview: Any = None,
) -> HttpResponse:
    context = {
        **site.each_context(request),
        "title": operation.question,
        "opts": PolicyControl._meta,
        "operation": operation,
        "state": state,
        "form": form,
        "delay": describing.delay_in_force(state),
        "stopped": describing.stopped(state),
        "needs_preview": isinstance(form, DelayForm),
        "preview": _told(preview) if preview else [],
    }
    request.current_app = site.name
    return TemplateResponse(request, "admin/django_delayq/policycontrol/operate.html", context)


def _told(preview: operations.DelayPreview) -> list[str]:
    """What another delay would mean, sentence by sentence."""
    unknown = _("differs from object to object")
    pending = f"{preview.pending}{'+' if preview.is_capped else ''}"
    told = [
        _("The delay in force: {delay}.").format(
            delay=describing.length(preview.before) if preview.before is not None else unknown
        ),
        _("The new one: {delay}.").format(
            delay=describing.length(preview.after) if preview.after is not None else unknown
        ),
    ]
    if preview.mode == "keep":
        return [*told, _("Pending: {n}. None of them moves.").format(n=pending)]
    told.append(_("Pending: {n}. They move.").format(n=pending))
    if preview.overdue is None:
        return [*told, _("How many of them would be due at once cannot be said beforehand.")]
    words = ngettext("{n} of them would be due at once.", "{n} of them would be due at once.", preview.overdue)
    return [*told, words.format(n=preview.overdue)]


def _act(request: HttpRequest, operation: PolicyOperation, state: PolicyState, form: ReasonForm) -> None:
    """It is done, logged and told. What takes longer than a page may is left to a worker."""
    until = time.monotonic() + PATIENCE_SECONDS

    def progress(_looked: int) -> None:
        if time.monotonic() > until:
            raise _Enough

    using = database_of(state.policy.concrete_model)
    try:
        change = operation.deed(state, f"admin:{request.user.get_username()}", form, progress)
    except _Enough:
        change = PolicyChange.objects.using(using).filter(policy=state.label).order_by("-id").first()
    if change is None:
        words = _("Nothing was changed.") if state.stop else _("{policy} was not stopped.").format(policy=state.label)
        messages.warning(request, words)
        return
    _log(request, operation, state, form.cleaned_data["reason"], using)
    done = _("{policy}: {what}.").format(policy=state.label, what=change.get_what_display())
    messages.success(request, f"{done} {_moved(change)}".strip())


def _log(request: HttpRequest, operation: PolicyOperation, state: PolicyState, reason: str, using: str) -> None:
    control = (
        PolicyControl.objects.using(using).filter(policy__in=state.policy.labels).order_by("-changed_at", "-id")[:1]
    )
    who: Any = request.user.pk
    LogEntry.objects.log_actions(who, list(control), CHANGE, str(operation.done).format(reason=reason))


def _moved(change: PolicyChange) -> str:
    """What became of the pending rows."""
    if change.finished_at is None:
        return _("Deadlines are still being moved; a worker goes on with it within a minute.")
    if not change.moved and not change.unmoved:
        return ""
    words = ngettext("{n} deadline was moved.", "{n} deadlines were moved.", change.moved)
    return words.format(n=change.moved)
