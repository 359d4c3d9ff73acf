"""Orders with rows in every state, and no memory of what an earlier test stopped."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
from django.test import override_settings
from django.urls import include, path
from django.utils import timezone

from django_delayq import get_policy, schedule_timeout
from django_delayq.ledger import controls
from django_delayq.models import PolicyChange, PolicyControl, Timeout
from django_delayq.operations import Result
from tests.integration.operations.names import REMIND, PagesOf
from tests.support.workers import RunningWorker
from tests.testapp.models import Order

BY = "admin:alice"
urlpatterns = [path("", include("tests.urls")), path("", include("tests.integration.contrib.rest.urls"))]


@pytest.fixture(scope="module")
def admin_and_rest() -> Iterator[None]:
    """Serve both, with sessions that need no table. For a module: the URLs of each test would be compiled again."""
    sessions = "django.contrib.sessions.backends.signed_cookies"
    with override_settings(ROOT_URLCONF=__name__, SESSION_ENGINE=sessions):
        yield


@pytest.fixture(autouse=True)
def as_in_a_new_process(controls_are_read_again: None) -> None:
    """Use the fixture for every test of this folder."""


def pending(order: Order, policy: Any = "remind", **delay: Any) -> Timeout:
    return schedule_timeout(order, policy, **(delay or {"hours": 1}))


def as_if(row: Timeout, state: str, cause: str = "", **values: Any) -> Timeout:
    """`row` as it would be in `state`."""
    settled = None if state in {"pending", "firing"} else timezone.now() - timedelta(minutes=5)
    values = {"state": state, "cause": cause, "settled_at": settled, **values}
    moved = [values[name] for name in ("run_at", "due_at") if name in values]
    if moved:  # it was scheduled before that
        values.setdefault("created_at", min([row.created_at, *moved]))
    Timeout.objects.filter(pk=row.pk).update(slot_taken=1 if state == "pending" else None, **values)
    row.refresh_from_db()
    return row


def dead(order: Order, policy: Any = "remind", **values: Any) -> Timeout:
    values = {"attempts": 3, "reason": "RuntimeError: broken", "run_at": timezone.now(), **values}
    return as_if(pending(order, policy), "dead", "retries", **values)


def said(row: Timeout) -> list[tuple[str, str, str]]:
    """Return the events in the history of `row`: what, by, reason."""
    row.refresh_from_db()
    return [(event["what"], event.get("by", ""), event.get("reason", "")) for event in row.history]


def many(count: int, policy: Any = "remind", **delay: Any) -> list[Timeout]:
    """Pending timeouts of so many new orders."""
    return [pending(Order.objects.create(status="new"), policy, **delay) for _ in range(count)]


def contents() -> list[dict[str, Any]]:
    """Return every column of every row."""
    columns = [field.attname for field in Timeout._meta.concrete_fields]
    return [{name: getattr(row, name) for name in columns} for row in Timeout.objects.order_by("pk")]


def refused(result: Result) -> dict[int, str]:
    """Return why each row was left alone."""
    assert sum(result.refused.values()) == len(result.refusals) == result.unchanged
    return {row_id: str(why) for row_id, why in result.refusals}


@pytest.fixture
def pages_of(monkeypatch: pytest.MonkeyPatch) -> PagesOf:
    """`pages_of(2)` lets operations read and write two rows at a time."""
    return lambda rows: monkeypatch.setattr("django_delayq.sql.statements.CHUNK", rows)


def die(_page: object) -> None:
    """The process ends after the commit of a page."""
    raise KeyboardInterrupt


def state_of(policy: str = REMIND) -> controls.PolicyState:
    return controls.policy_state(get_policy(policy), "default")


def stops() -> set[str]:
    return set(controls.stop_cache.read("default"))


def changes() -> list[tuple[str, str, str]]:
    return list(PolicyChange.objects.order_by("id").values_list("what", "by", "reason"))


def held_for(length: timedelta) -> None:
    """As if the hold had begun earlier."""
    PolicyControl.objects.update(stopped_at=timezone.now() - length)


@contextmanager
def running(count: int = 1, **options: Any) -> Iterator[None]:
    """So many workers, until the block ends."""
    workers = [RunningWorker(**options) for _ in range(count)]
    try:
        yield
    finally:
        for worker in workers:
            worker.stop()
