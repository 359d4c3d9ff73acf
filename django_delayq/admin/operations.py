"""What operators may do to timeouts here: each with its permission, its form and its words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from django import forms
from django.utils import timezone
from django.utils.translation import gettext_lazy as _
from django.utils.translation import ngettext_lazy

from django_delayq import clock, operations
from django_delayq.ledger.history import MAX_REASON
from django_delayq.models import Timeout

if TYPE_CHECKING:
    from django.http import HttpRequest
    from django_stubs_ext import StrPromise

    from django_delayq.operations import Result

State = Timeout.State


def local_time() -> str:
    """Which time is meant, for whoever enters one."""
    return _("Local time ({zone}).").format(zone=timezone.get_current_timezone_name())


class ReasonForm(forms.Form):
    """Why it is done; kept with what was changed, and in the log."""

    reason = forms.CharField(
        label=_("Reason"),
        max_length=MAX_REASON,
        help_text=_("Kept for whoever asks later."),
        widget=forms.TextInput(attrs={"size": 60, "autocomplete": "off"}),
    )

    def delay(self) -> dict[str, Any]:
        """What the verb is given besides the reason."""
        return {}


class PostponeForm(ReasonForm):
    """By a length, or to a moment."""

    UNITS = (("minutes", _("minutes")), ("hours", _("hours")), ("days", _("days")))

    amount = forms.IntegerField(label=_("Later by"), min_value=1, max_value=100_000, required=False)
    unit = forms.ChoiceField(label=_("Unit"), choices=UNITS, required=False)
    at = forms.DateTimeField(
        label=_("Or to this moment"),
        required=False,
        widget=forms.DateTimeInput(format="%Y-%m-%dT%H:%M", attrs={"type": "datetime-local"}),
    )
    field_order = ("amount", "unit", "at", "reason")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fields["at"].help_text = local_time()

    def clean(self) -> dict[str, Any]:
        """Either of the two, and no moment that has passed."""
        given: dict[str, Any] = super().clean() or self.cleaned_data
        if self.errors:
            return given
        if bool(given.get("amount")) == bool(given.get("at")):
            raise forms.ValidationError(_("By how much, or to when? Give one of the two."))
        if given.get("at") and given["at"] <= clock.now():
            self.add_error("at", _("This moment has passed."))
        return given

    def delay(self) -> dict[str, Any]:
        given = self.cleaned_data
        if given.get("at"):
            return {"at": given["at"]}
        return {"after": timedelta(**{given.get("unit") or "minutes": given["amount"]})}


@dataclass(frozen=True, slots=True)
class Operation:
    """One thing that may be done to timeouts."""

    name: str
    permission: str
    button: StrPromise
    """On the row's page, and on the button that confirms."""
    action: StrPromise
    """In the list of actions."""
    question: StrPromise
    explanation: StrPromise
    done: Any
    """`{n} timeouts were ...`, by number."""
    noted: StrPromise
    """What the log says."""
    states: frozenset[str]
    """In which a row has a button for it."""
    verb: Callable[..., Result]
    form: type[ReasonForm] = ReasonForm

    def is_allowed(self, request: HttpRequest) -> bool:
        """Whether the visitor may look at timeouts, and do this to them."""
        user = request.user
        return user.has_perm("django_delayq.view_timeout") and user.has_perm(f"django_delayq.{self.permission}")


OPERATIONS = {
    operation.name: operation
    for operation in (
        Operation(
            "cancel",
            "cancel_timeout",
            _("Cancel"),
            _("Cancel selected timeouts"),
            _("Cancel these timeouts?"),
            _("They will not happen. What is firing just now is not tried again should it fail."),
            ngettext_lazy("{n} timeout was cancelled.", "{n} timeouts were cancelled."),
            _("Cancelled: {reason}"),
            frozenset({State.PENDING, State.FIRING, State.DEAD}),
            operations.cancel,
        ),
        Operation(
            "fire",
            "fire_timeout",
            _("Fire now"),
            _("Fire selected timeouts now"),
            _("Fire these timeouts now?"),
            _("They become due at once. A worker fires each of them, if its condition still holds."),
            ngettext_lazy("{n} timeout is due now.", "{n} timeouts are due now."),
            _("Fired at once: {reason}"),
            frozenset({State.PENDING}),
            operations.fire_now,
        ),
        Operation(
            "postpone",
            "postpone_timeout",
            _("Postpone"),
            _("Postpone selected timeouts"),
            _("Postpone these timeouts?"),
            _("Each gets a later deadline: by a length of time, or one moment for all of them."),
            ngettext_lazy("{n} timeout was postponed.", "{n} timeouts were postponed."),
            _("Postponed: {reason}"),
            frozenset({State.PENDING}),
            operations.postpone,
            PostponeForm,
        ),
        Operation(
            "retry",
            "retry_timeout",
            _("Retry"),
            _("Retry selected dead timeouts"),
            _("Retry these dead timeouts?"),
            _("They are pending again and due at once, with all their attempts before them."),
            ngettext_lazy("{n} timeout is pending again.", "{n} timeouts are pending again."),
            _("Retried: {reason}"),
            frozenset({State.DEAD}),
            operations.retry,
        ),
    )
}
