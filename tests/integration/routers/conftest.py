"""The application reads from a replica, which holds what `replicate` copied last and accepts no write."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.contrib.auth.models import Permission
from django.contrib.contenttypes.models import ContentType
from django.db import connections
from django.utils import timezone
from pytest_django import Settings

from django_delayq.models import Timeout
from tests.routers import is_called_by_library
from tests.settings import ROUTER
from tests.testapp.models import Order

# Their databases are there with DELAYQ_TEST_ROUTER=replica, as in the stage `routers` of tools/suite.py.
collect_ignore_glob = [] if ROUTER == "replica" else ["test_*.py"]


@pytest.fixture
def reads_replica(settings: Settings) -> None:
    settings.DATABASE_ROUTERS = ["tests.routers.ReadsReplica"]


@pytest.fixture
def replicate(reads_replica: None, django_db_setup: None, transactional_db: None) -> Iterator[Callable[[], None]]:
    """Copy orders and timeouts to the replica. Nothing else writes to it, and the library does not read from it."""
    wrappers = connections["replica"].execute_wrappers

    def copy() -> None:
        wrappers.remove(refuse)
        Permission.objects.using("replica").all()._raw_delete("replica")  # they refer to content types
        models: tuple[Any, ...] = (ContentType, Order, Timeout)
        for model in models:
            model._base_manager.using("replica").all()._raw_delete("replica")
            model._base_manager.using("replica").bulk_create(list(model._base_manager.using("default")))
        ContentType.objects.clear_cache()
        wrappers.append(refuse)

    wrappers.append(refuse)
    yield copy
    wrappers.remove(refuse)


def refuse(execute: Callable[..., Any], sql: str, *rest: Any) -> Any:
    if is_called_by_library():
        raise AssertionError(f"The library uses the replica: {sql}")
    if not sql.startswith("SELECT") or "FOR UPDATE" in sql:
        raise AssertionError(f"cannot execute {sql} in a read-only transaction")
    return execute(sql, *rest)


@pytest.fixture
def order(replicate: Callable[[], None]) -> Order:
    """Return an unpaid order with a pending timeout, both replicated, as the application reads them."""
    written = Order.objects.create(created_at=timezone.now(), note="first")
    replicate()
    read = Order.objects.get(pk=written.pk)
    assert read._state.db == "replica"
    return read
