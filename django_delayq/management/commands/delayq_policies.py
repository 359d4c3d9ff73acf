"""`manage.py delayq_policies`: list the policies."""

from typing import Any

from django_delayq.ledger.controls import PolicyState
from django_delayq.ledger.search import NOTHING
from django_delayq.management.operating import ReportCommand
from django_delayq.management.output import Paint, Painted, guards_of, rate_text, seconds
from django_delayq.monitoring.snapshot import PolicyStatus, policy_statuses
from django_delayq.times.clock import duration_text
from django_delayq.times.lengths import length_text

HEAD = (
    *("policy", "delay", "stop", "pending", "due", "failing", "dead", "fired 24h", "skipped 24h", "next 24h"),
    *("lag p50", "p99", "guard rails"),
)
OPTIONAL = ("lag p50", "skipped 24h", "fired 24h")


class Command(ReportCommand):
    """Lists policies: delay, stop, counts, lag, guard rails, and how many fall due in the next 24 hours.

    Examples:
      manage.py delayq_policies
      manage.py delayq_policies --json
    """

    def handle(self, *args: Any, **options: Any) -> None:
        found = policy_statuses()
        self.print(found, self.table(HEAD, [row(each, self.style.WARNING) for each in found], *OPTIONAL), options)


def row(policy: PolicyStatus, warn: Paint) -> tuple[object, ...]:
    """Return what the table has of a policy."""
    state = policy.state
    delay, stop, guards = ("not declared", "", "") if state is None else (_delay(state), state.stop, _guards(state))
    failing, dead = (Painted(each, warn if each.value else str) for each in (policy.failing, policy.dead))
    return (
        policy.label, Painted(delay, str if state else warn), Painted(stop, warn),
        policy.pending, policy.due, failing, dead,
        policy.fired, policy.skipped, sum(policy.hours, NOTHING), seconds(policy.lag_p50), seconds(policy.lag_p99),
        guards,
    )  # fmt: skip


def _delay(state: PolicyState) -> str:
    """Return the delay in force, with a star if an operator has changed it."""
    if state.length is None:
        return "by hand" if state.policy.after is None else "computed"
    return f"{length_text(state.length)}{'*' if state.after is not None else ''}"


def _guards(state: PolicyState) -> str:
    """Return the guard rails in force, each with a star if an operator has set it, and the declared limits."""
    guards = guards_of(state).items()
    found = [f"{guard} {text}{'*' if by else ''}" for guard, (text, by) in guards if by or text != "off"]
    if (limits := state.policy.limits) is not None:
        found += [f"run {duration_text(limits.run)}"] if limits.run else []
        found += [f"rate {rate_text(limits.rate)}"] if limits.rate else []
        found += [f"snoozes {limits.snoozes}"] if limits.snoozes is not None else []
        found += [f"total {length_text(limits.total)}"] if limits.total is not None else []
    if (confirmation := state.policy.confirmation) is not None:
        found.append(f"confirm {duration_text(confirmation.timeout)}")
    return ", ".join(found)
