"""Counters that workers share: one at a time changes one, and a failed change leaves it as it was."""

from __future__ import annotations

import threading

import pytest
from django.db import connections

from django_delayq.ledger.claiming import meter
from django_delayq.models import PolicyMeter

pytestmark = [pytest.mark.dialect, pytest.mark.django_db(transaction=True)]

LABEL = "testapp.order.remind"


def count_up(times: int) -> None:
    try:
        for _ in range(times):
            with meter(LABEL, "brake", "default") as state:
                state["count"] = state.get("count", 0) + 1
    finally:
        connections.close_all()


def test_no_change_is_lost_when_several_threads_count() -> None:
    """They also create the row at the same time."""
    threads = [threading.Thread(target=count_up, args=(10,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert PolicyMeter.objects.get().state == {"count": 40}


def test_each_name_and_policy_has_a_counter_of_its_own() -> None:
    for policy, name in ((LABEL, "brake"), (LABEL, "other"), ("testapp.order.linger", "brake")):
        with meter(policy, name, "default") as state:
            assert state == {}
            state |= {"of": [policy, name]}
    with meter(LABEL, "brake", "default") as state:
        assert state == {"of": [LABEL, "brake"]}


def test_an_exception_leaves_the_counter_as_it_was() -> None:
    with pytest.raises(ZeroDivisionError), meter(LABEL, "brake", "default") as state:
        state["count"] = 1 / 0
    with meter(LABEL, "brake", "default") as state:
        assert state == {}
