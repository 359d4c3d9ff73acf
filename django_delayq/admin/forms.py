"""The forms of the pages that ask for confirmation: a reason, and the parameters of the operation."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, ClassVar, Final

from django import forms
from django.utils import timezone
from django.utils.translation import gettext_lazy as _

from django_delayq import clock
from django_delayq.admin import render
from django_delayq.ledger.controls import PolicyState
from django_delayq.ledger.history import MAX_REASON
from django_delayq.policy_options import MAX_COUNT, MAX_PERIOD

MAX_DELAY: Final = timedelta(days=10_000)
"""Beyond it deadlines of objects that exist today could be after `LATEST_YEAR`, and each save would fail."""
MINUTES = (("minutes", _("minutes")), ("hours", _("hours")), ("days", _("days")))
SECONDS = (("seconds", _("seconds")), *MINUTES)


def duration_of(given: dict[str, Any]) -> timedelta:
    """Return the duration of the fields `amount` and `unit`; the longest possible one if it is longer than that."""
    try:
        return timedelta(**{given.get("unit") or "minutes": given["amount"]})
    except OverflowError:
        return timedelta.max


def fields_of(duration: timedelta) -> dict[str, Any]:
    """Return `amount` and `unit` of a duration, in the largest unit of which it is a multiple."""
    for unit in ("days", "hours", "minutes"):
        amount, rest = divmod(duration, timedelta(**{unit: 1}))
        if amount and not rest:
            return {"amount": amount, "unit": unit}
    return {"amount": duration.total_seconds(), "unit": "seconds"}


class LocalDateTimeField(forms.DateTimeField):
    """A datetime in the visitor's time zone, which the help text names."""

    widget = forms.DateTimeInput(format="%Y-%m-%dT%H:%M", attrs={"type": "datetime-local"})

    def get_bound_field(self, form: forms.BaseForm, field_name: str) -> forms.BoundField:
        bound = super().get_bound_field(form, field_name)
        zone = _("Local time ({zone}).").format(zone=timezone.get_current_timezone_name())
        bound.help_text = f"{zone} {self.help_text}".strip()
        return bound


class ReasonForm(forms.Form):
    """The reason. It is stored with what was changed, and logged."""

    reason = forms.CharField(
        label=_("Reason"),
        max_length=MAX_REASON,
        help_text=_("Stored in the history."),
        widget=forms.TextInput(attrs={"size": 60, "autocomplete": "off"}),
    )
    needs_preview = False

    @classmethod
    def initial_of(cls, state: PolicyState) -> dict[str, Any]:
        """Return the values of the policy that are in force."""
        return {}

    def order_fields(self, field_order: Any) -> None:
        """Show the reason last."""
        super().order_fields([name for name in self.fields if name != "reason"])

    def parameters(self) -> dict[str, Any]:
        """Return the keyword arguments of the operation: all fields but the reason."""
        return {name: value for name, value in self.cleaned_data.items() if name != "reason"}

    def entered(self) -> list[tuple[Any, Any]]:
        """Return what a preview repeats of the valid form: labels and values."""
        return [(self.fields["reason"].label, self.cleaned_data["reason"])]


class PostponeForm(ReasonForm):
    """A duration or a datetime."""

    amount = forms.IntegerField(label=_("Later by"), min_value=1, max_value=100_000, required=False)
    unit = forms.ChoiceField(label=_("Unit"), choices=MINUTES, required=False)
    at = LocalDateTimeField(label=_("Or to this time"), required=False)

    def clean(self) -> None:
        amount, at = self.cleaned_data.get("amount"), self.cleaned_data.get("at")
        if self.errors:
            return
        if bool(amount) == bool(at):
            raise forms.ValidationError(_("Enter either a duration or a time."))
        if at and at <= clock.now():
            self.add_error("at", _("This time is in the past."))

    def parameters(self) -> dict[str, Any]:
        at = self.cleaned_data["at"]
        return {"at": at} if at else {"after": duration_of(self.cleaned_data)}


class RescheduleForm(ReasonForm):
    """A duration and its direction, or a datetime, also one in the past."""

    DIRECTIONS = (("earlier", _("earlier")), ("later", _("later")))
    amount = forms.IntegerField(label=_("By"), min_value=1, max_value=100_000, required=False)
    unit = forms.ChoiceField(label=_("Unit"), choices=MINUTES, required=False)
    direction = forms.ChoiceField(label=_("Direction"), choices=DIRECTIONS, required=False)
    at = LocalDateTimeField(label=_("Or to this time"), required=False)
    needs_preview = True

    def clean(self) -> None:
        if not self.errors and bool(self.cleaned_data.get("amount")) == bool(self.cleaned_data.get("at")):
            raise forms.ValidationError(_("Enter either a duration or a time."))

    def parameters(self) -> dict[str, Any]:
        if at := self.cleaned_data["at"]:
            return {"at": at}
        shift = duration_of(self.cleaned_data)
        return {"shift": shift if self.cleaned_data["direction"] == "later" else -shift}

    def entered(self) -> list[tuple[Any, Any]]:
        given = self.cleaned_data
        if at := given["at"]:
            change = render.time_tag(at)
        else:
            direction = dict(self.DIRECTIONS)[given["direction"] or "earlier"]
            change = f"{render.delay(duration_of(given))}, {direction}"
        return [(_("deadline"), change), *super().entered()]


class RefireForm(ReasonForm):
    """An optional deadline."""

    at = LocalDateTimeField(label=_("Due at"), required=False, help_text=_("Empty: now."))


class PauseForm(ReasonForm):
    """An optional end, of a pause or a hold."""

    until = LocalDateTimeField(label=_("Until"), required=False, help_text=_("Empty: until an operator resumes it."))

    def clean_until(self) -> Any:
        """Require a datetime in the future, unless it is the one in force."""
        until = self.cleaned_data.get("until")
        if until is not None and "until" in self.changed_data and until <= clock.now():
            raise forms.ValidationError(_("This time is in the past."))
        return until

    def parameters(self) -> dict[str, Any]:
        """Return `until` if the visitor has changed it. Otherwise the end in force is kept."""
        return {"until": self.cleaned_data["until"]} if "until" in self.changed_data else {}


class ResumeForm(ReasonForm):
    """Whether deadlines are moved."""

    shift = forms.BooleanField(
        label=_("Move deadlines"),
        required=False,
        initial=True,
        help_text=_("After a hold, by its duration. Otherwise all timeouts that are due by now fire immediately."),
    )


class DelayForm(ReasonForm):
    """Another delay or the declared one, and what happens to pending deadlines."""

    MODES = (
        ("keep", _("keep: pending deadlines stay unchanged")),
        ("recompute", _("recompute: each is counted from its start again, also one that was set by hand")),
        ("shift", _("shift: each moves by the difference")),
    )

    amount = forms.FloatField(label=_("New delay"), min_value=0, required=False)
    unit = forms.ChoiceField(label=_("Unit"), choices=SECONDS, initial="minutes", required=False)
    declared = forms.BooleanField(label=_("Or the declared delay"), required=False)
    mode = forms.ChoiceField(label=_("Pending deadlines"), choices=MODES, initial="keep")
    needs_preview = True

    def clean(self) -> None:
        """Require one of the two, and a delay of at most `MAX_DELAY`."""
        if self.errors:
            return
        has_amount = self.cleaned_data["amount"] is not None
        if has_amount == self.cleaned_data["declared"]:
            raise forms.ValidationError(_("Enter either a delay or choose the declared one."))
        if has_amount and abs(duration_of(self.cleaned_data)) > MAX_DELAY:
            self.add_error("amount", _("This delay is too long."))

    def entered(self) -> list[tuple[Any, Any]]:
        return [(self.fields["mode"].label, dict(self.MODES)[self.cleaned_data["mode"]]), *super().entered()]

    def parameters(self) -> dict[str, Any]:
        """Return `mode`, and `after` (None: the declared delay)."""
        given = self.cleaned_data
        return {"after": None if given["declared"] else duration_of(given), "mode": given["mode"]}


class SignedDelayForm(DelayForm):
    """The same for a policy that counts from a time of its object."""

    amount = forms.FloatField(
        label=_("New delay"), required=False, help_text=_("Negative: before the time that it counts from.")
    )


class GuardForm(ReasonForm):
    """A guard rail: on with the values of the other fields, off, or as declared."""

    SETTINGS = (("on", _("on, with these values")), ("off", _("off")), ("declared", _("as declared")))
    setting = forms.ChoiceField(label=_("Setting"), choices=SETTINGS)
    needed: ClassVar[tuple[str, ...]] = ()
    """The fields without which it cannot be on."""
    shortest: ClassVar = timedelta(0)

    def values(self) -> dict[str, Any]:
        """Return the keyword arguments of the operation if it is on."""
        raise NotImplementedError

    def clean(self) -> None:
        """Require all values if it is on, and a duration in the limits of guard rails."""
        given = self.cleaned_data
        if given.get("setting") != "on" or self.errors:
            return
        for name in self.needed:
            if given[name] is None:
                self.add_error(name, self.fields[name].error_messages["required"])
        if given.get("amount") is not None and not self.shortest <= duration_of(given) <= MAX_PERIOD:
            self.add_error("amount", _("This duration is too short or too long."))

    def parameters(self) -> dict[str, Any]:
        setting = self.cleaned_data["setting"]
        return self.values() if setting == "on" else {"off": setting == "off"}


class LateForm(GuardForm):
    """How late is too late, and what happens then."""

    THEN = (
        ("skip", _("skip: they do not fire")),
        ("dead", _("dead: they are kept for a person")),
        ("fire", _("fire: they fire anyway")),
    )
    amount = forms.FloatField(label=_("Later than"), min_value=0, required=False)
    unit = forms.ChoiceField(label=_("Unit"), choices=SECONDS, initial="hours", required=False)
    then = forms.ChoiceField(label=_("Late timeouts"), choices=THEN, required=False)
    needed = ("amount",)

    @classmethod
    def initial_of(cls, state: PolicyState) -> dict[str, Any]:
        return {**fields_of(state.late.after), "then": state.late.then} if state.late else {}

    def values(self) -> dict[str, Any]:
        return {"after": duration_of(self.cleaned_data), "then": self.cleaned_data["then"] or "skip"}


class BrakeForm(GuardForm):
    """After how many firings in which period the policy pauses itself."""

    most = forms.IntegerField(label=_("More firings than"), min_value=1, max_value=MAX_COUNT, required=False)
    amount = forms.FloatField(label=_("Within"), min_value=0, required=False)
    unit = forms.ChoiceField(label=_("Unit"), choices=SECONDS, initial="minutes", required=False)
    needed = ("most", "amount")
    shortest = timedelta(seconds=1)

    @classmethod
    def initial_of(cls, state: PolicyState) -> dict[str, Any]:
        return {"most": state.brake.most, **fields_of(state.brake.per)} if state.brake else {}

    def values(self) -> dict[str, Any]:
        return {"most": self.cleaned_data["most"], "per": duration_of(self.cleaned_data)}


class ShadowForm(GuardForm):
    """For how many objects the handler is not called."""

    share = forms.IntegerField(
        label=_("Percentage of objects"), min_value=1, max_value=100, initial=100, required=False
    )
    needed = ("share",)

    @classmethod
    def initial_of(cls, state: PolicyState) -> dict[str, Any]:
        return {"share": state.shadow or 100}

    def parameters(self) -> dict[str, Any]:
        return {"share": {"on": self.cleaned_data["share"], "off": 0, "declared": None}[self.cleaned_data["setting"]]}


FORMS: Final[dict[str, type[ReasonForm]]] = {
    "postpone": PostponeForm,
    "reschedule": RescheduleForm,
    "refire": RefireForm,
    "pause": PauseForm,
    "hold": PauseForm,
    "resume": ResumeForm,
    "delay": DelayForm,
    "late": LateForm,
    "brake": BrakeForm,
    "shadow": ShadowForm,
}
"""The forms of the operations that have parameters."""
