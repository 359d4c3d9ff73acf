"""The forms of the pages that ask for confirmation: a reason, and the parameters of the operation."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Final

from django import forms
from django.utils import timezone
from django.utils.translation import gettext_lazy as _

from django_delayq import clock
from django_delayq.ledger.history import MAX_REASON

MAX_DELAY: Final = timedelta(days=10_000)
MINUTES = (("minutes", _("minutes")), ("hours", _("hours")), ("days", _("days")))
SECONDS = (("seconds", _("seconds")), *MINUTES)


class LocalDateTimeField(forms.DateTimeField):
    """A datetime in the visitor's time zone, which the help text names. It must be in the future."""

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

    def parameters(self) -> dict[str, Any]:
        """Return the keyword arguments of the operation: all fields but the reason."""
        return {name: value for name, value in self.cleaned_data.items() if name != "reason"}


class PostponeForm(ReasonForm):
    """A duration or a datetime."""

    amount = forms.IntegerField(label=_("Later by"), min_value=1, max_value=100_000, required=False)
    unit = forms.ChoiceField(label=_("Unit"), choices=MINUTES, required=False)
    at = LocalDateTimeField(label=_("Or to this time"), required=False)
    field_order = ("amount", "unit", "at", "reason")

    def clean(self) -> dict[str, Any]:
        given: dict[str, Any] = super().clean() or self.cleaned_data
        if self.errors:
            return given
        if bool(given.get("amount")) == bool(given.get("at")):
            raise forms.ValidationError(_("Enter either a duration or a time."))
        if given.get("at") and given["at"] <= clock.now():
            self.add_error("at", _("This time is in the past."))
        return given

    def parameters(self) -> dict[str, Any]:
        given = self.cleaned_data
        if given.get("at"):
            return {"at": given["at"]}
        return {"after": timedelta(**{given.get("unit") or "minutes": given["amount"]})}


class PauseForm(ReasonForm):
    """An optional end."""

    until = LocalDateTimeField(label=_("Until"), required=False, help_text=_("Empty: until an operator resumes it."))
    field_order = ("until", "reason")

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
    field_order = ("shift", "reason")


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
    field_order = ("amount", "unit", "declared", "mode", "reason")
    needs_preview = True

    def clean(self) -> dict[str, Any]:
        """Require one of the two, and a delay of at most `MAX_DELAY`."""
        given: dict[str, Any] = super().clean() or self.cleaned_data
        if self.errors:
            return given
        if (given.get("amount") is not None) == bool(given.get("declared")):
            raise forms.ValidationError(_("Enter either a delay or choose the declared one."))
        if given.get("amount") is not None and abs(self.parameters()["after"]) > MAX_DELAY:
            self.add_error("amount", _("This delay is too long."))
        return given

    def mode_label(self) -> str:
        return str(dict(self.MODES)[self.cleaned_data["mode"]])

    def parameters(self) -> dict[str, Any]:
        """Return `mode`, and `after` (None: the declared delay)."""
        given = self.cleaned_data
        after: timedelta | None = None
        if not given.get("declared"):
            try:
                after = timedelta(**{given.get("unit") or "minutes": given["amount"]})
            except OverflowError:
                after = timedelta.max  # which `clean` refuses
        return {"after": after, "mode": given.get("mode")}


class SignedDelayForm(DelayForm):
    """The same for a policy that counts from a time of its object."""

    amount = forms.FloatField(
        label=_("New delay"),
        required=False,
        help_text=_("Negative: before the time that it counts from."),
    )


FORMS: Final[dict[str, type[ReasonForm]]] = {
    "postpone": PostponeForm,
    "pause": PauseForm,
    "resume": ResumeForm,
    "delay": DelayForm,
}
"""The forms of the operations that have parameters."""
