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
from django_delayq.redis_clients import forget_engine, get_engine

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


class Undo(Exception):
    pass


@contextlib.contextmanager
def rolled_back() -> Iterator[None]:
    """An atomic block whose work is undone at its end."""
    with contextlib.suppress(Undo), transaction.atomic():
        yield
        raise Undo


def in_redis() -> set[int]:
    engine = get_engine("default")
    assert engine is not None
    return {id for id, _ in engine.queue("default", 0).peek()}


@pytest.mark.django_db(transaction=True)
def test_a_transaction_makes_one_call_after_its_commit(calls: Calls) -> None:
    with transaction.atomic():
        push("default", [entry(1)])
        with transaction.atomic():
            push("default", [entry(2), entry(3)])
        push("default", [entry(4)])
        assert calls.sent == []
    assert calls.sent == [[1, 2, 3, 4]]
    assert in_redis() == {1, 2, 3, 4}


@pytest.mark.django_db(transaction=True)
def test_outside_a_transaction_it_is_pushed_at_once(calls: Calls) -> None:
    push("default", [entry(1)])
    push("default", [entry(2)])
    assert calls.sent == [[1], [2]]


@pytest.mark.django_db(transaction=True)
def test_changes_of_one_id_keep_their_order(calls: Calls) -> None:
    with transaction.atomic():
        push("default", [entry(1)])
        push("default", [Change("default", LABEL, 1, None)])
        push("default", [entry(2)])
    assert in_redis() == {2}


@pytest.mark.django_db(transaction=True)
def test_a_transaction_that_rolls_back_pushes_nothing(calls: Calls) -> None:
    with rolled_back():
        push("default", [entry(1)])
    with transaction.atomic():
        push("default", [entry(2)])
    assert calls.sent == [[2]]


@pytest.mark.django_db(transaction=True)
def test_a_savepoint_that_rolls_back_takes_only_its_own_changes_along(calls: Calls) -> None:
    with transaction.atomic():
        with rolled_back():
            push("default", [entry(1)])
            with transaction.atomic():
                push("default", [entry(2)])
        push("default", [entry(3)])
        with rolled_back():
            push("default", [entry(4)])
        with transaction.atomic():
            push("default", [entry(5)])
    assert calls.sent == [[3, 5]]


@pytest.mark.django_db(transaction=True)
def test_a_first_push_that_was_rolled_back_blocks_no_later_one(calls: Calls) -> None:
    for id in (10, 20):
        with transaction.atomic():
            with rolled_back():
                push("default", [entry(id)])
            push("default", [entry(id + 1)])
    assert calls.sent == [[11], [21]]


@pytest.mark.django_db(transaction=True)
def test_an_inner_block_without_a_savepoint_belongs_to_the_outer_one(calls: Calls) -> None:
    with transaction.atomic(), transaction.atomic(savepoint=False):
        push("default", [entry(1)])
    assert calls.sent == [[1]]


@pytest.mark.django_db(transaction=True)
def test_a_callback_that_schedules_after_the_commit_pushes_too(calls: Calls) -> None:
    with transaction.atomic():
        transaction.on_commit(lambda: push("default", [entry(2)]))
        push("default", [entry(1)])
    assert sorted(id for sent in calls.sent for id in sent) == [1, 2]


@pytest.mark.django_db(transaction=True)
def test_a_transaction_that_the_caller_manages_himself_raises_nothing_and_pushes_at_once(calls: Calls) -> None:
    transaction.set_autocommit(False)
    try:
        push("default", [entry(1)])
        transaction.commit()
    finally:
        transaction.set_autocommit(True)
    assert calls.sent == [[1]]


@pytest.mark.django_db(transaction=True)
def test_changes_that_nobody_commits_are_forgotten_with_their_connection(calls: Calls) -> None:
    with rolled_back():
        push("default", [entry(1)])
        connection.close()
    push("default", [entry(2)])
    assert calls.sent == [[2]]


class CaptureTests(TestCase):
    """Inside TestCase nothing commits; Django's own tool runs the callbacks."""

    sent: list[list[int]]

    @pytest.fixture(autouse=True)
    def _spy(self, calls: Calls) -> None:
        self.sent = calls.sent

    def test_captured_callbacks_push_each_block_by_itself(self) -> None:
        push("default", [entry(1)])
        for id in (2, 3):
            with self.captureOnCommitCallbacks(execute=True) as callbacks:
                push("default", [entry(id)])
            assert len(callbacks) == 1
        assert [id for sent in self.sent for id in sent] == [1, 2, 3]

    def test_nothing_is_pushed_without_it(self) -> None:
        push("default", [entry(1)])
        assert self.sent == []


@pytest.fixture
def nowhere(settings: Settings) -> Iterator[None]:
    """A Redis that refuses connections."""
    settings.DELAYQ = {**settings.DELAYQ, "REDIS": "redis://127.0.0.1:1/0"}
    yield
    forget_engine()


@pytest.mark.usefixtures("nowhere")
@pytest.mark.django_db(transaction=True)
def test_a_redis_that_is_down_is_logged_once_and_stops_nobody(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        for id in range(1, 20):
            with transaction.atomic():
                push("default", [entry(id)])
            push("default", [entry(id)])
    assert [record.levelname for record in caplog.records] == ["WARNING"]


@pytest.mark.django_db(transaction=True)
def test_without_redis_nothing_is_registered(settings: Settings) -> None:
    settings.DELAYQ = {**settings.DELAYQ, "REDIS": None}
    with transaction.atomic():
        push("default", [entry(1)])
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


def test_a_row_that_is_due_within_the_horizon_gets_an_entry() -> None:
    run_at, sent = pushed(minutes=4)
    assert sent == [Change("post", LABEL, 7, due_ms_of(run_at))]
    run_at, sent = pushed(minutes=4, earlier_only=True)
    assert sent == [Change("post", LABEL, 7, due_ms_of(run_at), earlier_only=True)]


def test_a_new_row_beyond_the_horizon_stays_out_of_redis() -> None:
    assert pushed(minutes=6, earlier_only=True)[1] == []


def test_a_row_that_moved_beyond_the_horizon_loses_its_entry() -> None:
    assert pushed(minutes=6)[1] == [Change("post", LABEL, 7, None)]


def test_a_due_time_is_rounded_up_to_the_ms_and_kept_within_what_redis_can_count() -> None:
    moment = clock.now().replace(microsecond=1)
    assert due_ms_of(moment) == due_ms_of(moment.replace(microsecond=1000))
    assert due_ms_of(moment.replace(year=1960, day=1)) == 0
    assert due_ms_of(moment.replace(year=2300, day=1)) == 2**42 - 1
