"""What operators may do to policies here: each with its permission, its form and its words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from django import forms
from django.utils.translation import gettext_lazy as _

from django_delayq import clock, operations
from django_delayq.admin.operations import ReasonForm, local_time
from django_delayq.models import PolicyControl

if TYPE_CHECKING:
    from django.http import HttpRequest
    from django_stubs_ext import StrPromise

    from django_delayq.ledger.controls import PolicyState
    from django_delayq.models import PolicyChange

    Deed = Callable[[PolicyState, str, ReasonForm, Callable[[int], object]], PolicyChange | None]

Stop = PolicyControl.Stop
LONGEST_DAYS = 10_000


class PauseForm(ReasonForm):
    """Until somebody resumes it, or until a moment."""

    until = forms.DateTimeField(
        label=_("Until"),
        required=False,
        widget=forms.DateTimeInput(format="%Y-%m-%dT%H:%M", attrs={"type": "datetime-local"}),
    )
    field_order = ("until", "reason")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        empty = _("Empty: until somebody resumes it.")
        self.fields["until"].help_text = f"{local_time()} {empty}"

    def clean_until(self) -> Any:
        """A moment yet to come."""
        until = self.cleaned_data.get("until")
        if until is not None and "until" in self.changed_data and until <= clock.now():
            raise forms.ValidationError(_("This moment has passed."))
        return until


class ResumeForm(ReasonForm):
    """With or without moving the deadlines."""

    shift = forms.BooleanField(
        label=_("Move deadlines"),
        required=False,
        initial=True,
        help_text=_("After a hold: by its length. Without this, whatever fell due meanwhile fires at once."),
    )
    field_order = ("shift", "reason")


class DelayForm(ReasonForm):
    """Another delay, or the declared one again; and what becomes of the deadlines that are pending."""

    UNITS = (("seconds", _("seconds")), ("minutes", _("minutes")), ("hours", _("hours")), ("days", _("days")))
    MODES = (
        ("keep", _("keep: what is pending stays as it is")),
        ("recompute", _("recompute: each counts anew from its beginning, also where it was set by hand")),
        ("shift", _("shift: each moves by the difference")),
    )

    amount = forms.FloatField(label=_("New delay"), min_value=0, required=False)
    unit = forms.ChoiceField(label=_("Unit"), choices=UNITS, initial="minutes", required=False)
    declared = forms.BooleanField(label=_("Or as declared again"), required=False)
    mode = forms.ChoiceField(label=_("Pending deadlines"), choices=MODES, initial="keep")
    field_order = ("amount", "unit", "declared", "mode", "reason")

    def clean(self) -> dict[str, Any]:
        """One of the two, and no longer than a policy may wait."""
        given: dict[str, Any] = super().clean() or self.cleaned_data
        if self.errors:
            return given
        if (given.get("amount") is not None) == bool(given.get("declared")):
            raise forms.ValidationError(_("Another delay, or the declared one? Give one of the two."))
        if given.get("amount") is not None and self.after > timedelta(days=LONGEST_DAYS):
            self.add_error("amount", _("This is too long."))
        return given

    @property
    def mode_chosen(self) -> str:
        """What becomes of the deadlines that are pending, in words."""
        return str(dict(self.MODES)[self.cleaned_data["mode"]])

    @property
    def after(self) -> Any:
        """The delay that was asked for; None: as declared."""
        given = self.cleaned_data
        if given.get("declared"):
            return None
        try:
            return timedelta(**{given.get("unit") or "minutes": given["amount"]})
        except OverflowError:
            return timedelta.max


@dataclass(frozen=True, slots=True)
class PolicyOperation:
    """One thing that may be done to a policy."""

    name: str
    permission: str
    button: StrPromise
    question: StrPromise
    explanation: StrPromise
    done: StrPromise
    deed: Deed
    fits: Callable[[PolicyState], bool]
    """Whether there is a button for it as the policy stands."""
    form: type[ReasonForm] = ReasonForm
    initial: Callable[[PolicyState], dict[str, Any]] = lambda _state: {}
    """What its form begins with; a field that is left as it is keeps what is in force."""

    def is_allowed(self, request: HttpRequest) -> bool:
        """Whether the visitor may look at policies, and do this to them."""
        user = request.user
        return user.has_perm("django_delayq.view_policycontrol") and user.has_perm(f"django_delayq.{self.permission}")


def _pause(state: PolicyState, by: str, form: ReasonForm, progress: Any) -> PolicyChange | None:
    given = form.cleaned_data
    common = {"by": by, "reason": given["reason"]}
    if "until" not in form.changed_data:
        return operations.pause(state.policy, **common)
    return operations.pause(state.policy, until=given["until"], **common)


def _stop_in_force(state: PolicyState) -> dict[str, Any]:
    """Reason and end, to the minute as the form has it, of the pause that is in force."""
    if not state.stop:
        return {}
    return {"reason": state.reason, "until": state.until and state.until.replace(second=0, microsecond=0)}


def _hold(state: PolicyState, by: str, form: ReasonForm, progress: Any) -> PolicyChange | None:
    return operations.hold(state.policy, by=by, reason=form.cleaned_data["reason"])


def _resume(state: PolicyState, by: str, form: ReasonForm, progress: Any) -> PolicyChange | None:
    given = form.cleaned_data
    return operations.resume(state.policy, by=by, reason=given["reason"], shift=given["shift"], progress=progress)


def _change_delay(state: PolicyState, by: str, form: ReasonForm, progress: Any) -> PolicyChange | None:
    assert isinstance(form, DelayForm)
    given = form.cleaned_data
    return operations.change_delay(
        state.policy, form.after, by=by, reason=given["reason"], mode=given["mode"], progress=progress
    )


POLICY_OPERATIONS = {
    operation.name: operation
    for operation in (
        PolicyOperation(
            "pause",
            "pause_policy",
            _("Pause"),
            _("Pause this policy?"),
            _(
                "Nothing of it fires until it goes on. Deadlines stay where they are: "
                "what fell due meanwhile fires then."
            ),
            _("Paused: {reason}"),
            _pause,
            lambda state: state.stop in {Stop.NONE, Stop.PAUSED},
            PauseForm,
            _stop_in_force,
        ),
        PolicyOperation(
            "hold",
            "pause_policy",
            _("Hold"),
            _("Hold this policy?"),
            _(
                "Nothing of it fires, and its clock stands still: when it is released, all pending deadlines move by "
                "the length of the hold. For an outage during which nobody could do what the deadlines wait for."
            ),
            _("Held: {reason}"),
            _hold,
            lambda state: state.stop in {Stop.NONE, Stop.PAUSED},
            initial=_stop_in_force,
        ),
        PolicyOperation(
            "resume",
            "pause_policy",
            _("Resume"),
            _("Let this policy go on?"),
            _("What is due fires within two seconds. After a hold, deadlines are moved first."),
            _("Resumed: {reason}"),
            _resume,
            lambda state: state.stop in {Stop.PAUSED, Stop.HELD},
            ResumeForm,
        ),
        PolicyOperation(
            "delay",
            "change_policy_delay",
            _("Change the delay"),
            _("Change the delay of this policy?"),
            _(
                "What is scheduled from now on gets the new delay; for what is pending, choose. "
                "You see first what it means."
            ),
            _("Delay changed: {reason}"),
            _change_delay,
            lambda state: state.policy.after is not None and state.stop != Stop.RELEASING,
            DelayForm,
        ),
    )
}
