"""Helpers for the tests of firing: handlers, due rows, the two calls of a worker, and sessions that hold locks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection, connections, transaction
from django.db.models import Model
from django.dispatch import Signal
from django.utils import timezone

from django_delayq import TimeoutPolicy, schedule_timeout
from django_delayq.firing import Report, Work, plan, run, running
from django_delayq.firing.handler import set_checkpoint_hook
from django_delayq.firing.state import firing_state
from django_delayq.models import Timeout
from tests.integration.firing.by_value import Calls, Shops
from tests.testapp.market import Channel, Merchant, Purchase
from tests.testapp.models import Effect, Order

WAIT = 60
"""Seconds after which a test that waits for another thread gives up."""

MODES: dict[str, dict[str, Any]] = {
    "alone": {},
    "batch": {"batch": 20},
    "together": {"together": 20},
    "outside": {"atomic": False},
}
"""The ways to fire, and the options of a policy that is fired so."""
LIMITED_MODES = pytest.mark.parametrize("mode", ["alone", "outside", "batch"])
ATOMIC_OR_NOT = pytest.mark.parametrize("atomic", [True, False], ids=["atomic", "outside"])

Declare = Callable[..., TimeoutPolicy[Any]]
Handler = Callable[[Any, Any], Any]
FIRED, PENDING, UNMET = ("fired", "due"), ("pending", ""), ("skipped", "condition")
UNTRIED = (PENDING, 0)
"""What `tried` returns of a row for which no attempt was counted."""


@pytest.fixture(autouse=True)
def as_in_a_new_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let no test inherit what another one taught this process about a policy.

    And let no firing release a part of its work, however slow the machine is.
    """
    monkeypatch.setattr(running, "WORK_SECONDS", 600.0)
    firing_state.forget()
    yield
    set_checkpoint_hook(None)


@pytest.fixture
def orders() -> list[Order]:
    return [Order.objects.create(status="unpaid") for _ in range(5)]


@pytest.fixture
def shops() -> Shops:
    return Channel.objects.bulk_create(Channel(merchant=Merchant.objects.create(name=name)) for name in "ABC")


@pytest.fixture
def calls() -> Calls:
    return Calls()


@pytest.fixture
def policy(declare: Declare, calls: Calls) -> TimeoutPolicy[Any]:
    """A policy whose handler is called once for all purchases of a shop."""
    return declare(Purchase, calls, name="by", batch=50, batch_by="channel")


def raising(*errors: BaseException | None) -> Handler:
    """Return a handler that raises these in turn, and then the last one again and again. None: it returns."""
    left = list(errors)

    def handler(target: Any, timeouts: Any) -> None:
        if (error := left.pop(0) if len(left) > 1 else left[0]) is not None:
            raise error

    return handler


def write(target: Any, timeouts: Any) -> None:
    """Store that this handler was called, for each timeout."""
    for row in timeouts if isinstance(timeouts, list) else [timeouts]:
        Effect.objects.create(what="done", object_id=row.object_id, timeout_id=row.pk)


def write_and_raise(*errors: BaseException | None) -> Handler:
    """Return a handler that writes, and then raises as `raising`."""
    fail = raising(*errors)

    def handler(target: Any, timeouts: Any) -> None:
        write(target, timeouts)
        fail(target, timeouts)

    return handler


def written() -> list[str]:
    """Return of which objects `write` has written, in the order of their keys."""
    return sorted(Effect.objects.values_list("object_id", flat=True), key=int)


def execute(sql: Any) -> None:
    with connection.cursor() as cursor:
        cursor.execute(sql)


@contextmanager
def session_options(**given: Any) -> Iterator[None]:
    """Connect again with these options of the driver until the block ends; other threads do, too."""
    connection.close()
    options = connection.settings_dict["OPTIONS"]
    connection.settings_dict["OPTIONS"] = {**options, **given}
    yield
    connection.close()
    connection.settings_dict["OPTIONS"] = options


def is_direct() -> bool:
    """Return whether no pooler is between this thread and its session of PostgreSQL."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_backend_pid()")
        return bool(cursor.fetchone()[0] == connection.connection.info.backend_pid)


def generic_plans(part: str) -> int:
    """Return how often this thread has used the generic plan of the prepared statement with `part` in its SQL."""
    with connection.cursor() as cursor:
        like = f"PREPARE delayq%{part}%"
        cursor.execute("SELECT sum(generic_plans) FROM pg_prepared_statements WHERE statement LIKE %s", [like])
        return int(cursor.fetchone()[0] or 0)


def due(obj: Model, policy: str | TimeoutPolicy[Any] = "remind", **options: Any) -> Timeout:
    """Return a timeout of `obj` that is due now."""
    return schedule_timeout(obj, policy, seconds=0, **options)


def fire(*rows: Timeout, deliveries: int = 1) -> Report:
    """Do what a worker does with `rows`: plan, then run each work. Return the reports as one."""
    works, report = plan({row.pk: deliveries for row in rows}, "default")
    done, again, fired = [*report.done], dict(report.again), [*report.fired]
    for work in works:
        found = run(work, "default")
        done += found.done
        again.update(found.again)
        fired += found.fired
    assert sorted([*done, *again]) == sorted({row.pk for row in rows}), "each timeout is reported once"
    return Report(tuple(done), again, tuple(fired))


def work_of(*rows: Timeout, deliveries: int = 1) -> Work:
    """Return the one work that is planned for `rows`."""
    [work], _ = plan({row.pk: deliveries for row in rows}, "default")
    return work


def state(row: Timeout) -> tuple[str, str]:
    """Return the state and cause of `row` in the ledger."""
    row.refresh_from_db()
    return row.state, row.cause


def tried(row: Timeout) -> tuple[tuple[str, str], int]:
    """Return the state and cause of `row` in the ledger, and how many attempts were counted."""
    return state(row), row.attempts


def logged(caplog: pytest.LogCaptureFixture, event: str) -> list[Any]:
    """Return the records of this event."""
    return [record for record in caplog.records if vars(record).get("event") == event]


@contextmanager
def receiving(receiver: Callable[..., Any], *signals: Signal) -> Iterator[None]:
    """Let `receiver` receive these signals."""
    for signal in signals:
        signal.connect(receiver)
    try:
        yield
    finally:
        for signal in signals:
            signal.disconnect(receiver)


def once_at(step: str, act: Callable[[], object]) -> None:
    """Call `act` when a firing comes to this step for the first time."""
    left = [act]

    def look(reached: str) -> None:
        if reached == step and left:
            left.pop()()

    set_checkpoint_hook(look)


def make_due(row: Timeout) -> None:
    """Make `row` due now."""
    Timeout.objects.filter(pk=row.pk).update(run_at=timezone.now())


def die_at(row: Timeout, step: str) -> None:
    """The process of this firing of `row` is gone at `step`."""

    def look(reached: str) -> None:
        if reached == step:
            raise KeyboardInterrupt

    work = work_of(row)
    set_checkpoint_hook(look)
    with pytest.raises(KeyboardInterrupt):
        run(work, "default")
    set_checkpoint_hook(None)


def expire(row: Timeout) -> None:
    assert Timeout.objects.filter(pk=row.pk, state="firing").update(run_at=timezone.now() - timedelta(seconds=1))


@contextmanager
def another_session(act: Callable[[], object]) -> Iterator[None]:
    """Call `act` in a transaction of another thread and connection, which stays open until the block ends."""
    acted, end, errors = threading.Event(), threading.Event(), []

    def session() -> None:
        try:
            with transaction.atomic():
                act()
                acted.set()
                assert end.wait(WAIT)
        except BaseException as error:
            errors.append(error)
        finally:
            acted.set()
            connections.close_all()

    thread = threading.Thread(target=session)
    thread.start()
    try:
        assert acted.wait(WAIT)
        assert not errors, errors
        yield
    finally:
        end.set()
        thread.join(WAIT)
    assert not errors, errors


def locking(obj: Model) -> AbstractContextManager[None]:
    """Lock the row of `obj` in another session."""
    return another_session(lambda: type(obj)._base_manager.select_for_update().get(pk=obj.pk))


def in_another_thread(act: Callable[[], Any]) -> Any:
    """Return what `act` returns in another thread, with a connection of its own."""
    results: list[Any] = []

    def go() -> None:
        try:
            results.append(act())
        finally:
            connections.close_all()

    thread = threading.Thread(target=go)
    thread.start()
    thread.join(WAIT)
    assert results, "the other thread hangs or raised"
    return results[0]


needs_row_locks = pytest.mark.skipif(
    connection.vendor == "sqlite", reason="SQLite has no row locks: a writer holds the whole database"
)
