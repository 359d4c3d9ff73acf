"""`manage.py delayq_policies`: list the policies."""

from typing import Any

from django_delayq.delays import signed
from django_delayq.ledger.controls import GUARDS
from django_delayq.management.operating import ReportCommand, guard_of, seconds, table
from django_delayq.monitoring.snapshot import PolicyStatus, policy_statuses

HEAD = (
    *("policy", "delay", "stop", "pending", "due", "dead", "fired 24h", "skipped 24h", "next 24h", "lag p50", "p99"),
    "guard rails",
)


class Command(ReportCommand):
    """Lists policies: delay, stop, counts, lag, guard rails, and how many fall due in the next 24 hours."""

    help = __doc__

    def handle(self, *args: Any, **options: Any) -> None:
        found = policy_statuses()
        self.print(found, table(HEAD, [_row(policy) for policy in found]), options)


def _row(policy: PolicyStatus) -> tuple[object, ...]:
    state = policy.state
    coming = sum(hour.value for hour in policy.hours)
    is_capped = any(hour.is_capped for hour in policy.hours)
    return (
        policy.label, _delay(policy), state.stop if state else "", policy.pending, policy.due, policy.dead,
        policy.fired, policy.skipped, f"{coming}{'+' * is_capped}", seconds(policy.lag_p50), seconds(policy.lag_p99),
        _guards(policy),
    )  # fmt: skip


def _delay(policy: PolicyStatus) -> str:
    """Return the delay in force, with a star if an operator has changed it."""
    if policy.state is None:
        return "not declared"
    if policy.state.delay is None:
        return "by hand" if policy.state.policy.after is None else "computed"
    return f"{signed(policy.state.delay)}{'*' if policy.state.after is not None else ''}"


def _guards(policy: PolicyStatus) -> str:
    """Return the guard rails in force, each with a star if an operator has set it."""
    if (state := policy.state) is None:
        return ""
    texts = {guard: guard_of(state, guard) or "off" * bool(state.set_by(guard)) for guard in GUARDS}
    return ", ".join(f"{guard} {text}{'*' * bool(state.set_by(guard))}" for guard, text in texts.items() if text)
