"""The form of the pages that ask for confirmation: the parameters of the operation, and a reason."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Final

from django import forms
from django.utils import timezone
from django.utils.translation import gettext_lazy as _

from django_delayq.admin import render
from django_delayq.ledger.controls import PolicyState
from django_delayq.operations.parameters import Choice, Length, Moment, Number, Parameter
from django_delayq.operations.registry import Operation
from django_delayq.rounds.memory import MAX_REASON
from django_delayq.times.lengths import length_label

UNITS: Final = (("seconds", _("seconds")), ("minutes", _("minutes")), ("hours", _("hours")), ("days", _("days")))
DIRECTIONS: Final = (("earlier", _("earlier")), ("later", _("later")))
SETTINGS: Final = (("on", _("on, with these values")), ("off", _("off")), ("declared", _("as declared")))


class LocalDateTimeField(forms.DateTimeField):
    """A datetime in the visitor's time zone, which the help text names."""

    widget = forms.DateTimeInput(format="%Y-%m-%dT%H:%M", attrs={"type": "datetime-local"})

    def get_bound_field(self, form: forms.BaseForm, field_name: str) -> forms.BoundField:
        bound = super().get_bound_field(form, field_name)
        zone = _("Local time ({zone}).").format(zone=timezone.get_current_timezone_name())
        bound.help_text = f"{zone} {self.help_text}".strip()
        return bound


class OperationForm(forms.Form):
    """The parameters of an operation, and the reason, which is stored with what was changed, and logged."""

    reason = forms.CharField(
        label=_("Reason"),
        max_length=MAX_REASON,
        help_text=_("Stored in the history."),
        widget=forms.TextInput(attrs={"size": 60, "autocomplete": "off"}),
    )

    def __init__(self, operation: Operation, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.operation = operation
        reason = self.fields.pop("reason")
        if operation.off is not None:
            self.fields["setting"] = forms.ChoiceField(label=_("Setting"), choices=SETTINGS)
        for each in operation.parameters:
            self.fields |= fields_of(each, is_guard=operation.off is not None)
        self.fields["reason"] = reason

    def clean(self) -> None:
        """Set `arguments`, the keyword arguments of the operation."""
        if self.errors:
            return
        given = dict[str, Any]()
        setting = self.cleaned_data.get("setting", "")
        if setting not in ("off", "declared"):  # the fields show what is in force
            for each in self.operation.parameters:
                given |= self._given(each)
        try:
            self.arguments = self.operation.arguments(given, [setting] if setting else [], name_of)
        except forms.ValidationError as error:
            for name, words in error.message_dict.items():
                self.add_error(name or None, words)

    def _given(self, parameter: Parameter) -> dict[str, Any]:
        """Return the value that was entered, by the name of the parameter. Empty: none was."""
        entered, name = self.cleaned_data, parameter.name
        match parameter:
            case Length():
                is_declared = entered.get("declared", False)
                if is_declared and entered["amount"] is not None:
                    raise forms.ValidationError(_("Enter either a delay or choose the declared one."))
                if is_declared or entered["amount"] is None:
                    return {name: None} if is_declared else {}
                value = duration_of(entered)
                return {name: -value if parameter.has_direction and entered["direction"] != "later" else value}
            case Moment() if parameter.is_nullable:  # otherwise the end in force is kept
                return {name: entered[name]} if name in self.changed_data else {}
        return {name: entered[name]} if entered[name] not in (None, "") else {}

    def entered(self) -> list[tuple[Any, Any]]:
        """Return what a preview repeats of the valid form: labels and values."""
        shown: list[tuple[Any, Any]] = []
        for each in self.operation.parameters:
            value = self.arguments.get(each.name)
            if isinstance(each, Choice):
                shown.append((each.label, dict(each.choices)[str(value)]))
            elif isinstance(each, Moment) and value is not None:
                shown.append((_("deadline"), render.time_tag(value)))
            elif isinstance(each, Length) and each.has_direction and value is not None:
                direction = dict(DIRECTIONS)["earlier" if value < timedelta(0) else "later"]
                shown.append((_("deadline"), f"{length_label(abs(value))}, {direction}"))
        return [*shown, (self.fields["reason"].label, self.cleaned_data["reason"])]


def fields_of(parameter: Parameter, *, is_guard: bool) -> dict[str, forms.Field]:
    """Return the fields with which the visitor gives a value; those of a guard rail may be empty if it is off."""
    words: dict[str, Any] = {"label": parameter.label, "help_text": "" if is_guard else parameter.help}
    words |= {"initial": parameter.default, "required": parameter.is_required and not is_guard}
    match parameter:
        case Moment():
            return {parameter.name: LocalDateTimeField(**words)}
        case Length():
            least = 0 if parameter.least >= timedelta(0) or parameter.has_direction else None
            fields: dict[str, forms.Field] = {}
            fields["amount"] = forms.FloatField(min_value=least, **{**words, "required": False})
            fields["unit"] = forms.ChoiceField(label=_("Unit"), choices=UNITS, initial=parameter.unit, required=False)
            if parameter.has_direction:
                fields["direction"] = forms.ChoiceField(label=_("Direction"), choices=DIRECTIONS, required=False)
            if parameter.is_nullable:
                fields["declared"] = forms.BooleanField(label=_("Or the declared delay"), required=False)
            return fields
        case Choice():
            return {parameter.name: forms.ChoiceField(choices=parameter.choices, **words)}
        case Number():
            return {parameter.name: forms.IntegerField(min_value=parameter.least, max_value=parameter.most, **words)}
    return {parameter.name: forms.BooleanField(**words)}


def name_of(parameter: Parameter) -> str:
    """Return the name of the field that shows the errors of `parameter`."""
    return "amount" if isinstance(parameter, Length) else parameter.name


def duration_of(given: dict[str, Any]) -> timedelta:
    """Return the duration of the fields `amount` and `unit`; the longest possible one if it is longer than that."""
    try:
        return timedelta(**{given.get("unit") or "minutes": given["amount"]})
    except OverflowError:
        return timedelta.max


def initial_of(operation: Operation, state: PolicyState) -> dict[str, Any]:
    """Return the values of a guard rail that are in force."""
    guard = None if operation.off is None else getattr(state, operation.name)
    if isinstance(guard, int):
        return {"share": guard or 100}
    initial = dict[str, Any]()
    for each in operation.parameters if guard else ():
        value = getattr(guard, each.name)
        initial |= _amount_of(value) if isinstance(each, Length) else {each.name: value}
    return initial


def _amount_of(duration: timedelta) -> dict[str, Any]:
    """Return `amount` and `unit` of a duration, in the largest unit of which it is a multiple."""
    for unit in ("days", "hours", "minutes"):
        amount, rest = divmod(duration, timedelta(**{unit: 1}))
        if amount and not rest:
            return {"amount": amount, "unit": unit}
    return {"amount": duration.total_seconds(), "unit": "seconds"}
