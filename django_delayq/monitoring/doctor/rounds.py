"""What waits: too long, stopped, under labels that nobody declares, dead, or too old to be armed."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Final

from django_delayq.arming.sync import count_too_old
from django_delayq.clock import database_now
from django_delayq.conf import get_settings
from django_delayq.ledger.controls import policy_states
from django_delayq.ledger.locking import database_of
from django_delayq.models import PolicyChange
from django_delayq.monitoring.doctor.findings import Finding, error, ok, warning
from django_delayq.monitoring.snapshot import PolicyStatus, policy_statuses
from django_delayq.policies import get_policies

LATE: Final = timedelta(minutes=1)
MUCH_TOO_LATE: Final = timedelta(minutes=10)
STOPPED_FOR_LONG: Final = timedelta(days=1)
FORGOTTEN: Final = timedelta(minutes=2)


def waiting(using: str) -> Iterator[Finding]:
    """What waits for too long, for ever, or was given up."""
    policies = policy_statuses(using, hours=False)
    late = list(_late(policies, using))
    yield from late or [ok("overdue", "Nothing that may fire has waited for longer than a minute.")]
    for policy in policies:
        left = (policy.pending, policy.firing, policy.dead)
        if policy.state is None and any(count.value for count in left):
            pending, firing, dead = left
            text = (
                f"{policy.label} is not declared, but has {pending} pending, {firing} firing and {dead} dead timeouts."
            )
            yield warning("unknown_policy", text, "Declare it, name it in aliases= of its successor, or cancel them.")
        if policy.dead.value:
            hint = f"delayq_list --policy {policy.label} --state dead, and then delayq_retry or delayq_cancel."
            yield warning("dead", f"{policy.dead} of {policy.label} are dead.", hint)


def _late(policies: list[PolicyStatus], using: str) -> Iterator[Finding]:
    now = database_now(using)
    for policy in policies:
        if policy.state is None or policy.is_stopped or policy.oldest_due_at is None:
            continue
        waited = now - policy.oldest_due_at
        if waited > LATE:
            text = f"{policy.overdue} of {policy.label} are overdue, the oldest for {_words(waited)}."
            hint = "Too few workers, a slow handler, or an object that somebody keeps locked: see delayq_status."
            yield (error if waited > MUCH_TOO_LATE else warning)("overdue", text, hint)


def stopped(using: str) -> Iterator[Finding]:
    """Policies that operators have paused or held, lest somebody forget."""
    now = database_now(using)
    for state in policy_states(using):
        if state.is_stopped and state.stopped_at is not None:
            since = now - state.stopped_at
            text = f"{state.label} is {state.stop} for {_words(since)}, by {state.by}. {state.reason}".strip()
            hint = f"delayq_resume {state.label}"
            yield warning("stopped", text, hint) if since > STOPPED_FOR_LONG else ok("stopped", text)


def unfinished_changes(using: str) -> Iterator[Finding]:
    """Changes that still move rows although nobody carries them on."""
    left = PolicyChange.objects.using(using).filter(finished_at__isnull=True)
    for change in left.filter(touched_at__lt=database_now(using) - FORGOTTEN):
        text = f"The change {change.what} of {change.policy} has moved {change.moved} rows and stopped."
        yield error("changes", text, f"A worker carries it on; without one, delayq_resume {change.policy} does.")


def too_old_to_arm(using: str) -> Iterator[Finding]:
    """Objects whose deadline had passed long ago when their policy came: nothing arms them by itself."""
    for policy in get_policies():
        if policy.is_automatic and database_of(policy.concrete_model) == using:
            number = count_too_old(policy, using, get_settings().sync_interval * 2)
            if number.value:
                text = f"{number} objects match {policy.label}, but their deadlines passed too long ago to arm them."
                yield warning("too_old", text, f"delayq_sync --policy {policy.label} --backfill --dry-run")


def _words(length: timedelta) -> str:
    seconds = int(length.total_seconds())
    for unit, size in (("days", 86_400), ("hours", 3_600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds // size} {unit}"
    return f"{seconds} seconds"
