"""The table of operations: what an operator may do to timeouts and policies, for admin, REST and commands alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Final

from django.core.exceptions import ValidationError
from django.forms import Field
from django.utils.translation import gettext_lazy as _
from django.utils.translation import ngettext_lazy

from django_delayq.ledger.controls import PolicyState
from django_delayq.models import PolicyControl, Timeout
from django_delayq.operations import personal_data, policies, previews, replanning, timeouts
from django_delayq.operations.parameters import Choice, Flag, Length, Moment, Number, Parameter
from django_delayq.policy.options import MAX_COUNT, MAX_PERIOD

TIMEOUTS_CHANGE: Final = ngettext_lazy("{n} timeout will change.", "{n} timeouts will change.")
State, Stop = Timeout.State, PolicyControl.Stop
NOT_MOVING: Final = frozenset({Stop.NONE, Stop.PAUSED, Stop.HELD})


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One operation on timeouts or on a policy.

    Attributes:
        name: its last path component in admin and REST.
        call: the function of the timeouts or the policy, `by` and `reason`; for timeouts also `dry_run` and `progress`.
        permission: the codename of the permission that is needed.
        parameters: what else `call` takes, and an operator gives.
        is_either: exactly one of the parameters must be given.
        off: for guard rails: the arguments that switch it off. With None for all that is required, it is as declared.
        foresee: for policies: the function that returns the preview of `call`, of the policy and the parameters.
        has_preview: the preview depends on the parameters, so the admin asks for these before.
        will: for timeouts: what will happen to `{n}` of them, by number.
        states: the states of a timeout, or of a policy (`PolicyControl.Stop`), in which it can succeed.
        moves_rows: for policies: pending rows are moved, page by page. `call` takes `progress`, and commands ask first.
        label: for a button beside the policy.
        button: for the button that runs it. It names the object, because in some languages the word for "cancel" alone
            also means "go back"; where it may concern several, by their number, with `{n}`.
        action: for a list of actions on selected rows.
        on_objects: for a list of actions on selected objects that have timeouts.
        question: the title of the page that asks for confirmation and a reason.
        explanation: the consequences.
        done: the result for `{n}` timeouts, by number.
    """

    name: str
    call: Callable[..., Any]
    permission: str
    parameters: tuple[Parameter, ...] = ()
    is_either: bool = False
    off: Mapping[str, Any] | None = None
    foresee: Callable[..., previews.Preview] = previews.preview_waiting
    has_preview: bool = False
    will: Any = TIMEOUTS_CHANGE
    states: frozenset[str] = NOT_MOVING
    moves_rows: bool = False
    label: Any = None
    button: Any
    action: Any = None
    on_objects: Any = None
    question: Any
    explanation: Any
    done: Any = None

    def is_permitted(self, user: Any) -> bool:
        """Return whether `user` may see what this changes, and change it."""
        view = "view_timeout" if self.name in TIMEOUT_OPERATIONS else "view_policycontrol"
        return all(user.has_perm(f"django_delayq.{name}") for name in (view, self.permission))

    def button_for(self, count: int = 1) -> str:
        """Return the text of its button for `count` timeouts or policies."""
        return str(self.button % count if self.is_for_several else self.button).format(n=count)

    @property
    def is_for_several(self) -> bool:
        """Return whether it can be done to several timeouts, or policies, at once."""
        return self.name in {*TIMEOUT_OPERATIONS, "pause", "hold", "resume"}

    def fits(self, subject: Timeout | PolicyState) -> bool:
        if isinstance(subject, Timeout):
            return subject.state in self.states
        # A policy without a delay of its own has none that could be changed.
        return subject.stop in self.states and (self.name != "delay" or subject.policy.after is not None)

    def preview(self, target: Any, **arguments: Any) -> previews.Preview:
        """Return what `call` would do now with these arguments. Writes nothing, and raises the same."""
        if self.name in POLICY_OPERATIONS:
            return self.foresee(target, **arguments)
        return previews.preview_timeouts(self.call(target, by="preview", dry_run=True, **arguments), self.will)

    def for_state(self, state: PolicyState) -> Operation:
        """Return the operation as this state allows it: without `since`, no negative delay; no shift after a pause."""
        if self.name == "resume" and state.stop != Stop.HELD:
            return replace(self, parameters=())
        if self.name != "delay" or state.policy.since is not None:
            return self
        after: Any = self.parameters[0]
        return replace(self, parameters=(replace(after, least=timedelta(0), help=""), *self.parameters[1:]))

    def arguments(
        self, given: Mapping[str, Any], settings: Sequence[str], named: Callable[[Parameter], str]
    ) -> dict[str, Any]:
        """Return the keyword arguments of `call`. Raises ValidationError.

        Args:
            given: the values of the parameters that were given, of the right types.
            settings: of a guard rail: what was chosen of `on`, `off` and `declared`. Values alone choose `on`.
            named: returns what errors call a parameter. Those of several together have an empty name.
        """
        required = [each for each in self.parameters if each.is_required]
        if self.off is not None:
            chosen = settings or ["on"] * bool(given)
            if len(chosen) != 1 or (given and "on" not in chosen):
                values = ", ".join(f"`{named(each)}`" for each in required)
                words = _("Give either {values}, or `off`, or `declared`.").format(values=values)
                raise ValidationError({"": words})
            if "on" not in chosen:
                return dict(self.off if "off" in chosen else {each.name: None for each in required})
        if self.is_either and len(given) != 1:
            raise ValidationError({"": _("Give either a duration or a time.")})
        missing = Field.default_error_messages["required"]
        errors: dict[str, Any] = {named(each): missing for each in required if each.name not in given}
        for each in self.parameters:
            try:
                if given.get(each.name) is not None:
                    each.check(given[each.name])
            except ValidationError as error:
                errors[named(each)] = error.messages
        if errors:
            raise ValidationError(errors)
        return dict(given)


def _by_name(*listed: Operation) -> dict[str, Operation]:
    return {each.name: each for each in listed}


TO: Final = Moment("at", "--to", _("Or to this time"))
UNTIL: Final = Moment("until", "--until", _("Until"), _("Empty: until an operator resumes it."), is_nullable=True)
SHIFT_HELP: Final = _("After a hold, by its duration. Otherwise all timeouts that are due by now fire immediately.")
THEN: Final = (
    ("skip", _("skip: they do not fire")),
    ("dead", _("dead: they are kept for a person")),
    ("fire", _("fire: they fire anyway")),
)
MODES: Final = (
    ("keep", _("keep: pending deadlines stay unchanged")),
    ("recompute", _("recompute: each is counted from its start again")),
    ("shift", _("shift: each moves by the difference")),
)
HAND_SET_HELP: Final = _("They are computed by the policy from then on.")
HAND_SET: Final = Flag(
    "hand_set", "--hand-set", _("Also deadlines that were set by hand"), HAND_SET_HELP, default=False
)
_GIVEN: Final[Any] = {"is_required": True, "is_nullable": True}
MAX_DELAY: Final = timedelta(days=10_000)
"""A longer delay is a typing error, and with the `since` of old rows it would lead beyond the calendar."""
DELAY_HELP: Final = _("Negative: before the time that it counts from.")
DELAY: Final = Length("after", "--after", _("New delay"), DELAY_HELP, least=-MAX_DELAY, most=MAX_DELAY, **_GIVEN)
SHARE_HELP: Final = _("100: for all; 0: off; null: as declared.")
SHARE: Final = Number("share", "--share", _("Percentage of objects"), SHARE_HELP, most=100, default=100, **_GIVEN)
TIMEOUT_OPERATIONS: Final = _by_name(
    Operation(
        name="cancel",
        call=timeouts.cancel,
        permission="cancel_timeout",
        states=frozenset({State.PENDING, State.HELD, State.FIRING, State.DEAD}),
        button=ngettext_lazy("Cancel the timeout", "Cancel {n} timeouts"),
        action=_("Cancel selected timeouts"),
        on_objects=_("Cancel their timeouts"),
        question=_("Cancel these timeouts?"),
        explanation=_("They will not fire. Timeouts that are firing now are not retried if they fail."),
        done=ngettext_lazy("{n} timeout was cancelled.", "{n} timeouts were cancelled."),
    ),
    Operation(
        name="fire",
        call=timeouts.fire_now,
        permission="fire_timeout",
        states=frozenset({State.PENDING}),
        button=ngettext_lazy("Fire the timeout now", "Fire {n} timeouts now"),
        action=_("Fire selected timeouts now"),
        on_objects=_("Fire their timeouts now"),
        question=_("Fire these timeouts now?"),
        explanation=_("They are due immediately. A worker fires each of them if its condition still holds."),
        done=ngettext_lazy("{n} timeout is due now.", "{n} timeouts are due now."),
    ),
    Operation(
        name="postpone",
        call=timeouts.postpone,
        permission="postpone_timeout",
        parameters=(Length("after", "--by", _("Later by"), least=timedelta.resolution, in_units=True), TO),
        is_either=True,
        has_preview=True,
        will=previews.DEADLINES_CHANGE,
        states=frozenset({State.PENDING, State.HELD}),
        button=ngettext_lazy("Postpone the timeout", "Postpone {n} timeouts"),
        action=_("Postpone selected timeouts"),
        on_objects=_("Postpone their timeouts"),
        question=_("Postpone these timeouts?"),
        explanation=_("Each gets a later deadline: by a duration, or one time for all of them."),
        done=ngettext_lazy("{n} timeout was postponed.", "{n} timeouts were postponed."),
    ),
    Operation(
        name="reschedule",
        call=timeouts.change_deadline,
        permission="postpone_timeout",
        parameters=(Length("shift", "--by", _("By"), least=timedelta.min, has_direction=True), TO),
        is_either=True,
        has_preview=True,
        will=previews.DEADLINES_CHANGE,
        states=frozenset({State.PENDING, State.HELD}),
        button=ngettext_lazy("Change the deadline", "Change {n} deadlines"),
        action=_("Change the deadlines of selected timeouts"),
        on_objects=_("Change the deadlines of their timeouts"),
        question=_("Change the deadlines of these timeouts?"),
        explanation=_(
            "Each gets another deadline, earlier or later. The next page shows how many would be due immediately."
        ),
        done=ngettext_lazy("{n} deadline was changed.", "{n} deadlines were changed."),
    ),
    Operation(
        name="replan",
        call=replanning.replan,
        permission="postpone_timeout",
        parameters=(HAND_SET,),
        has_preview=True,
        will=previews.DEADLINES_CHANGE,
        states=frozenset({State.PENDING, State.HELD}),
        button=ngettext_lazy("Compute the deadline again", "Compute {n} deadlines again"),
        action=_("Compute the deadlines of selected timeouts again"),
        on_objects=_("Compute the deadlines of their timeouts again"),
        question=_("Compute the deadlines of these timeouts again?"),
        explanation=_(
            "Each gets the deadline that its policy computes now, with the present delay, values and calendars. The "
            "next page shows how many would be due immediately."
        ),
        done=ngettext_lazy("{n} deadline was computed again.", "{n} deadlines were computed again."),
    ),
    Operation(
        name="hold_timeout",
        call=timeouts.hold_timeout,
        permission="hold_timeout",
        parameters=(UNTIL,),
        states=frozenset({State.PENDING, State.HELD}),
        button=ngettext_lazy("Hold the timeout", "Hold {n} timeouts"),
        action=_("Hold selected timeouts"),
        on_objects=_("Hold their timeouts"),
        question=_("Hold these timeouts?"),
        explanation=_("They do not fire. When they are resumed, each deadline is as far away as when the hold began."),
        done=ngettext_lazy("{n} timeout is on hold.", "{n} timeouts are on hold."),
    ),
    Operation(
        name="pause_timeout",
        call=timeouts.pause_timeout,
        permission="hold_timeout",
        parameters=(UNTIL,),
        states=frozenset({State.PENDING, State.HELD}),
        button=ngettext_lazy("Pause the timeout", "Pause {n} timeouts"),
        action=_("Pause selected timeouts"),
        on_objects=_("Pause their timeouts"),
        question=_("Pause these timeouts?"),
        explanation=_(
            "They do not fire, but their deadlines stay where they are. When they are resumed, those fire whose "
            "deadlines have passed."
        ),
        done=ngettext_lazy("{n} timeout is paused.", "{n} timeouts are paused."),
    ),
    Operation(
        name="resume_timeout",
        call=timeouts.resume_timeout,
        permission="hold_timeout",
        will=ngettext_lazy("{n} timeout will be resumed.", "{n} timeouts will be resumed."),
        states=frozenset({State.HELD}),
        button=ngettext_lazy("Resume the timeout", "Resume {n} timeouts"),
        action=_("Resume selected timeouts"),
        on_objects=_("Resume their timeouts"),
        question=_("Resume these timeouts?"),
        explanation=_(
            "Each deadline is as far away as when the hold began; that of a paused timeout has stayed where it was. "
            "What the condition of the policy holds stays on hold until that condition does not hold."
        ),
        done=ngettext_lazy("{n} timeout was resumed.", "{n} timeouts were resumed."),
    ),
    Operation(
        name="retry",
        call=timeouts.retry,
        permission="retry_timeout",
        states=frozenset({State.DEAD}),
        button=ngettext_lazy("Retry the timeout", "Retry {n} timeouts"),
        action=_("Retry selected dead timeouts"),
        on_objects=_("Retry their dead timeouts"),
        question=_("Retry these dead timeouts?"),
        explanation=_("They are pending again and due immediately, with all their attempts left."),
        done=ngettext_lazy("{n} timeout is pending again.", "{n} timeouts are pending again."),
    ),
    Operation(
        name="refire",
        call=timeouts.refire,
        permission="refire_timeout",
        parameters=(Moment("at", "--at", _("Due at"), _("Empty: now.")),),
        has_preview=True,
        states=frozenset({State.FIRED, State.SKIPPED, State.CANCELLED, State.DEAD}),
        button=ngettext_lazy("Fire the timeout again", "Fire {n} timeouts again"),
        action=_("Fire selected settled timeouts again"),
        on_objects=_("Fire their settled timeouts again"),
        question=_("Fire these timeouts again?"),
        explanation=_(
            "Each gets a new round with the same payload. A worker fires it if its condition holds. Effects "
            "outside the database, such as messages, are repeated."
        ),
        done=ngettext_lazy("{n} timeout is scheduled again.", "{n} timeouts are scheduled again."),
    ),
    Operation(
        name="erase",
        call=personal_data.erase,
        permission="erase_timeout",
        states=frozenset({State.FIRED, State.SKIPPED, State.CANCELLED, State.DEAD}),
        button=ngettext_lazy("Erase the data of the timeout", "Erase the data of {n} timeouts"),
        action=_("Erase the personal data of selected settled timeouts"),
        on_objects=_("Erase the personal data of their settled timeouts"),
        question=_("Erase the personal data of these timeouts?"),
        explanation=_(
            "Their payloads, keys, reasons and error messages are emptied. This cannot be undone. The timeouts stay, "
            "but cannot be retried or fired again. Give the number of the request as the reason, not a name: it is "
            "stored."
        ),
        done=ngettext_lazy("{n} timeout was emptied of personal data.", "{n} timeouts were emptied of personal data."),
    ),
)
POLICY_OPERATIONS: Final = _by_name(
    Operation(
        name="pause",
        call=policies.pause,
        permission="pause_policy",
        parameters=(UNTIL,),
        states=frozenset({Stop.NONE, Stop.PAUSED}),
        label=_("Pause"),
        button=ngettext_lazy("Pause the policy", "Pause {n} policies"),
        question=_("Pause this policy?"),
        explanation=_(
            "Timeouts do not fire while a policy is paused. Deadlines stay unchanged: those that are due when it is "
            "resumed fire immediately."
        ),
    ),
    Operation(
        name="hold",
        call=policies.hold,
        permission="pause_policy",
        parameters=(UNTIL,),
        label=_("Hold"),
        button=ngettext_lazy("Hold the policy", "Hold {n} policies"),
        question=_("Hold this policy?"),
        explanation=_(
            "Timeouts do not fire while a policy is on hold. When it is resumed, all pending deadlines are moved by "
            "the duration of the hold. Use it for an outage during which customers cannot act."
        ),
    ),
    Operation(
        name="resume",
        call=policies.resume,
        foresee=previews.preview_resume,
        permission="pause_policy",
        parameters=(Flag("shift", "--no-shift", _("Move deadlines"), SHIFT_HELP, default=True),),
        states=frozenset({Stop.PAUSED, Stop.HELD}),
        moves_rows=True,
        label=_("Resume"),
        button=ngettext_lazy("Resume the policy", "Resume {n} policies"),
        question=_("Resume this policy?"),
        explanation=_("Workers fire due timeouts within two seconds."),
    ),
    Operation(
        name="delay",
        call=policies.change_delay,
        foresee=previews.preview_delay,
        permission="change_policy_delay",
        parameters=(
            DELAY,
            Choice("mode", "--mode", _("Pending deadlines"), choices=MODES, default="keep", is_required=True),
            HAND_SET,
        ),
        has_preview=True,
        moves_rows=True,
        label=_("Change the delay"),
        button=_("Change the delay"),
        question=_("Change the delay of this policy?"),
        explanation=_(
            "New timeouts get the new delay. For pending ones, choose. The next page shows the consequences."
        ),
    ),
    Operation(
        name="late",
        call=policies.late,
        permission="change_policy_guards",
        parameters=(
            Length("after", "after", _("Later than"), most=MAX_PERIOD, unit="hours", is_required=True),
            Choice("then", "--then", _("Late timeouts"), choices=THEN, default="skip"),
        ),
        off={"off": True},
        label=_("Limit the lateness"),
        button=_("Change the limit of lateness"),
        question=_("Change the limit of lateness of this policy?"),
        explanation=_(
            "A timeout whose first attempt would begin later than this after its deadline is skipped, or kept as "
            "dead. Settled timeouts do not change."
        ),
    ),
    Operation(
        name="brake",
        call=policies.brake,
        permission="change_policy_guards",
        parameters=(
            Number("most", "most", _("More firings than"), least=1, most=MAX_COUNT, default=1000, is_required=True),
            Length("per", "--per", _("Within"), least=timedelta(seconds=1), most=MAX_PERIOD, is_required=True),
        ),
        off={"off": True},
        label=_("Change the brake"),
        button=_("Change the brake"),
        question=_("Change the brake of this policy?"),
        explanation=_(
            "The policy pauses itself when more of its timeouts than this fire within the period. "
            "A pause that is in force remains until it is resumed."
        ),
    ),
    Operation(
        name="shadow",
        call=policies.shadow,
        permission="change_policy_guards",
        parameters=(SHARE,),
        off={"share": 0},
        label=_("Shadow mode"),
        button=_("Change the shadow mode"),
        question=_("Change the shadow mode of this policy?"),
        explanation=_(
            "In shadow mode everything happens but the handler: timeouts are skipped when they are due, and do not "
            "fire after shadow mode is switched off."
        ),
    ),
)
OPERATIONS: Final = TIMEOUT_OPERATIONS | POLICY_OPERATIONS


def operations_for(user: Any, target: Timeout | PolicyState) -> list[Operation]:
    """Return the operations that `user` may do to this row or policy now."""
    found = TIMEOUT_OPERATIONS if isinstance(target, Timeout) else POLICY_OPERATIONS
    return [each for each in found.values() if each.fits(target) and each.is_permitted(user)]
