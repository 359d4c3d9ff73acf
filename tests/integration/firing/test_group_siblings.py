"""What a handler does to the timeouts and to the conditions of others in its group, as if each were fired alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.db import connection
from django.db.models import Exists, OuterRef, Q

import django_delayq as dq
from django_delayq import operations
from django_delayq.models import Timeout
from tests.integration.firing.conftest import due, fire, grouping, state
from tests.integration.firing.test_groups import FIRED, Declare, raw, transactions_of
from tests.testapp.models import Customer, Effect, Order

pytestmark = pytest.mark.django_db(transaction=True)


def of_customer(obj: Order, name: str) -> Any:
    return dq.pending_timeouts(Order.objects.filter(customer=obj.customer_id), name)


AMONG_SIBLINGS: dict[str, Callable[[Order], object]] = {
    "cancel_timeouts": lambda obj: dq.cancel_timeouts(of_customer(obj, "siblings")),
    "reschedule_timeouts": lambda obj: dq.reschedule_timeouts(of_customer(obj, "siblings"), hours=2),
    "extend_timeouts": lambda obj: dq.extend_timeouts(of_customer(obj, "siblings"), hours=2),
    "schedule_timeouts": lambda obj: dq.schedule_timeouts(
        Order.objects.filter(customer=obj.customer_id).exclude(pk=obj.pk), "siblings", hours=2
    ),
    "operations.cancel": lambda obj: operations.cancel(
        Timeout.objects.filter(policy="testapp.order.siblings", state="pending"), by="handler"
    ),
    "raw SQL": lambda obj: raw(
        "UPDATE django_delayq_timeout SET state = 'cancelled', cause = 'hand', settled_at = created_at, "
        "slot_taken = NULL WHERE state = 'pending' AND object_id <> %s",
        [str(obj.pk)],
    ),
    "the condition on a related row": lambda obj: Customer.objects.filter(pk=obj.customer_id or 0).update(vip=True),
    "the condition on other orders": lambda obj: Order.objects.filter(pk=obj.pk).update(note="told"),
}


@pytest.mark.parametrize("act", AMONG_SIBLINGS.values(), ids=AMONG_SIBLINGS)
def test_what_a_handler_does_to_the_timeouts_of_siblings_reaches_those_in_its_group(
    declare: Declare, act: Callable[[Order], object]
) -> None:
    """All of a group are marked as fired before the first handler: a query for pending ones would miss them."""
    called: list[int] = []

    def handler(obj: Order, timeout: Timeout) -> None:
        called.append(obj.pk)
        act(obj)

    told = Order.objects.filter(customer=OuterRef("customer"), note="told")
    policy = declare(Order, handler, name="siblings", when=Q(customer__vip=False) & ~Exists(told))
    grouping(policy)
    customer = Customer.objects.create()
    orders = [Order.objects.create(customer=customer) for _ in range(3)]
    rows = [due(order, policy) for order in orders]
    fire(*rows)
    assert [state(row)[0] for row in rows].count("fired") == 1
    assert called in ([orders[0].pk], [orders[0].pk] * 2), "the second call is that after the group was rolled back"


@pytest.mark.parametrize(
    "of_any",
    [
        lambda: Effect.objects.all(),
        lambda: Customer.objects.filter(name="x").values("pk").union(Effect.objects.filter(what="told").values("pk")),
    ],
    ids=["all rows", "union"],
)
def test_a_handler_that_makes_the_condition_of_siblings_false_is_the_only_one_that_runs(
    declare: Declare, of_any: Callable[[], Any]
) -> None:
    def handler(obj: Order, timeout: Timeout) -> None:
        Effect.objects.create(what="told", object_id=obj.pk)

    policy = declare(Order, handler, name="siblings", when=Q(~Exists(of_any())))
    grouping(policy)
    rows = [due(Order.objects.create(), policy) for _ in range(3)]
    fire(*rows)
    assert [state(row) for row in rows] == [("fired", "due"), *[("skipped", "condition")] * 2]


def test_a_handler_sees_the_timeouts_of_siblings_as_they_are(declare: Declare) -> None:
    left: list[int] = []

    def handler(obj: Order, timeout: Timeout) -> None:
        left.append(of_customer(obj, "last").count())

    policy = declare(Order, handler, name="last")
    grouping(policy)
    customer = Customer.objects.create()
    fire(*[due(Order.objects.create(customer=customer), policy) for _ in range(3)])
    assert left[-3:] == [2, 1, 0]


@pytest.mark.parametrize(
    "act",
    [
        lambda obj: dq.schedule_timeout(obj, "note_it", minutes=5),
        lambda obj: dq.schedule_timeouts(Order.objects.filter(pk=obj.pk), "note_it", minutes=5),
        lambda obj: dq.cancel_timeout(obj, "cancel_unpaid"),
        lambda obj: dq.before_deadline(obj, "cancel_unpaid"),
        lambda obj: dq.extend_timeout(obj, "cancel_unpaid", minutes=5),
        lambda obj: obj.delete(),
    ],
)
def test_a_handler_that_schedules_and_cancels_for_its_own_object_stays_in_its_group(
    orders: list[Order], declare: Declare, act: Callable[[Order], object]
) -> None:
    declare(Order, name="note_it")
    policy = declare(Order, lambda obj, timeout: act(obj), name="narrow")
    pace = grouping(policy)
    rows = [due(order, policy) for order in orders]
    assert transactions_of(*rows) == 1
    assert {state(row) for row in rows} == {FIRED}
    assert not pace.is_alone


def test_a_failure_that_undid_its_group_is_no_part_of_another_one(orders: list[Order], declare: Declare) -> None:
    """The text of an exception may name a customer, and the second one had nothing to do with the first."""

    def handler(obj: Order, timeout: Timeout) -> None:
        if obj.pk == orders[0].pk:
            raise dq.Snooze(minutes=5, reason="the line of Ada Lovelace is busy")
        if obj.pk == orders[1].pk:
            raise ConnectionError("no answer")

    policy = declare(Order, handler, name="fails_twice", retry=dq.Retry([60]))
    grouping(policy)
    rows = [due(order, policy) for order in orders]
    fire(*rows)
    assert [state(row)[0] for row in rows] == ["pending", "pending", *["fired"] * 3]
    assert "no answer" in rows[1].errors[0]["traceback"]
    assert "Ada" not in rows[1].errors[0]["traceback"]


COMMITS = ["COMMIT", "begin", " START  TRANSACTION", "/* the\nend */ COMMIT", "-- the end\nCOMMIT"]
DDL = ["CREATE TABLE delayq_new (id int)", "truncate table testapp_effect", "ANALYZE TABLE testapp_effect"]
DDL += ["SET autocommit = 1", "set @@session.autocommit = ON", "CHECK TABLE testapp_effect", "FLUSH STATUS"]
DDL += ["RESET QUERY CACHE", "CACHE INDEX testapp_effect IN hot", "LOAD INDEX INTO CACHE testapp_effect"]


@pytest.mark.parametrize("sql", [*COMMITS, *DDL])
@pytest.mark.parametrize("mode", [{}, {"batch": 5}])
def test_a_statement_that_would_commit_before_the_end_of_the_handler_is_refused(
    orders: list[Order], declare: Declare, sql: str, mode: dict[str, Any]
) -> None:
    """The timeouts would be fired for good, although the handler fails after that."""
    if sql in DDL and connection.features.can_rollback_ddl:
        pytest.skip("this database can roll DDL back")

    def handler(*_: Any) -> None:
        Effect.objects.create(what="half")
        raw(sql)
        raise ValueError("the second half")

    policy = declare(Order, handler, name="commits", retry=dq.Retry([60]), **mode)
    rows = [due(order, policy) for order in orders]
    fire(*rows)
    assert {state(row)[0] for row in rows} == {"pending"}
    assert rows[0].errors[0]["error"] == "BrokenTransaction"
    assert "atomic=False" in rows[0].errors[0]["message"]
    assert not Effect.objects.exists()


@pytest.mark.parametrize(
    "sql",
    [
        "SET @password = 'autocommit'",
        "SET STATEMENT max_statement_time = 100 FOR UPDATE testapp_effect SET what = 'password, autocommit'",
    ],
)
def test_setting_something_else_commits_nothing(order: Order, declare: Declare, sql: str) -> None:
    if connection.vendor != "mysql":
        pytest.skip("of MySQL and MariaDB")
    row = due(order, declare(Order, lambda obj, timeout: raw(sql), name="sets"))
    fire(row)
    assert state(row) == FIRED


@pytest.mark.parametrize("sql", ["CREATE TEMPORARY TABLE delayq_new (id int)", "DROP TEMPORARY TABLE delayq_new"])
def test_a_temporary_table_commits_nothing(order: Order, declare: Declare, sql: str) -> None:
    if sql.startswith("DROP") and connection.features.can_rollback_ddl:
        pytest.skip("of MySQL and MariaDB")
    raw("CREATE TEMPORARY TABLE delayq_new (id int)" if sql.startswith("DROP") else "SELECT 1")
    row = due(order, declare(Order, lambda obj, timeout: raw(sql), name="makes_a_table"))
    fire(row)
    assert state(row) == FIRED
    raw("DROP TABLE IF EXISTS delayq_new")
