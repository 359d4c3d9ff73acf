"""REPEATABLE READ and stricter: rows committed since a transaction began are seen, or an error is raised.

MySQL and MariaDB show them to locking reads. PostgreSQL raises, and the caller repeats the transaction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import pytest
from django.db import OperationalError, connection, transaction
from django.db.models import Q
from django.utils import timezone

import django_delayq as dq
from django_delayq.models import Timeout
from tests.e2e.races.sessions import needs_row_locks
from tests.integration.firing.conftest import due, fire, in_another_thread, session_options
from tests.integration.firing.handlers import Declare, write
from tests.testapp.models import Effect, Order

pytestmark = [pytest.mark.dialect, pytest.mark.django_db(transaction=True), needs_row_locks]
LEVELS: dict[str, list[Any]] = {
    "postgresql": ["REPEATABLE_READ", "SERIALIZABLE"],
    "mysql": ["repeatable read", None],
    "sqlite": [""],
}


@pytest.fixture(params=LEVELS[connection.vendor], autouse=True)
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    """All connections of this test, in all threads, begin their transactions so."""
    value = request.param
    if connection.vendor == "postgresql":
        from django.db.backends.postgresql.psycopg_any import IsolationLevel

        value = IsolationLevel[value]
    with session_options(isolation_level=value):
        yield str(request.param)


@contextmanager
def an_older_view() -> Iterator[None]:
    """Open a transaction that has read before the block. It ends where the server refuses to continue it."""
    with suppress(_Refused), transaction.atomic():
        assert Order.objects.count() >= 0
        assert Timeout.objects.count() >= 0
        try:
            yield
        except OperationalError as error:
            if getattr(error.__cause__, "sqlstate", "") != "40001":
                raise
            raise _Refused from error


class _Refused(Exception):
    """A serialization failure: everything is undone, and the caller would repeat it all."""


@pytest.fixture
def always(declare: Declare) -> dq.TimeoutPolicy[Any]:
    """Its condition holds also when it has fired, so that only the closed round keeps it from firing again."""
    return declare(Order, write, name="always", when=Q(), since="created_at", after=timedelta(minutes=30))


def fire_all() -> None:
    in_another_thread(lambda: fire(*Timeout.objects.pending()))


def save(order: Order) -> None:
    order.note = "saved"
    order.save()


@pytest.mark.parametrize("act", [save, dq.sync_timeouts])
def test_what_was_armed_and_fired_since_is_not_armed_again(always: Any, act: Callable[[Order], object]) -> None:
    Order.objects.bulk_create([Order(status="new", created_at=timezone.now() - timedelta(minutes=31))])
    order = Order.objects.get()
    if connection.vendor == "postgresql":  # of what it cannot see at all it cannot be warned: see docs/databases.md
        in_another_thread(lambda: dq.sync_timeouts(order))
    with an_older_view():
        in_another_thread(lambda: dq.sync_timeouts(order))
        fire_all()
        act(order)
    assert list(Timeout.objects.values_list("state", flat=True)) == ["fired"]
    assert Effect.objects.count() == 1


def test_a_cancel_or_payment_that_comes_too_late_never_hears_that_it_will_not_happen() -> None:
    order, answers = Order.objects.create(status="new"), []
    due(order)
    with an_older_view():
        fire_all()
        answers.append(dq.cancel_timeout(order, "remind"))
    assert answers == ([] if connection.vendor == "postgresql" else [False])
    due(order)
    with an_older_view():
        fire_all()
        with suppress(dq.DeadlinePassed), dq.before_deadline(order, "remind"):
            pytest.fail("paid")
    with pytest.raises(dq.DeadlinePassed), dq.before_deadline(order, "remind"):
        pass
