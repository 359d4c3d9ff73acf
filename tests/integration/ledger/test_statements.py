"""Statements that are compiled once: what they execute, who sees it, and when they are compiled again."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest
from django.db import connection, connections, transaction
from django.db.models import F, Value

from django_delayq import clock, schedule_timeout
from django_delayq.ledger.locking import for_update
from django_delayq.models import Timeout
from django_delayq.sql import statements
from django_delayq.sql.now import DatabaseNow
from django_delayq.sql.statements import compiled, param, params, update

if TYPE_CHECKING:
    from django.db.models import QuerySet
    from django.db.models.sql import UpdateQuery
    from pytest_django import Settings

    from tests.testapp.models import Order

pytestmark = [pytest.mark.dialect, pytest.mark.django_db]
T0 = datetime(2026, 11, 21, 12, tzinfo=UTC)


@pytest.fixture
def row(order: Order, declare: Any) -> Timeout:
    return schedule_timeout(order, declare(type(order), name="wait"), at=T0 + timedelta(days=1), payload={"a": [1]})


@compiled
def by_slot(using: str, count: int) -> QuerySet[Timeout]:
    return Timeout.objects.using(using).filter(slot__in=params("slot", count)).annotate(twice=F("attempts") * 2)


@compiled
def due(using: str) -> QuerySet[Timeout, Any]:
    return Timeout.objects.using(using).filter(run_at__lte=DatabaseNow()).values_list("id")


@compiled
def locked(using: str) -> QuerySet[Timeout]:
    return for_update(Timeout.objects.using(using).filter(pk=param("id")), using)


@compiled
def moved(using: str) -> UpdateQuery:
    rows = Timeout.objects.using(using).filter(pk=param("id"), slot_taken=1)
    return update(rows, due_at=param("due_at"), payload=param("payload"), attempts=F("attempts") + 1)


@compiled
def broken(using: str) -> UpdateQuery:
    return update(Timeout.objects.using(using).filter(pk=param("id")), policy=param("policy"))


@compiled
def constants(using: str, *texts: str) -> QuerySet[Timeout, Any]:
    rows = Timeout.objects.using(using).filter(pk=param("id"), slot_taken=1, final_attempt=False)
    named = {f"text{at}": Value(text) for at, text in enumerate(texts)}
    return rows.annotate(**named).values_list("id", *named)


def test_constants_are_a_part_of_the_sql_unless_they_need_quoting(row: Timeout) -> None:
    texts = ("", "shop.order.remind", "[]", "it's", "50 %", "%s", "\\", '"', "ü", "a\nb")
    statement = constants.statement(connections["default"], texts)
    assert [each for each in statement.constants if isinstance(each, str)] == list(texts[3:])
    assert list(constants.rows("default", *texts, id=row.pk)) == [(row.pk, *texts)]


def test_rows_become_the_instances_that_a_query_returns(row: Timeout) -> None:
    [found] = by_slot.objects("default", 2, slot=["0" * 32, row.slot])
    fresh = Timeout.objects.get()
    values = [field.attname for field in Timeout._meta.concrete_fields]
    assert [getattr(found, name) for name in values] == [getattr(fresh, name) for name in values]
    assert (found._state.adding, found._state.db, found.twice) == (False, "default", 0)


def test_an_update_writes_each_value_as_its_column_stores_it(row: Timeout) -> None:
    assert moved.execute("default", id=row.pk, due_at=T0, payload={"b": None}) == 1
    assert moved.execute("default", id=row.pk + 1, due_at=T0, payload=None) == 0
    row.refresh_from_db()
    assert (row.due_at, row.payload, row.attempts) == (T0, {"b": None}, 1)


def test_a_clock_that_is_set_later_counts_in_a_statement_compiled_before(row: Timeout) -> None:
    def is_due() -> bool:
        return bool(due.rows("default"))

    assert is_due() == (clock.now() >= row.run_at)
    with clock.set_to(row.run_at - timedelta(seconds=1)):
        assert not is_due()
    with clock.set_to(row.run_at + timedelta(seconds=1)):
        assert is_due()
    assert is_due() == (clock.now() >= row.run_at)


def test_a_statement_is_compiled_once_for_each_shape_up_to_a_number_until_settings_change(
    row: Timeout, monkeypatch: pytest.MonkeyPatch, settings: Settings
) -> None:
    def compile_each(counts: range) -> None:
        for count in counts:
            slots = [row.slot, *(f"{number:032x}" for number in range(1, count))]
            assert len(by_slot.rows("default", count, slot=slots)) == 1

    compile_each(range(1, 2))
    with monkeypatch.context() as patched:
        patched.setattr(statements, "Statement", lambda *_: pytest.fail("compiled again"))
        compile_each(range(1, 2))
        with pytest.raises(pytest.fail.Exception, match="compiled again"):
            compile_each(range(7, 8))
    settings.TIME_ZONE = "Asia/Tokyo"
    assert not statements._statements
    monkeypatch.setattr(statements, "MAX_STATEMENTS", 5)
    compile_each(range(1, 20))
    assert 0 < len(statements._statements) <= 5


@pytest.mark.django_db(transaction=True)
def test_a_statement_that_locks_is_refused_outside_a_transaction(row: Timeout) -> None:
    if not connection.features.has_select_for_update:
        pytest.skip("SQLite locks no rows")
    for _ in range(2):  # also the one that is compiled already
        with pytest.raises(transaction.TransactionManagementError):
            locked.rows("default", id=row.pk)
        with transaction.atomic():
            assert len(locked.rows("default", id=row.pk)) == 1


@pytest.mark.django_db(transaction=True)
def test_a_write_that_fails_marks_the_transaction_for_rollback(row: Timeout) -> None:
    with transaction.atomic():
        with pytest.raises(Exception, match="(?i)null"):
            broken.execute("default", id=row.pk, policy=None)
        assert connection.needs_rollback
    assert Timeout.objects.get().policy == row.policy
