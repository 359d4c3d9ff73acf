"""Operations on timeouts and policies: the actions of lists, the pages that ask for confirmation, and the results.

Only a POST of such a page changes anything. Changes are written to Django's admin log.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Final
from urllib.parse import urlencode

from django.contrib import messages
from django.contrib.admin import AdminSite, ModelAdmin, action, site
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.contrib.admin.models import CHANGE, LogEntry
from django.core.exceptions import PermissionDenied
from django.db.models import Exists, QuerySet
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseBase, HttpResponseRedirect
from django.utils.http import url_has_allowed_host_and_scheme
from django.utils.translation import gettext as _
from django.utils.translation import ngettext
from django.views.generic import FormView

from django_delayq import operations
from django_delayq.admin import forms, render
from django_delayq.admin.changelist import address, named, object_column, visible_rows
from django_delayq.conf import get_settings
from django_delayq.exceptions import DelayqError
from django_delayq.ledger import advances
from django_delayq.ledger.controls import PolicyState, policy_state, policy_states
from django_delayq.ledger.locking import with_keys
from django_delayq.ledger.rollups import OVERDUE
from django_delayq.ledger.routing import database_of
from django_delayq.ledger.search import NOTHING, count_each
from django_delayq.ledger.subjects import about_objects, about_outer_row, tables_of
from django_delayq.models import PolicyChange, PolicyControl, Timeout
from django_delayq.monitoring import whatif
from django_delayq.monitoring.reports import MAX_READ
from django_delayq.monitoring.snapshot import Names, Snapshot, obstacles_among, workers_alive
from django_delayq.operations.changes import time_limit
from django_delayq.operations.policies import outlasts
from django_delayq.operations.previews import Preview
from django_delayq.operations.registry import POLICY_OPERATIONS, TIMEOUT_OPERATIONS, Operation, operations_for
from django_delayq.policy.policies import TimeoutPolicy, registry
from django_delayq.sql.now import database_now
from django_delayq.times.lengths import duration_label

MAX_ROWS: Final = 1_000
"""For more rows use the commands, which report progress."""
MAX_ROWS_SHOWN: Final = 50
"""A page that asks for confirmation names so many: each row needs its object, and a page of 1,000 takes seconds."""
MAX_IDS_SHOWN: Final = 10
"""A message is kept in a cookie, which holds 4 KB."""
MOVING: Final = frozenset(("postpone", "reschedule", "hold", "resume"))
"""The operations that move deadlines, but not the columns of objects that deadlines may follow."""


def timeout_actions(*, on_objects: bool = False) -> list[Any]:
    """Return an action for each operation: on the selected rows, or on the rows about the selected objects."""
    return [_action(operation, on_objects=on_objects) for operation in TIMEOUT_OPERATIONS.values()]


def permitted_actions(request: HttpRequest, site: AdminSite) -> set[str]:
    """Return the names of the actions that the visitor has permission for, and for which `site` has pages."""
    offered = TIMEOUT_OPERATIONS if address(site, "timeout_operate", "cancel") else {}
    return {f"{name}_timeouts" for name, each in offered.items() if each.is_permitted(request.user)}


def _action(operation: Operation, *, on_objects: bool) -> Any:
    def confirm(model_admin: ModelAdmin[Any], request: HttpRequest, queryset: QuerySet[Any]) -> HttpResponseBase | None:
        if on_objects or request.POST.get("select_across") not in {None, "", "0"}:
            rows = _rows_about(queryset, operation.states) if on_objects else queryset
            ids = list(rows.values_list("pk", flat=True)[: MAX_ROWS + 1])
        else:  # rows may have left the list since it was shown
            ids = ids_of(request.POST.getlist(ACTION_CHECKBOX_NAME))
        if not ids:
            messages.warning(request, _("None of the selected objects has a timeout for this operation."))
            return None
        if len(ids) > MAX_ROWS:
            text = _("Only the first {most} are included. Select again for the rest.")
            messages.warning(request, text.format(most=MAX_ROWS))
        own = {"site": model_admin.admin_site, "ids": ids[:MAX_ROWS], "back": request.get_full_path()}
        return TimeoutOperationView.as_view(**own)(request, operation=operation.name)

    confirm.__name__ = f"{operation.name}_timeouts"
    return action(description=operation.on_objects if on_objects else operation.action)(confirm)


def _rows_about(objects: QuerySet[Any], states: Iterable[str]) -> QuerySet[Any]:
    """Return the rows in `states` about the first of `objects` that have any, also about their parents."""
    model, using = objects.model, database_of(objects.model, objects)
    rows = Timeout.objects.using(using).filter(state__in=states).order_by("id")
    having = objects.using(using).filter(Exists(rows.filter(about_outer_row(model, using))))
    return rows.filter(about_objects(tables_of(model), list(having[: MAX_ROWS + 1]), using))


def buttons(request: HttpRequest, row: Timeout, site: AdminSite) -> list[dict[str, str]]:
    """Return labels and addresses of the operations that the visitor may do to this row now."""
    query = f"?ids={row.pk}&back={address(site, 'timeout_change', row.pk)}"
    return [
        {"label": each.button_for(), "address": f"{address(site, 'timeout_operate', each.name)}{query}"}
        for each in operations_for(request.user, row)
    ]


def banners(
    request: HttpRequest, site: AdminSite, labels: Names = None, queues: Names = None, seen: Snapshot | None = None
) -> list[dict[str, Any]]:
    """Return what a page shows of the reasons why nothing fires, or fires late, with the address that helps.

    `labels`: the policies of the page, by present or former labels; None: all. `queues`: those of its rows; None: of
    these policies. `seen`: what the page has read already, of all policies.
    """
    if labels is not None and not labels:
        return clock_banners()
    operation, using = POLICY_OPERATIONS["resume"], database_of(Timeout)
    if seen is None:
        states, workers = policy_states(using), workers_alive(using)
    else:
        states, workers = [each.state for each in seen.policies if each.state], [*seen.workers]
    found = obstacles_among(states, workers, labels, queues)
    asked = [state for state in states if labels is None or not set(labels).isdisjoint(state.policy.labels)]
    running = [state.policy for state in asked if not state.is_stopped]
    without = [worker for worker in workers if not worker.uses_redis and get_settings().redis and running]
    words = _("Workers that do not reach Redis, and read due timeouts from the database once a second: {n} of {count}.")
    redis = [{"text": words.format(n=len(without), count=len(workers))}] if without else []
    shown = [*clock_banners(), *redis, *_backlog(request, site, running, using)]
    stops = {state.label: state for state in asked if state.is_stopped}
    stopped = [label for label, state in stops.items() if not state.is_braked]
    if len(stopped) > (seen is None):  # as one; on the first page each has a row that shows more
        found = (each for each in found if each.policy not in stopped)
        words = _("Policies that are stopped: {n} of {count}.").format(n=len(stopped), count=len(asked))
        listed = operation.is_permitted(request.user) and address(site, "policycontrol_changelist")
        shown.append({"text": words, "address": listed, "label": operation.label})
    for obstacle in found:
        state = stops.get(obstacle.policy)
        may_resume_it = state is not None and operation.is_permitted(request.user) and operation.fits(state)
        resume = address(site, "policycontrol_operate", obstacle.policy, "resume") if may_resume_it else ""
        text = str(obstacle) if state is None else render.stop(state)
        shown.append({"obstacle": obstacle, "text": text, "address": resume, "label": operation.label})
    return shown


def _backlog(request: HttpRequest, site: AdminSite, policies: list[Any], using: str) -> list[dict[str, Any]]:
    """Return what a page shows if timeouts of `policies`, none of which is stopped, were due a minute ago."""
    rows = visible_rows(request, site).using(using).pending().filter(run_at__lte=database_now(using) - OVERDUE)
    rows = rows.order_by("policy", "state", "run_at", "id")
    counts = count_each({label: rows.filter(policy=label) for each in policies for label in each.labels}, using)
    if not (overdue := sum(counts.values(), NOTHING)).value:
        return []
    asked = {"due": "overdue", **({"policy": policies[0].label} if len(policies) == 1 else {})}
    listed = address(site, "timeout_changelist") if request.user.has_perm("django_delayq.view_timeout") else ""
    link = f"{listed}?{urlencode(asked)}" if listed else ""
    words = _("Timeouts that have been due for more than a minute: {n}.")
    return [{"text": words.format(n=overdue), "address": link, "label": _("Show")}]


def clock_banners() -> list[dict[str, Any]]:
    """Return what every page shows while the clock of a staging installation is ahead."""
    ahead = advances.total(database_of(Timeout))
    words = _("The clock of this installation is {duration} ahead: deadlines are earlier by it.")
    return [{"text": words.format(duration=duration_label(ahead.total_seconds()))}] if ahead else []


def ids_of(parts: Iterable[str]) -> list[int]:
    """Return the numbers among `parts` that the column of ids can hold."""
    return [int(part) for part in parts if part.isascii() and part.isdigit() and len(part) < 19]


class OperationView(FormView):  # type: ignore[type-arg]
    """A page that asks for a reason and the parameters of an operation, and then runs it."""

    site: AdminSite = site
    template_name = "admin/django_delayq/operate.html"
    form_class = forms.OperationForm
    model: Any = PolicyControl
    operation: Operation
    button = back = ""
    is_offered = True
    """The operation would change something."""

    def dispatch(self, request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
        if not self.operation.is_permitted(request.user):
            raise PermissionDenied
        request.current_app = self.site.name
        return super().dispatch(request, *args, **kwargs)

    def get_form_kwargs(self) -> dict[str, Any]:
        return {**super().get_form_kwargs(), "operation": self.operation}

    def get_context_data(self, **kwargs: Any) -> dict[str, Any]:
        own = {"operation": self.operation, "title": self.operation.question, "explanation": self.operation.explanation}
        found = kwargs.pop("previews", None) or ({} if self.operation.has_preview else self.previews())
        said = {label: each.sentences(self.request.user) for label, each in found.items()}
        own["consequences"] = [f"{label}: {' '.join(said[label])}" for label in said if label] or said.get("", [])
        braked = [label for each in found.values() for label in each.brakes]
        if POLICY_OPERATIONS["brake"].is_permitted(self.request.user):
            own["brakes"] = [(each, address(self.site, "policycontrol_operate", each, "brake")) for each in braked]
        own["delayq_banners"], own["is_offered"] = clock_banners(), self.is_offered
        own["button"] = self.button or self.operation.button_for()
        own |= {"opts": self.model._meta, "list": self.listed, "back": self.back or self.listed}
        if self.operation.name in MOVING and self.operation.parameters:  # a pause moves nothing
            own["expected"] = render.followed_columns(self.policies())
        return super().get_context_data(**self.site.each_context(self.request), **{**own, **kwargs})

    def form_valid(self, form: forms.OperationForm) -> HttpResponse:
        try:
            if not self.operation.has_preview or "confirmed" in self.request.POST:
                return self.act(form)
            found = None if "again" in self.request.POST else self.previews(**form.arguments)
            return self.render_to_response(self.get_context_data(form=form, previews=found, is_preview=bool(found)))
        except (DelayqError, ValueError) as error:
            form.add_error(None, str(error))
            return self.form_invalid(form)

    @property
    def listed(self) -> str:
        """The address of the list that leads to the page, and to which it leads back."""
        return address(self.site, f"{self.model._meta.model_name}_changelist")

    def act(self, form: forms.OperationForm) -> HttpResponse:
        """Run the operation. DelayqError and ValueError are shown on the page."""
        raise NotImplementedError

    def policies(self) -> Iterable[TimeoutPolicy[Any]]:
        """Return the policies whose timeouts it concerns."""
        raise NotImplementedError

    def previews(self, **arguments: Any) -> dict[str, Preview]:
        """Return what the operation would do with these arguments; of several policies by their labels."""
        raise NotImplementedError

    def call(self, target: Any, form: forms.OperationForm, **more: Any) -> Any:
        """Call the operation with the visitor's name, the reason and the parameters."""
        reason = form.cleaned_data["reason"]
        return self.operation.call(target, by=self.actor, reason=reason, **{**form.arguments, **more})

    @property
    def actor(self) -> str:
        return f"admin:{self.request.user.get_username()}"

    def log(self, changed: Any, form: forms.OperationForm) -> None:
        message = f"{self.operation.button_for()}: {form.cleaned_data['reason']}"
        user_id: Any = self.request.user.pk
        LogEntry.objects.log_actions(user_id, changed, CHANGE, message)


class TimeoutOperationView(OperationView):
    """Show the rows and the consequences, ask for confirmation, and run an operation on timeouts.

    A list's action passes `ids` and `back`, the address to return to. Otherwise the request has both.
    """

    model = Timeout
    ids: Sequence[int] = ()
    is_asked = False
    """The request is of a list, and asks for the page."""

    def setup(self, request: HttpRequest, *args: Any, **kwargs: Any) -> None:
        """Read the request. Raises Http404 without an operation or without rows."""
        super().setup(request, *args, **kwargs)
        self.is_asked = bool(self.ids)
        if not self.ids:
            given = request.POST if request.method == "POST" else request.GET
            self.ids, self.back = ids_of(given.get("ids", "").split(",")[:MAX_ROWS]), given.get("back", "")
        hosts = {request.get_host()}
        if not url_has_allowed_host_and_scheme(self.back, allowed_hosts=hosts, require_https=request.is_secure()):
            self.back = ""
        if kwargs["operation"] not in TIMEOUT_OPERATIONS or not self.ids:
            raise Http404
        self.operation = TIMEOUT_OPERATIONS[kwargs["operation"]]
        self.rows: Any = with_keys(visible_rows(request, self.site).using(database_of(Timeout)), self.ids)

    def post(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        return self.get(request, *args, **kwargs) if self.is_asked else super().post(request, *args, **kwargs)

    def get_form_kwargs(self) -> dict[str, Any]:
        return {"operation": self.operation} if self.is_asked else super().get_form_kwargs()

    def get_context_data(self, **kwargs: Any) -> dict[str, Any]:
        column = object_column(self.request, self.site)
        listed = self.rows.order_by("id").defer("history", "payload")[:MAX_ROWS_SHOWN]
        rows = [
            {"row": row, "object": column(row), "state": render.badge(row), "deadline": render.deadline(row)}
            for row in named(listed, self.request.user)
        ]
        return super().get_context_data(
            ids=",".join(map(str, self.ids)),
            count=len(self.ids),
            rows=rows,
            single=rows[0] if len(rows) == len(self.ids) == 1 else None,
            more=max(0, len(self.ids) - MAX_ROWS_SHOWN),
            action=address(self.site, "timeout_operate", self.operation.name),
            **kwargs,
        )

    def act(self, form: forms.OperationForm) -> HttpResponse:
        """Change the rows, and report the result."""
        single = self.rows.first() if len(self.ids) == 1 else None  # sends its signal, as `cancel_timeout` does

        def log_page(page: operations.Result) -> None:
            changed = Timeout.objects.using(database_of(Timeout)).filter(pk__in=page.ids)
            self.log(changed.defer("history", "payload"), form)

        result: operations.Result = self.call(single or self.rows, form, progress=log_page)
        if result.changed:
            messages.success(self.request, (self.operation.done % result.changed).format(n=result.changed))
        missing = len(self.ids) - result.changed - result.unchanged
        counts = Counter(result.refused) + Counter({operations.Refusal.MISSING: missing})
        for why, n in counts.items():
            text = ngettext("{n} timeout was left unchanged: {why}", "{n} timeouts were left unchanged: {why}", n)
            ids = [str(refused.id) for refused in result.refusals if refused.why == why]
            shown = f" ({', '.join(ids[:MAX_IDS_SHOWN])}{', …' if len(ids) > MAX_IDS_SHOWN else ''})" if ids else ""
            messages.warning(self.request, f"{text.format(n=n, why=why.label)}{shown}")
        return HttpResponseRedirect(self.back or self.listed)

    def policies(self) -> Iterable[TimeoutPolicy[Any]]:
        labels = self.rows.order_by("policy").values_list("policy", flat=True).distinct()
        return filter(None, map(registry.get, labels))

    def previews(self, **arguments: Any) -> dict[str, Preview]:
        """Return the preview of the operation on all rows, and have the button name those that it would change."""
        preview = self.operation.preview(self.rows, **arguments)
        # One that is firing counts as unchanged, but gets no further attempt.
        n = preview.changed.value or preview.refused.get(operations.Refusal.NO_RETRY, 0)
        self.button, self.is_offered = self.operation.button_for(n), n > 0
        return {"": preview}


class PolicyOperationView(OperationView):
    """Show the state of a policy, ask for the parameters of an operation, and run it.

    A change of the delay shows its consequences first.
    """

    def setup(self, request: HttpRequest, *args: Any, **kwargs: Any) -> None:
        """Read the state of the policy. Raises Http404 without such a policy or operation."""
        super().setup(request, *args, **kwargs)
        operation, policy = POLICY_OPERATIONS.get(kwargs["operation"]), registry.get(kwargs["label"])
        if operation is None or policy is None:
            raise Http404
        self.using = database_of(policy.concrete_model)
        self.state = policy_state(policy, self.using)
        self.states = [self.state]
        self.operation, self.is_offered = operation.for_state(self.state), operation.fits(self.state)

    def get_initial(self) -> dict[str, Any]:
        """Keep the reason and the end of a stop that is in force, or the values of a guard rail."""
        if self.state.stop and self.operation.name in {"pause", "hold"}:
            end = self.state.until and self.state.until.replace(second=0, microsecond=0)  # the form shows minutes
            is_same = (self.state.stop == PolicyControl.Stop.HELD) == (self.operation.name == "hold")
            return {"reason": self.state.reason, "until": end if is_same else None}
        return forms.initial_of(self.operation, self.state)

    def get_context_data(self, **kwargs: Any) -> dict[str, Any]:
        return super().get_context_data(state=self.state, **render.in_force(self.state), **kwargs)

    def policies(self) -> Iterable[TimeoutPolicy[Any]]:
        return (state.policy for state in self.states)

    def act(self, form: forms.OperationForm) -> HttpResponse:
        """Change the policy, and report the result."""
        more = {"progress": time_limit()} if self.operation.moves_rows else {}
        self.change(self.state, self.using, form, **more)
        return HttpResponseRedirect(self.listed)

    def change(self, state: PolicyState, using: str, form: forms.OperationForm, **more: Any) -> None:
        """Run the operation on one policy, and add a message with the result."""
        change: PolicyChange | None = self.call(state.policy, form, **more)
        label = _("“{name}”").format(name=state.label)  # without quotes the admin would capitalize its first letter
        if change is None:
            is_resume = self.operation.name == "resume"
            unchanged = _("{policy} is not stopped.") if is_resume else _("Nothing was changed.")
            messages.warning(self.request, unchanged.format(policy=label))
        else:
            controls = PolicyControl.objects.using(using).filter(policy__in=state.policy.labels)
            self.log(list(controls.order_by("-changed_at", "-id")[:1]), form)
            result = _("{policy}: {what}.").format(policy=label, what=change.get_what_display())
            if change.finished_at is None:
                result += " " + _("Deadlines are still being moved. A worker continues within a minute.")
            elif change.moved or change.unmoved:
                moved = ngettext("{n} deadline was moved.", "{n} deadlines were moved.", change.moved)
                result += " " + moved.format(n=change.moved)
            messages.success(self.request, result)

    def previews(self, **arguments: Any) -> dict[str, Preview]:
        """Return the preview of the operation; of a change of the delay also what it would have done to past rounds."""
        preview = self.operation.preview(self.state.policy, **arguments)
        if self.operation.name == "delay":
            past = whatif.what_if(self.state.policy, arguments["after"], limit=MAX_READ)
            preview = replace(preview, notes=(*preview.notes, *(whatif.sentences(past) if past.rounds else ())))
        return {"": preview}


class PoliciesOperationView(PolicyOperationView):
    """Pause, hold or resume several policies, or all of them with `all`, after one confirmation."""

    def setup(self, request: HttpRequest, *args: Any, **kwargs: Any) -> None:
        """Read the states of the policies. Raises Http404 for another operation."""
        OperationView.setup(self, request, *args, **kwargs)
        if (operation := POLICY_OPERATIONS.get(kwargs["operation"])) is None or not operation.is_for_several:
            raise Http404
        self.operation = operation
        given = request.POST if request.method == "POST" else request.GET
        labels = {policy.label for label in given.getlist("policy") if (policy := registry.get(label))}
        self.states = [each for each in policy_states(database_of(Timeout)) if "all" in given or each.label in labels]
        for state in sorted(self.states, key=lambda state: state.stop == PolicyControl.Stop.HELD)[-1:]:
            self.operation = self.operation.for_state(state)  # deadlines are moved if any of them is on hold

    def dispatch(self, request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
        """Return to the list if no policy is selected."""
        if not self.states and self.operation.is_permitted(request.user):
            messages.warning(request, _("Select policies first."))
            return HttpResponseRedirect(self.listed)
        return super().dispatch(request, *args, **kwargs)

    def get_initial(self) -> dict[str, Any]:
        return {}

    def get_context_data(self, **kwargs: Any) -> dict[str, Any]:
        shown = [{"label": state.label, "stopped": render.stop(state)} for state in self.states]
        own = {"policies": shown, "title": self.operation.button_for(len(self.states))}
        if self.operation.name != "resume":
            more = _("A policy that is stopped for longer is left as it is.")
            own["explanation"] = f"{self.operation.explanation} {more}"
        return OperationView.get_context_data(self, **own, **kwargs)

    def previews(self, **arguments: Any) -> dict[str, Preview]:
        """Return the preview of each policy to which it can be done, and have the button name their number."""
        fitting = [state for state in self.states if self.operation.fits(state)]
        self.button, self.is_offered = self.operation.button_for(len(fitting)), bool(fitting)
        return {state.label: self.operation.preview(state.policy) for state in fitting}

    def act(self, form: forms.OperationForm) -> HttpResponse:
        """Change each policy. What refuses, or is stopped for longer, keeps its state, and a message names it."""
        more: dict[str, Any] = {"progress": time_limit()} if self.operation.moves_rows else {}
        if self.operation.name != "resume":
            more["until"] = form.cleaned_data["until"]  # also if it is empty: they are stopped until they are resumed
        for state in self.states:
            if "until" in more and outlasts(state, more["until"]):
                text = _("{policy} is left as it is, because it is stopped for longer.")
                messages.warning(self.request, text.format(policy=_("“{name}”").format(name=state.label)))
                continue
            try:
                self.change(state, database_of(state.policy.concrete_model), form, **more)
            except operations.PolicyConflict as error:
                messages.warning(self.request, str(error))
        return HttpResponseRedirect(self.listed)
