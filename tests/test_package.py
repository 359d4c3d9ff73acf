"""The package's front door: every promised name is there, comes late, and hides no module."""

from __future__ import annotations

import pickle
import pkgutil

import pytest

import django_delayq

PROMISED = """
    timeout_policy TimeoutPolicy register_policy get_policy get_policies
    schedule_timeout cancel_timeout before_deadline reschedule_timeout extend_timeout
    pending_timeouts schedule_timeouts cancel_timeouts extend_timeouts reschedule_timeouts sync_timeouts
    get_deadline get_progress Progress explain_timeout Deadline TimeoutRelation
    aschedule_timeout acancel_timeout areschedule_timeout aextend_timeout aget_deadline
    DelayqError PolicyError DeadlinePassed UnknownPolicy TimeoutConflict InvalidDelay InvalidPayload ExtensionLimit
    Snooze Skip GiveUp Retry
    timeout_scheduled timeout_rescheduled timeout_cancelled timeout_fired timeout_skipped timeout_failed timeout_dead
""".split()  # noqa: SIM905 - a table to read


def test_every_promised_name_is_there_and_hides_no_module() -> None:
    assert set(PROMISED) <= set(django_delayq.__all__) <= set(dir(django_delayq))
    assert [name for name in django_delayq.__all__ if getattr(django_delayq, name) is None] == []
    modules = {module.name for module in pkgutil.iter_modules(django_delayq.__path__)}
    assert modules & set(django_delayq.__all__) == set()


def test_an_unknown_name_is_an_attribute_error_that_names_it() -> None:
    misspelled = "schedule_timeot"
    with pytest.raises(AttributeError, match=misspelled):
        getattr(django_delayq, misspelled)


@pytest.mark.parametrize("error", ["DeadlinePassed", "ExtensionLimit", "TimeoutConflict"])
def test_an_error_reaches_another_process_with_its_timeout(error: str) -> None:
    from django_delayq.models import Timeout

    raised = getattr(django_delayq, error)("too late", Timeout(policy="shop.order.cancel"))
    found = pickle.loads(pickle.dumps(raised))
    assert (type(found), str(found), found.timeout.policy) == (type(raised), "too late", "shop.order.cancel")
