"""Counters that workers share: one at a time changes one, and a failed change leaves it as it was."""

from __future__ import annotations

import threading

import pytest
from django.db import connections

from django_delayq.ledger.claiming import meter
from django_delayq.models import PolicyMeter
from tests.settings import DB

pytestmark = pytest.mark.django_db(transaction=True)

LABEL = "testapp.order.remind"


def count_up(times: int) -> None:
    try:
        for _ in range(times):
            with meter(LABEL, "rate", "default") as state:
                assert state is not None
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
    for policy, name in ((LABEL, "rate"), (LABEL, "brake"), ("testapp.order.linger", "rate")):
        with meter(policy, name, "default") as state:
            assert state == {}
            state |= {"of": [policy, name]}
    with meter(LABEL, "rate", "default") as state:
        assert state == {"of": [LABEL, "rate"]}


def test_an_exception_leaves_the_counter_as_it_was() -> None:
    with pytest.raises(ZeroDivisionError), meter(LABEL, "rate", "default") as state:
        assert state is not None
        state["count"] = 1 / 0
    with meter(LABEL, "rate", "default") as state:
        assert state == {}


@pytest.mark.skipif(DB == "sqlite", reason="a transaction of SQLite locks the whole database")
def test_a_caller_that_does_not_wait_gets_nothing_while_another_transaction_has_the_counter() -> None:
    count_up(1)
    found: list[object] = []

    def ask() -> None:
        try:
            with meter(LABEL, "rate", "default", wait=False) as state:
                found.append(state)
        finally:
            connections.close_all()

    with meter(LABEL, "rate", "default"):
        asking = threading.Thread(target=ask)
        asking.start()
        asking.join(30)
    assert found == [None]
