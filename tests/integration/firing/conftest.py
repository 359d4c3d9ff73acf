"""Helpers for the tests of firing: due rows, the two calls of a worker, and sessions that hold locks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
from django.db import connection
from django.db.models import Model
from django.utils import timezone

from django_delayq import TimeoutPolicy, schedule_timeout
from django_delayq.firing import Report, Work, plan, run, running
from django_delayq.firing.handler import set_checkpoint_hook
from django_delayq.firing.state import firing_state
from django_delayq.models import Timeout
from tests.e2e.races import sessions
from tests.testapp.models import Order

MODES: dict[str, dict[str, Any]] = {
    "alone": {},
    "batch": {"batch": 20},
    "together": {"together": 20},
    "outside": {"atomic": False},
}
"""The ways to fire, and the options of a policy that is fired so."""


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


@contextmanager
def session_options(**given: Any) -> Iterator[None]:
    """Connect again with these options of the driver until the block ends; other threads do, too."""
    connection.close()
    options = connection.settings_dict["OPTIONS"]
    connection.settings_dict["OPTIONS"] = {**options, **given}
    yield
    connection.close()
    connection.settings_dict["OPTIONS"] = options


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


def make_due(row: Timeout) -> None:
    """Make `row` due now."""
    Timeout.objects.filter(pk=row.pk).update(run_at=timezone.now())


needs_row_locks, another_session = sessions.needs_row_locks, sessions.transaction_with
"""The second: call a function in a transaction of another connection, which stays open until the block ends."""


def locking(obj: Model) -> AbstractContextManager[None]:
    """Lock the row of `obj` in another session."""
    return another_session(lambda: type(obj)._base_manager.select_for_update().get(pk=obj.pk))


def in_another_thread(act: Callable[[], Any]) -> Any:
    """Return what `act` returns in another thread, with a connection of its own."""
    results: list[Any] = []
    sessions.Session(lambda: results.append(act())).end()
    return results[0]
