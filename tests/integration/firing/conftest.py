"""Helpers for the tests of firing: due rows, the two calls of a worker, and a second session that holds locks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection, connections, transaction
from django.db.models import Model
from django.utils import timezone

from django_delayq import TimeoutPolicy, schedule_timeout
from django_delayq.firing import Report, plan, run, running
from django_delayq.firing.handler import set_checkpoint_hook
from django_delayq.firing.state import firing_state
from django_delayq.models import Timeout
from tests.testapp.models import Order

WAIT = 60
"""Seconds after which a test that waits for another thread gives up."""

MODES: dict[str, dict[str, Any]] = {
    "alone": {},
    "batch": {"batch": 20},
    "together": {"together": 20},
    "outside": {"atomic": False},
}
"""The ways to fire, and the options of a policy that is fired so."""

Fire = Callable[..., Report]


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


def state(row: Timeout) -> tuple[str, str]:
    """Return the state and cause of `row` in the ledger."""
    row.refresh_from_db()
    return row.state, row.cause


def make_due(row: Timeout) -> None:
    """Make `row` due now."""
    Timeout.objects.filter(pk=row.pk).update(run_at=timezone.now())


def die_at(row: Timeout, step: str) -> None:
    """The process of this firing of `row` is gone at `step`."""

    def look(reached: str) -> None:
        if reached == step:
            raise KeyboardInterrupt

    [work], _ = plan({row.pk: 1}, "default")
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
