"""The table of operations: what an operator may do to timeouts and policies, for admin, REST and commands alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from django.utils.translation import gettext_lazy as _
from django.utils.translation import ngettext_lazy

from django_delayq import operations
from django_delayq.ledger.controls import PolicyState
from django_delayq.models import PolicyControl, Timeout

State, Stop = Timeout.State, PolicyControl.Stop
FOR_SEVERAL_POLICIES: Final = ("pause", "hold", "resume")
NOT_MOVING: Final = frozenset({Stop.NONE, Stop.PAUSED, Stop.HELD})


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One operation on timeouts or on a policy.

    Attributes:
        name: its last path component in admin and REST.
        call: the function of the timeouts or the policy, `by` and `reason`; for timeouts also `dry_run` and `progress`.
        permission: the codename of the permission that is needed.
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
        log_message: for Django's admin log, with `{reason}`.
    """

    name: str
    call: Callable[..., Any]
    permission: str
    states: frozenset[str] = NOT_MOVING
    moves_rows: bool = False
    label: Any = None
    button: Any
    action: Any = None
    on_objects: Any = None
    question: Any
    explanation: Any
    done: Any = None
    log_message: Any

    def is_permitted(self, user: Any) -> bool:
        """Return whether `user` may see what this changes, and change it."""
        view = "view_timeout" if self.name in TIMEOUT_OPERATIONS else "view_policycontrol"
        return all(user.has_perm(f"django_delayq.{name}") for name in (view, self.permission))

    def button_for(self, count: int = 1) -> str:
        """Return the text of its button for `count` timeouts or policies."""
        is_counted = self.name in TIMEOUT_OPERATIONS or self.name in FOR_SEVERAL_POLICIES
        return str(self.button % count if is_counted else self.button).format(n=count)

    def fits(self, subject: Timeout | PolicyState) -> bool:
        if isinstance(subject, Timeout):
            return subject.state in self.states
        # A policy without a delay of its own has none that could be changed.
        return subject.stop in self.states and (self.name != "delay" or subject.policy.after is not None)


def _by_name(*listed: Operation) -> dict[str, Operation]:
    return {each.name: each for each in listed}


TIMEOUT_OPERATIONS: Final = _by_name(
    Operation(
        name="cancel",
        call=operations.cancel,
        permission="cancel_timeout",
        states=frozenset({State.PENDING, State.FIRING, State.DEAD}),
        button=ngettext_lazy("Cancel the timeout", "Cancel {n} timeouts"),
        action=_("Cancel selected timeouts"),
        on_objects=_("Cancel their timeouts"),
        question=_("Cancel these timeouts?"),
        explanation=_("They will not fire. Timeouts that are firing now are not retried if they fail."),
        done=ngettext_lazy("{n} timeout was cancelled.", "{n} timeouts were cancelled."),
        log_message=_("Cancelled: {reason}"),
    ),
    Operation(
        name="fire",
        call=operations.fire_now,
        permission="fire_timeout",
        states=frozenset({State.PENDING}),
        button=ngettext_lazy("Fire the timeout now", "Fire {n} timeouts now"),
        action=_("Fire selected timeouts now"),
        on_objects=_("Fire their timeouts now"),
        question=_("Fire these timeouts now?"),
        explanation=_("They are due immediately. A worker fires each of them if its condition still holds."),
        done=ngettext_lazy("{n} timeout is due now.", "{n} timeouts are due now."),
        log_message=_("Fired now: {reason}"),
    ),
    Operation(
        name="postpone",
        call=operations.postpone,
        permission="postpone_timeout",
        states=frozenset({State.PENDING}),
        button=ngettext_lazy("Postpone the timeout", "Postpone {n} timeouts"),
        action=_("Postpone selected timeouts"),
        on_objects=_("Postpone their timeouts"),
        question=_("Postpone these timeouts?"),
        explanation=_("Each gets a later deadline: by a duration, or one time for all of them."),
        done=ngettext_lazy("{n} timeout was postponed.", "{n} timeouts were postponed."),
        log_message=_("Postponed: {reason}"),
    ),
    Operation(
        name="reschedule",
        call=operations.change_deadline,
        permission="postpone_timeout",
        states=frozenset({State.PENDING}),
        button=ngettext_lazy("Change the deadline", "Change {n} deadlines"),
        action=_("Change the deadlines of selected timeouts"),
        on_objects=_("Change the deadlines of their timeouts"),
        question=_("Change the deadlines of these timeouts?"),
        explanation=_(
            "Each gets another deadline, earlier or later. The next page shows how many would be due immediately."
        ),
        done=ngettext_lazy("{n} deadline was changed.", "{n} deadlines were changed."),
        log_message=_("Deadline changed: {reason}"),
    ),
    Operation(
        name="retry",
        call=operations.retry,
        permission="retry_timeout",
        states=frozenset({State.DEAD}),
        button=ngettext_lazy("Retry the timeout", "Retry {n} timeouts"),
        action=_("Retry selected dead timeouts"),
        on_objects=_("Retry their dead timeouts"),
        question=_("Retry these dead timeouts?"),
        explanation=_("They are pending again and due immediately, with all their attempts left."),
        done=ngettext_lazy("{n} timeout is pending again.", "{n} timeouts are pending again."),
        log_message=_("Retried: {reason}"),
    ),
    Operation(
        name="refire",
        call=operations.refire,
        permission="refire_timeout",
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
        log_message=_("Fired again: {reason}"),
    ),
)
POLICY_OPERATIONS: Final = _by_name(
    Operation(
        name="pause",
        call=operations.pause,
        permission="pause_policy",
        states=frozenset({Stop.NONE, Stop.PAUSED}),
        label=_("Pause"),
        button=ngettext_lazy("Pause the policy", "Pause {n} policies"),
        question=_("Pause this policy?"),
        explanation=_(
            "Its timeouts do not fire until it is resumed. Deadlines stay unchanged: "
            "timeouts that are due by then fire immediately."
        ),
        log_message=_("Paused: {reason}"),
    ),
    Operation(
        name="hold",
        call=operations.hold,
        permission="pause_policy",
        label=_("Hold"),
        button=ngettext_lazy("Hold the policy", "Hold {n} policies"),
        question=_("Hold this policy?"),
        explanation=_(
            "Its timeouts do not fire. When it is resumed, all pending deadlines are moved by the duration of the "
            "hold. Use it for an outage during which customers cannot act."
        ),
        log_message=_("Held: {reason}"),
    ),
    Operation(
        name="resume",
        call=operations.resume,
        permission="pause_policy",
        states=frozenset({Stop.PAUSED, Stop.HELD}),
        moves_rows=True,
        label=_("Resume"),
        button=ngettext_lazy("Resume the policy", "Resume {n} policies"),
        question=_("Resume this policy?"),
        explanation=_("Due timeouts fire within two seconds. After a hold, deadlines are moved first."),
        log_message=_("Resumed: {reason}"),
    ),
    Operation(
        name="delay",
        call=operations.change_delay,
        permission="change_policy_delay",
        moves_rows=True,
        label=_("Change the delay"),
        button=_("Change the delay"),
        question=_("Change the delay of this policy?"),
        explanation=_(
            "New timeouts get the new delay. For pending ones, choose. The next page shows the consequences."
        ),
        log_message=_("Delay changed: {reason}"),
    ),
    Operation(
        name="late",
        call=operations.late,
        permission="change_policy_guards",
        label=_("Limit the lateness"),
        button=_("Change the limit of lateness"),
        question=_("Change the limit of lateness of this policy?"),
        explanation=_(
            "A timeout whose first attempt would begin later than this after its deadline is skipped, or kept as "
            "dead. Settled timeouts do not change."
        ),
        log_message=_("Limit of lateness changed: {reason}"),
    ),
    Operation(
        name="brake",
        call=operations.brake,
        permission="change_policy_guards",
        label=_("Change the brake"),
        button=_("Change the brake"),
        question=_("Change the brake of this policy?"),
        explanation=_(
            "The policy pauses itself when more of its timeouts than this fire within the period. "
            "A pause that is in force remains until it is resumed."
        ),
        log_message=_("Brake changed: {reason}"),
    ),
    Operation(
        name="shadow",
        call=operations.shadow,
        permission="change_policy_guards",
        label=_("Shadow mode"),
        button=_("Change the shadow mode"),
        question=_("Change the shadow mode of this policy?"),
        explanation=_(
            "In shadow mode everything happens but the handler: timeouts are skipped when they are due, and do not "
            "fire after shadow mode is switched off."
        ),
        log_message=_("Shadow mode changed: {reason}"),
    ),
)
OPERATIONS: Final = TIMEOUT_OPERATIONS | POLICY_OPERATIONS


def operations_for(user: Any, target: Timeout | PolicyState) -> list[Operation]:
    """Return the operations that `user` may do to this row or policy now."""
    found = TIMEOUT_OPERATIONS if isinstance(target, Timeout) else POLICY_OPERATIONS
    return [each for each in found.values() if each.fits(target) and each.is_permitted(user)]
