"""A lock on the table of the ledger, as a migration holds it: doctor and status report it, and do not wait."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from django.core.checks import ERROR
from django.core.management import CommandError, call_command
from django.db import connection, connections, transaction

from django_delayq.ledger.db_connections import LedgerLocked
from django_delayq.models import Timeout
from django_delayq.monitoring import doctor
from django_delayq.monitoring.snapshot import snapshot

pytestmark = [
    pytest.mark.slow,
    pytest.mark.dialect,
    pytest.mark.django_db(transaction=True),
    pytest.mark.usefixtures("without_redis"),
    pytest.mark.skipif(connection.vendor == "sqlite", reason="SQLite locks no tables"),
]


@pytest.fixture
def locked() -> Iterator[None]:
    """Another connection holds the lock."""
    is_locked, may_end = threading.Event(), threading.Event()

    def lock() -> None:
        table = connection.ops.quote_name(Timeout._meta.db_table)
        is_mysql = connection.vendor == "mysql"
        with transaction.atomic(), connections["default"].cursor() as cursor:
            cursor.execute(f"LOCK TABLES {table} WRITE" if is_mysql else f"LOCK TABLE {table} IN ACCESS EXCLUSIVE MODE")
            is_locked.set()
            may_end.wait(120)
        connections["default"].close()

    thread = threading.Thread(target=lock)
    thread.start()
    assert is_locked.wait(60)
    yield
    may_end.set()
    thread.join()


@pytest.mark.usefixtures("locked")
def test_doctor_and_status_report_it_and_a_transaction_of_the_caller_keeps_its_own_limits() -> None:
    """A page of the project may show a snapshot, and then wait for locks of its own."""
    found = [each.id for each in doctor.examine(quick=True) if each.level >= ERROR]
    assert {*found} - {"workers"} == {"ledger.locked"}
    with pytest.raises(CommandError, match="locked a table"):
        call_command("delayq_status")
    with pytest.raises(LedgerLocked):
        snapshot()
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute("SELECT @@lock_wait_timeout" if connection.vendor == "mysql" else "SHOW lock_timeout")
        assert cursor.fetchone() not in [(2,), ("2s",)]
