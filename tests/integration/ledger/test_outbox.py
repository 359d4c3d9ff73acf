"""Redis learns of a transaction's changes once it has committed, of all of them in one call, and of nothing else."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

import pytest
from django.db import connection, transaction
from django.test import TestCase

from django_delayq import clock
from django_delayq.engine.records import Change
from django_delayq.ledger import outbox
from django_delayq.ledger.outbox import due_ms_of, push, push_rows
from django_delayq.models import Timeout
from django_delayq.redis_clients import get_engine

if TYPE_CHECKING:
    import redis
    from pytest_django import Settings

pytestmark = pytest.mark.dialect

FAR = 4_000_000_000_000
LABEL = "testapp.order.remind"


def entry(id: int) -> Change:
    return Change("default", LABEL, id, FAR, earlier_only=True)


class Calls:
    """What the outbox sends; it reaches the real engine all the same."""

    def __init__(self) -> None:
        self.sent: list[list[int]] = []

    def apply(self, changes: Sequence[Change]) -> None:
        self.sent.append([change.id for change in changes])
        engine = get_engine("default")
        assert engine is not None
        engine.apply(changes)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch, redis_client: redis.Redis) -> Calls:
    spy = Calls()
    monkeypatch.setattr(outbox, "get_engine", lambda using: spy)
    return spy


@contextlib.contextmanager
def rolled_back() -> Iterator[None]:
    """An atomic block whose work is undone at its end."""
    with transaction.atomic():
        yield
        transaction.set_rollback(True)


def push_ids(*ids: int) -> None:
    for id in ids:
        push("default", [entry(id)])


def in_redis() -> set[int]:
    engine = get_engine("default")
    assert engine is not None
    return {id for id, _ in engine.queue("default", 0).peek()}


@pytest.mark.django_db(transaction=True)
def test_a_transaction_makes_one_call_after_its_commit_and_without_one_each_push_does(calls: Calls) -> None:
    with transaction.atomic():
        push_ids(1)
        with transaction.atomic():
            push("default", [entry(2), entry(3)])
        with transaction.atomic(savepoint=False):
            push("default", [Change("default", LABEL, 2, None), entry(4)])
        transaction.on_commit(lambda: push_ids(5))
        assert calls.sent == []
    assert sorted(calls.sent) == [[1, 2, 3, 2, 4], [5]]
    assert in_redis() == {1, 3, 4, 5}, "changes of one id keep their order"
    push_ids(6, 7)
    transaction.set_autocommit(False)  # as in a transaction that the caller manages
    try:
        push_ids(8)
        transaction.commit()
    finally:
        transaction.set_autocommit(True)
    assert calls.sent[2:] == [[6], [7], [8]]


@pytest.mark.django_db(transaction=True)
def test_a_transaction_that_rolls_back_pushes_nothing(calls: Calls) -> None:
    with rolled_back():
        push_ids(1)
    with transaction.atomic():
        push_ids(2)
    with contextlib.suppress(Exception), transaction.atomic():
        push_ids(3)
        connection.close()  # so it is never committed
        raise ValueError
    push_ids(4)
    assert calls.sent == [[2], [4]]


@pytest.mark.django_db(transaction=True)
def test_a_savepoint_that_rolls_back_takes_only_its_own_changes_along(calls: Calls) -> None:
    with transaction.atomic():
        with rolled_back():
            push_ids(1)
            with transaction.atomic():
                push_ids(2)
        push_ids(3)
        with rolled_back():
            push_ids(4)
        with transaction.atomic():
            push_ids(5)
    for id in (10, 20):  # one that was rolled back first blocks no later one
        with transaction.atomic():
            with rolled_back():
                push_ids(id)
            push_ids(id + 1)
    assert calls.sent == [[3, 5], [11], [21]]


@pytest.mark.django_db
def test_in_a_test_case_callbacks_that_are_captured_push_each_block_by_itself(calls: Calls) -> None:
    """Inside TestCase nothing commits; Django's own tool runs the callbacks."""
    push_ids(1)
    assert calls.sent == []
    for id in (2, 3):
        with TestCase.captureOnCommitCallbacks(execute=True) as callbacks:
            push_ids(id)
        assert len(callbacks) == 1
    assert [id for sent in calls.sent for id in sent] == [1, 2, 3]


@pytest.mark.django_db(transaction=True)
def test_a_redis_that_is_down_is_logged_once_and_stops_nobody_and_none_gets_nothing(
    settings: Settings, caplog: pytest.LogCaptureFixture, controls_are_read_again: None
) -> None:
    settings.DELAYQ = {**settings.DELAYQ, "REDIS": "redis://127.0.0.1:1/0"}
    with caplog.at_level(logging.INFO):
        for id in range(1, 20):
            with transaction.atomic():
                push_ids(id)
            push_ids(id)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    settings.DELAYQ = {**settings.DELAYQ, "REDIS": None}
    with transaction.atomic():
        push_ids(1)
        assert connection.run_on_commit == []


def pushed(*, earlier_only: bool = False, **delay: float) -> tuple[datetime, list[Change]]:
    """Return the `run_at` of a row that is due in `delay`, and what is sent to Redis for it."""
    run_at = clock.now() + timedelta(**delay)
    row = Timeout(id=7, queue="post", policy=LABEL, run_at=run_at)
    with pytest.MonkeyPatch.context() as patch:
        sent: list[Change] = []
        patch.setattr(outbox, "push", lambda using, changes: sent.extend(changes))
        push_rows([row], "default", earlier_only=earlier_only)
    return run_at, sent


def test_a_row_has_an_entry_while_it_is_due_within_the_horizon() -> None:
    for earlier_only in (False, True):
        run_at, sent = pushed(minutes=4, earlier_only=earlier_only)
        assert sent == [Change("post", LABEL, 7, due_ms_of(run_at), earlier_only=earlier_only)]
    assert pushed(minutes=6, earlier_only=True)[1] == [], "a new row has none"
    assert pushed(minutes=6)[1] == [Change("post", LABEL, 7, None)], "and one that moved loses it"


def test_a_due_time_is_rounded_up_to_the_ms_and_kept_within_what_redis_can_count() -> None:
    moment = clock.now().replace(microsecond=1)
    assert due_ms_of(moment) == due_ms_of(moment.replace(microsecond=1000))
    assert due_ms_of(moment.replace(year=1960, day=1)) == 0
    assert due_ms_of(moment.replace(year=2300, day=1)) == 2**42 - 1
