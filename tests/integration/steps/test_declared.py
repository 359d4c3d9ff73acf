"""Declarations of steps and of grace: what is accepted, and what is refused with a hint."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from django_delayq import PolicyError, TimeoutPolicy, Wall
from tests.integration.steps.days import ARMED, DAY, Declare, dunning, note
from tests.testapp.models import Order


def test_a_step_returns_its_function_and_is_named_after_it(declare: Declare) -> None:
    policy = declare(Order, name="collect", after=DAY, **ARMED)

    def remind(obj: Any, timeout: Any) -> None:
        """Remind."""

    assert policy.step(-timedelta(hours=1))(remind) is remind
    assert [(step.name, step.handler, step.atomic) for step in policy.steps] == [("remind", remind, True)]
    assert policy.has_plan


def one_argument(_obj: Any) -> None:
    """Take too little."""


WRONG: list[tuple[dict[str, Any], Any, str]] = [
    ({"offset": 3}, note, "its offset must be a timedelta or span"),
    ({"offset": 1.5}, note, "a fraction of the time such as 0.75"),
    ({"offset": "3 days"}, note, "its offset must be"),
    ({"offset": 3 * DAY}, note, "would never run: the handler of its policy acts at 3 d after its deadline"),
    ({"offset": -DAY, "every": timedelta(0)}, note, "every must be a timedelta of a second or more"),
    ({"offset": -DAY, "every": 7}, note, "every must be"),
    ({"offset": -DAY, "times": 3}, note, "times needs every="),
    ({"offset": -DAY, "every": DAY, "times": 0}, note, "times must be an int from 1"),
    ({"offset": -DAY, "atomic": 1}, note, "atomic must be True or False"),
    ({"offset": -DAY, "name": "no name"}, note, "give name="),
    ({"offset": -DAY, "name": "n" * 51}, note, "at most 50 characters"),
    ({"offset": -DAY, "name": "friendly"}, note, "another step has this name"),
    ({"offset": -DAY}, one_argument, "is called with (obj, timeout), but takes"),
    ({"offset": -DAY}, "no function", "decorates a function"),
]


@pytest.mark.parametrize(("options", "handler", "words"), WRONG, ids=[words for *_, words in WRONG])
def test_a_wrong_step_is_refused(declare: Declare, options: dict[str, Any], handler: Any, words: str) -> None:
    policy = dunning(declare)
    with pytest.raises(PolicyError) as raised:
        policy.step(**{"name": "other", **options})(handler)
    assert words in str(raised.value)
    assert len(policy.steps) == 2


def test_a_step_at_the_deadline_of_a_policy_without_grace_is_refused(declare: Declare) -> None:
    policy = declare(Order, name="collect", after=DAY, **ARMED)
    with pytest.raises(PolicyError, match="acts at its deadline, as it has no grace="):
        policy.step(timedelta(0))(note)


@pytest.mark.parametrize("option", ["batch", "together"])
def test_policies_that_share_transactions_have_no_steps(declare: Declare, option: str) -> None:
    policy = declare(Order, lambda queryset, timeouts: None, name="collect", after=DAY, **ARMED, **{option: 5})
    with pytest.raises(PolicyError, match="steps are called for one object alone"):
        policy.step(-timedelta(hours=1))(note)


def test_a_step_of_a_policy_that_was_used_is_refused(declare: Declare) -> None:
    policy = declare(Order, name="collect", after=DAY, **ARMED)
    assert not policy.has_plan
    with pytest.raises(PolicyError, match="declare it right below"):
        policy.step(-timedelta(hours=1), name="remind")(note)


@pytest.mark.parametrize("grace", [timedelta(0), -DAY, 3, "grace", Wall(days=-1)], ids=str)
def test_grace_is_longer_than_nothing(grace: Any) -> None:
    with pytest.raises(PolicyError, match="grace must be a timedelta or span that is longer than nothing"):
        _declared(grace)


def _declared(grace: Any) -> TimeoutPolicy[Any]:
    from django_delayq import timeout_policy

    return timeout_policy(Order, name="wrong", after=DAY, grace=grace)(note)
