"""Business timeouts for Django: if X has not happened by the deadline, do Y, once, on time.

All public names except the model are imported from here. They are resolved on first use, so that
`import django_delayq` needs neither Django's settings nor its app registry.
"""

from __future__ import annotations

import importlib.metadata
from typing import TYPE_CHECKING

# The build computes it from the commit. A copy that was not installed has none.
__version__ = next((found.version for found in importlib.metadata.distributions(name="django-delayq")), "0.0")

if TYPE_CHECKING:
    from django_delayq.arming.holding import Progress as Progress
    from django_delayq.arming.receivers import ArmingManager as ArmingManager
    from django_delayq.arming.receivers import ArmingQuerySet as ArmingQuerySet
    from django_delayq.arming.sync import sync_timeouts as sync_timeouts
    from django_delayq.exceptions import DelayqError as DelayqError
    from django_delayq.exceptions import InvalidDelay as InvalidDelay
    from django_delayq.exceptions import InvalidPayload as InvalidPayload
    from django_delayq.exceptions import PolicyError as PolicyError
    from django_delayq.exceptions import TimeLimitExceeded as TimeLimitExceeded
    from django_delayq.exceptions import UnknownPolicy as UnknownPolicy
    from django_delayq.ledger.relations import TimeoutRelation as TimeoutRelation
    from django_delayq.policy.declaring import register_policy as register_policy
    from django_delayq.policy.declaring import timeout_policy as timeout_policy
    from django_delayq.policy.options import Brake as Brake
    from django_delayq.policy.options import Late as Late
    from django_delayq.policy.options import Limits as Limits
    from django_delayq.policy.options import Rate as Rate
    from django_delayq.policy.options import Retry as Retry
    from django_delayq.policy.outcomes import Fired as Fired
    from django_delayq.policy.outcomes import GiveUp as GiveUp
    from django_delayq.policy.outcomes import Skip as Skip
    from django_delayq.policy.outcomes import Snooze as Snooze
    from django_delayq.policy.policies import TimeoutPolicy as TimeoutPolicy
    from django_delayq.policy.policies import get_policies as get_policies
    from django_delayq.policy.policies import get_policy as get_policy
    from django_delayq.scheduling.bulk import cancel_timeouts as cancel_timeouts
    from django_delayq.scheduling.bulk import extend_timeouts as extend_timeouts
    from django_delayq.scheduling.bulk import reschedule_timeouts as reschedule_timeouts
    from django_delayq.scheduling.bulk import schedule_timeouts as schedule_timeouts
    from django_delayq.scheduling.by_hand import ahold_timeout as ahold_timeout
    from django_delayq.scheduling.by_hand import aresume_timeout as aresume_timeout
    from django_delayq.scheduling.by_hand import hold_timeout as hold_timeout
    from django_delayq.scheduling.by_hand import resume_timeout as resume_timeout
    from django_delayq.scheduling.errors import DeadlinePassed as DeadlinePassed
    from django_delayq.scheduling.errors import DeadlineUndecided as DeadlineUndecided
    from django_delayq.scheduling.errors import ExtensionLimit as ExtensionLimit
    from django_delayq.scheduling.errors import NotWaiting as NotWaiting
    from django_delayq.scheduling.errors import TimeoutConflict as TimeoutConflict
    from django_delayq.scheduling.guards import before_deadline as before_deadline
    from django_delayq.scheduling.queries import Deadline as Deadline
    from django_delayq.scheduling.queries import aget_deadline as aget_deadline
    from django_delayq.scheduling.queries import get_deadline as get_deadline
    from django_delayq.scheduling.queries import get_progress as get_progress
    from django_delayq.scheduling.queries import pending_timeouts as pending_timeouts
    from django_delayq.scheduling.single import acancel_timeout as acancel_timeout
    from django_delayq.scheduling.single import aextend_timeout as aextend_timeout
    from django_delayq.scheduling.single import areschedule_timeout as areschedule_timeout
    from django_delayq.scheduling.single import aschedule_timeout as aschedule_timeout
    from django_delayq.scheduling.single import cancel_timeout as cancel_timeout
    from django_delayq.scheduling.single import extend_timeout as extend_timeout
    from django_delayq.scheduling.single import reschedule_timeout as reschedule_timeout
    from django_delayq.scheduling.single import schedule_timeout as schedule_timeout
    from django_delayq.scheduling.story import Story as Story
    from django_delayq.scheduling.story import explain_timeout as explain_timeout
    from django_delayq.signals import policy_paused as policy_paused
    from django_delayq.signals import timeout_cancelled as timeout_cancelled
    from django_delayq.signals import timeout_dead as timeout_dead
    from django_delayq.signals import timeout_failed as timeout_failed
    from django_delayq.signals import timeout_fired as timeout_fired
    from django_delayq.signals import timeout_held as timeout_held
    from django_delayq.signals import timeout_rescheduled as timeout_rescheduled
    from django_delayq.signals import timeout_resumed as timeout_resumed
    from django_delayq.signals import timeout_scheduled as timeout_scheduled
    from django_delayq.signals import timeout_skipped as timeout_skipped
    from django_delayq.times import clock as clock
    from django_delayq.times.calendars import WorkingHours as WorkingHours
    from django_delayq.times.spans import Wall as Wall
    from django_delayq.times.spans import Working as Working

_NAMES = {
    "exceptions": "DelayqError InvalidDelay InvalidPayload PolicyError TimeLimitExceeded UnknownPolicy",
    "scheduling.guards": "before_deadline",
    "policy.outcomes": "Fired GiveUp Skip Snooze",
    "policy.options": "Brake Late Limits Rate Retry",
    "policy.policies": "TimeoutPolicy get_policies get_policy",
    "policy.declaring": "register_policy timeout_policy",
    "times.clock": "clock",
    "times.calendars": "WorkingHours",
    "times.spans": "Wall Working",
    "ledger.relations": "TimeoutRelation",
    "scheduling.single": (
        "acancel_timeout aextend_timeout areschedule_timeout aschedule_timeout "
        "cancel_timeout extend_timeout reschedule_timeout schedule_timeout"
    ),
    "scheduling.bulk": "cancel_timeouts extend_timeouts reschedule_timeouts schedule_timeouts",
    "scheduling.errors": "DeadlinePassed DeadlineUndecided ExtensionLimit NotWaiting TimeoutConflict",
    "scheduling.by_hand": "ahold_timeout aresume_timeout hold_timeout resume_timeout",
    "scheduling.queries": "Deadline aget_deadline get_deadline get_progress pending_timeouts",
    "signals": (
        "policy_paused timeout_cancelled timeout_dead timeout_failed timeout_fired timeout_held timeout_rescheduled "
        "timeout_resumed timeout_scheduled timeout_skipped"
    ),
    "scheduling.story": "Story explain_timeout",
    "arming.holding": "Progress",
    "arming.receivers": "ArmingManager ArmingQuerySet",
    "arming.sync": "sync_timeouts",
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = sorted(_HOMES)  # noqa: PLE0605 - computed once from the table above, so that the two cannot differ


if not TYPE_CHECKING:  # to a type checker, a module with __getattr__ has every name there is

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module = importlib.import_module(f"{__name__}.{_HOMES[name]}")
        return globals().setdefault(name, module if module.__name__.endswith(f".{name}") else getattr(module, name))


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
