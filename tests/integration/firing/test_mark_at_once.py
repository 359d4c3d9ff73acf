"""One statement locks, checks and marks: what other transactions commit after its snapshot still decides."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

import pytest
from django.db import connection, transaction
from django.db.models import BooleanField, Func, Model, Q, Value
from django.test.utils import CaptureQueriesContext

import django_delayq as dq
from django_delayq.firing import Report, Work, run
from django_delayq.ledger.marking import can_mark_at_once
from django_delayq.models import Timeout
from django_delayq.sql.statements import PREPARED_AFTER
from tests.e2e.races.sessions import Session
from tests.integration.firing.conftest import due, fire, state
from tests.integration.firing.handlers import WAIT, Declare, Log, execute
from tests.integration.firing.rows import FIRED, PENDING, UNMET, tried
from tests.support.waiting import wait_until
from tests.testapp.models import Effect, Order

pytestmark = [pytest.mark.dialect, pytest.mark.django_db(transaction=True)]
GATE = 4_711_001


class Gate(Func):
    """True, once no session holds the advisory lock `GATE` exclusively."""

    function = "pg_advisory_xact_lock_shared"
    template = "(%(function)s(%(expressions)s) IS NOT NULL)"
    output_field = BooleanField()


@pytest.fixture(autouse=True)
def only_where_one_statement_does_it() -> None:
    if not can_mark_at_once(dq.get_policy("testapp.order.remind"), "default"):
        pytest.skip("this database marks step by step")


@pytest.fixture
def gated(declare: Declare) -> dq.TimeoutPolicy[Any]:
    """A policy whose statement has its snapshot, has read the object, and waits before it locks it."""

    def handler(obj: Order, timeout: Timeout) -> None:
        Effect.objects.create(what=obj.note or "sent", object_id=obj.pk)

    policy = declare(Order, handler, name="gated", when=Q(status="unpaid") & Q(Gate(Value(GATE))))
    assert can_mark_at_once(policy, "default")
    return policy


def is_waiting(cursor: Any) -> bool:
    cursor.execute("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND objid = %s AND NOT granted", [GATE])
    return bool(cursor.fetchone()[0])


def fire_while(row: Timeout, act: Callable[[], object]) -> Report:
    """Fire `row`, and call `act` between the snapshot of the statement and its locks."""
    reports: list[Report] = []
    work = Work(row.policy, (row.pk,), (row.object_id,))
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_advisory_lock(%s)", [GATE])
        try:
            session = Session(lambda: reports.append(run(work, "default")))
            wait_until(lambda: is_waiting(cursor), "the statement waits at the gate", WAIT)
            act()
        finally:
            cursor.execute("SELECT pg_advisory_unlock(%s)", [GATE])
    session.end()
    return reports[0]


def values_of(obj: Model) -> dict[str, str]:
    """Return the columns of `obj` but the history of a timeout, with their types and time zones."""
    names = [field.attname for field in obj._meta.concrete_fields if field.name != "history"]
    return {name: repr(getattr(obj, name)) for name in names}


def test_the_handler_gets_what_the_orm_reads(declare: Declare) -> None:
    """The statement returns datetimes as text."""
    moments = (datetime(2026, 3, 29, 1, 0, tzinfo=UTC), datetime(1900, 1, 1, microsecond=7, tzinfo=UTC), None)
    handled: dict[int, tuple[dict[str, str], dict[str, str]]] = {}

    def handler(obj: Order, timeout: Timeout) -> None:
        handled[timeout.pk] = values_of(obj), values_of(timeout)

    policy = declare(Order, handler, name="reading", together=20)
    rows = [due(Order.objects.create(created_at=moment, paid_at=moment), policy) for moment in moments]
    assert len(fire(*rows).fired) == len(rows)
    for row in Timeout.objects.filter(pk__in=[row.pk for row in rows]):
        assert handled[row.pk] == (values_of(Order.objects.get(pk=row.object_id)), values_of(row))


def pay(order: Order) -> None:
    """Lock the object without changing it."""
    with dq.before_deadline(order, "gated"):
        pass


MEANWHILE: dict[str, tuple[Callable[[Order], object], tuple[str, str], str]] = {
    "nothing": (lambda order: None, FIRED, "sent"),
    "a change of the object": (lambda order: Order.objects.update(note="changed"), FIRED, "changed"),
    "a cancel": (lambda order: dq.cancel_timeout(order, "gated"), ("cancelled", "hand"), ""),
    "a guard": (pay, ("cancelled", "hand"), ""),
    "a condition that ends": (lambda order: Order.objects.update(status="paid"), UNMET, ""),
    "a deletion of the object": (lambda order: Order.objects.all()._raw_delete("default"), ("skipped", "gone"), ""),
    "a move": (lambda order: dq.reschedule_timeout(order, "gated", hours=1), PENDING, ""),
    "a stopped clock": (lambda order: dq.hold_timeout(order, "gated"), ("held", ""), ""),
}


@pytest.mark.parametrize("what", MEANWHILE)
def test_what_committed_meanwhile_decides(order: Order, gated: dq.TimeoutPolicy[Any], what: str) -> None:
    act, expected, effect = MEANWHILE[what]
    row = due(order, gated)
    report = fire_while(row, lambda: act(order))
    assert tried(row) == (expected, int(expected == FIRED))
    assert report.fired == (row.pk,) * (expected == FIRED)
    assert report.done == (row.pk,) * (expected != PENDING)
    assert list(Effect.objects.values_list("what", flat=True)) == [effect] * bool(effect)


def test_another_firing_that_committed_meanwhile_is_the_only_one(order: Order, declare: Declare) -> None:
    calls: list[int] = []
    when = Q(status="unpaid") & Q(Gate(Value(GATE)))
    policy = declare(Order, lambda obj, timeout: calls.append(timeout.attempts), name="gated_once", when=when)
    row = due(order, policy)
    assert fire_while(row, lambda: fire(row)).fired == ()
    assert (calls, row.attempts, state(row)) == ([1], 0, ("fired", "due"))


# The most frequent statements are prepared, and what could break that fails no firing and no call


@pytest.fixture
def is_prepared() -> Iterator[bool]:
    """Begin and end with a new connection. No pooler may be between this thread and its session."""
    connection.close()
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_backend_pid()")
        is_direct = cursor.fetchone()[0] == connection.connection.info.backend_pid
    yield is_direct and not connection.settings_dict["OPTIONS"].get("server_side_binding")
    connection.close()


def use(count: int = 1) -> None:
    """Schedule, fire, schedule and cancel, which must work at the first attempt."""
    for _ in range(count):
        order = Order.objects.create(status="unpaid")
        row = due(order, "remind")
        assert fire(row).fired == (row.pk,)
        dq.schedule_timeout(order, "remind", hours=1)
        assert dq.cancel_timeout(order, "remind")
    assert set(Timeout.objects.filter(state=Timeout.State.FIRED).values_list("attempts", flat=True)) == {1}


def prepared() -> int:
    with connection.cursor() as cursor:
        cursor.execute("SELECT count(*) FROM pg_prepared_statements WHERE name LIKE 'delayq%%'")
        return int(cursor.fetchone()[0])


def test_in_a_transaction_of_the_caller_nothing_is_prepared(is_prepared: bool) -> None:
    """An error would undo what the caller has written."""
    use(2 * PREPARED_AFTER)
    with transaction.atomic(), CaptureQueriesContext(connection) as captured:
        dq.schedule_timeout(Order.objects.create(), "remind", hours=1)
    assert not any("EXECUTE" in each["sql"] for each in captured)


def test_what_makes_plans_useless_fails_nothing(is_prepared: bool, caplog: Log) -> None:
    """A migration changes a column, and then a pool discards what its client has left."""
    use(2 * PREPARED_AFTER)
    execute("ALTER TABLE testapp_order ALTER COLUMN status TYPE varchar(77)")
    try:
        use(2 * PREPARED_AFTER)
    finally:
        execute("ALTER TABLE testapp_order ALTER COLUMN status TYPE varchar(20)")
    use(2 * PREPARED_AFTER)
    assert bool(prepared()) == is_prepared
    with connection.connection.cursor() as cursor:
        cursor.execute("DEALLOCATE ALL")
    use(2 * PREPARED_AFTER)
    assert prepared() == 0, "one error is enough"
    assert [record.getMessage() for record in caplog.records if record.levelname != "INFO"] == []
