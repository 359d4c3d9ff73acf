"""`together=n`: several timeouts in one transaction, one call for each; one that raises does not affect the others."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from django.db import connection, transaction
from django.db.models import Q
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

import django_delayq as dq
from django_delayq.firing import plan, run, running
from django_delayq.firing.handler import set_checkpoint_hook
from django_delayq.ledger import outbox
from django_delayq.ledger.marking import can_mark_at_once
from django_delayq.models import Timeout
from tests.integration.firing.conftest import due, fire, locking, needs_row_locks, state
from tests.testapp.models import Effect, ExpressOrder, Order

if TYPE_CHECKING:
    import redis

pytestmark = [pytest.mark.dialect, pytest.mark.django_db(transaction=True)]
Declare = Callable[..., dq.TimeoutPolicy[Any]]
FIRED = ("fired", "due")


def cancel(order: Order, timeout: Timeout) -> None:
    order.status = "cancelled"
    order.save()


def transactions_of(*rows: Timeout) -> int:
    """Fire `rows`; return in how many transactions."""
    steps: list[str] = []
    set_checkpoint_hook(steps.append)
    fire(*rows)
    return steps.count("begun")


def test_together_they_take_one_lock_one_mark_and_one_commit(orders: list[Order], declare: Declare) -> None:
    policy = declare(Order, cancel, name="shared", when=Q(status="unpaid"), together=20)
    rows = [due(order, policy) for order in orders]
    [work], _ = plan({row.pk: 1 for row in rows}, "default")
    with CaptureQueriesContext(connection) as queries:
        assert run(work, "default").fired == tuple(row.pk for row in rows)
    # MariaDB marks without waiting for a gap that others hold: SET STATEMENT ... FOR UPDATE ...
    words = [re.sub(r"^SET STATEMENT .*? FOR (?=UPDATE)", "", query["sql"]) for query in queries.captured_queries]
    ours = [sql for sql in words if sql.startswith(("SELECT", "UPDATE", "WITH")) and "id = -1" not in sql]
    marked = next(number for number, sql in enumerate(ours) if "'fired'" in sql)
    at_once = can_mark_at_once(dq.get_policy(work.policy), "default")
    assert [sql.split()[0] for sql in ours[: marked + 1]] == (["WITH"] if at_once else ["SELECT", "SELECT", "UPDATE"])
    assert sum("'fired'" in sql and sql.startswith(("UPDATE", "WITH")) for sql in words) == 1
    assert sum(sql == "COMMIT" for sql in words) == 1
    assert not any("SAVEPOINT" in sql and "RELEASE" not in sql for sql in words[:6])
    assert {state(row) for row in rows} == {FIRED}
    assert set(Order.objects.values_list("status", flat=True)) == {"cancelled"}


def test_handlers_run_in_due_order(orders: list[Order], declare: Declare) -> None:
    ran: list[int] = []
    policy = declare(Order, lambda obj, timeout: ran.append(obj.pk), name="ordered", together=20)
    rows = [due(order, policy) for order in reversed(orders)]
    fire(*rows)
    assert ran == [order.pk for order in reversed(orders)]


@pytest.mark.parametrize(
    "error", [ValueError("no"), dq.Skip("no"), dq.Snooze(minutes=5), dq.GiveUp("no"), SystemExit()]
)
def test_one_that_raises_is_alone_in_its_failure(orders: list[Order], declare: Declare, error: BaseException) -> None:
    def handler(obj: Order, timeout: Timeout) -> None:
        Effect.objects.create(what="done", object_id=obj.pk)
        if obj.pk == orders[2].pk:
            raise error

    policy = declare(Order, handler, name="one_raises", retry=dq.Retry([60]), together=20)
    rows = [due(order, policy) for order in orders]
    fire(*rows)
    bad = rows.pop(2)
    assert {state(row) for row in rows} == {FIRED}
    assert {row.attempts for row in rows} == {1}
    assert state(bad)[0] == {"Skip": "skipped", "GiveUp": "dead"}.get(type(error).__name__, "pending")
    assert sorted(Effect.objects.values_list("object_id", flat=True)) == sorted(row.object_id for row in rows)


def test_what_was_undone_with_a_transaction_does_not_happen_twice_on_commit(
    orders: list[Order], declare: Declare
) -> None:
    told: list[int] = []
    called: list[int] = []

    def handler(obj: Order, timeout: Timeout) -> None:
        transaction.on_commit(lambda: called.append(obj.pk))
        if obj.pk == orders[-1].pk:
            raise ValueError

    def hear(timeout: Timeout, **_: Any) -> None:
        told.append(int(timeout.object_id))

    policy = declare(Order, handler, name="stores", retry=dq.Retry([60]), together=20)
    rows = [due(order, policy) for order in orders]
    dq.timeout_fired.connect(hear, sender=Order)
    try:
        fire(*rows)
    finally:
        dq.timeout_fired.disconnect(hear, sender=Order)
    expected = [order.pk for order in orders[:-1]]
    assert (called, told) == (expected, expected)


def test_one_that_raises_when_all_commit_is_found(orders: list[Order], declare: Declare) -> None:
    if connection.vendor == "mysql":
        pytest.skip("InnoDB checks foreign keys at once")

    def handler(obj: Order, timeout: Timeout) -> None:
        obj.customer_id = 987654 if obj.pk == orders[1].pk else None
        obj.save()

    policy = declare(Order, handler, name="at_commit", retry=dq.Retry([60]), together=20)
    rows = [due(order, policy) for order in orders]
    fire(*rows)
    assert [state(row)[0] for row in rows] == ["fired", "pending", "fired", "fired", "fired"]


def test_a_commit_that_failed_takes_its_changes_for_redis_along(
    orders: list[Order], declare: Declare, monkeypatch: pytest.MonkeyPatch, redis_client: redis.Redis
) -> None:
    """A cancel that was rolled back would remove the entry of a pending timeout, which would then fire late."""
    if connection.vendor == "mysql":
        pytest.skip("InnoDB checks foreign keys at once")
    waits, also = (dq.schedule_timeout(order, "remind", seconds=30) for order in orders[3:])
    sent: list[int] = []
    monkeypatch.setattr(outbox, "_send", lambda changes, using: sent.extend(change.id for change in changes))

    def handler(obj: Order, timeout: Timeout) -> None:
        if obj.pk == orders[0].pk:
            dq.cancel_timeout(orders[3], "remind")
            obj.customer_id = 987654
            obj.save()
        else:
            dq.cancel_timeout(orders[4], "remind")

    policy = declare(Order, handler, name="at_commit", retry=dq.Retry([60]))
    works = [plan({due(order, policy).pk: 1}, "default")[0][0] for order in orders[:2]]
    failed = run(works[0], "default")  # a thread keeps a report until it has the next one
    run(works[1], "default")
    assert failed.errors
    assert (state(waits)[0], state(also)[0]) == ("pending", "cancelled")
    assert also.pk in sent
    assert waits.pk not in sent


def test_a_transaction_broken_by_one_does_not_take_the_others_along(orders: list[Order], declare: Declare) -> None:
    def handler(obj: Order, timeout: Timeout) -> None:
        obj.note = "mine"
        obj.save()
        if obj.pk == orders[0].pk:
            transaction.set_rollback(True)

    policy = declare(Order, handler, name="breaks", retry=dq.Retry([60]), together=20)
    rows = [due(order, policy) for order in orders]
    fire(*rows)
    assert [state(row)[0] for row in rows] == ["pending", *["fired"] * 4]
    assert rows[0].errors[0]["error"] == "BrokenTransaction"
    assert Order.objects.filter(note="mine").count() == 4


def test_saves_of_handlers_arm_and_cancel_other_policies_in_the_transaction(declare: Declare) -> None:
    def handler(obj: Order, timeout: Timeout) -> None:
        obj.status = "done"
        obj.paid_at = timezone.now()
        obj.save()

    declare(Order, name="armed", when=Q(status="done"), since="paid_at", after=timedelta(days=1))
    policy = declare(Order, handler, name="arms", together=20)
    orders = [Order.objects.create(created_at=timezone.now()) for _ in range(4)]
    rows = [due(order, policy) for order in orders]
    assert transactions_of(*rows) == 1
    assert {state(row) for row in rows} == {FIRED}
    assert Timeout.objects.pending().of_labels(["testapp.order.armed"]).count() == 4
    assert Timeout.objects.filter(state="cancelled", policy="testapp.order.cancel_unpaid").count() == 4


def test_children_of_two_tables_share_a_transaction(declare: Declare) -> None:
    def handler(obj: ExpressOrder, timeout: Timeout) -> None:
        obj.status, obj.courier = "gone", "fast"
        obj.save()

    policy = declare(ExpressOrder, handler, name="narrow_child", together=20)
    rows = [due(ExpressOrder.objects.create(), policy) for _ in range(3)]
    assert transactions_of(*rows) == 1
    assert {state(row) for row in rows} == {FIRED}
    assert ExpressOrder.objects.filter(status="gone", courier="fast").count() == 3


def test_no_more_share_a_transaction_than_declared(orders: list[Order], declare: Declare) -> None:
    policy = declare(Order, name="shared", together=2)
    assert transactions_of(*[due(order, policy) for order in orders]) == 3


def test_one_object_is_never_twice_in_a_transaction(order: Order, declare: Declare) -> None:
    policy = declare(Order, name="keys", together=20)
    rows = [due(order, policy, key=key) for key in "abc"]
    assert transactions_of(*rows) == 3
    assert {state(row) for row in rows} == {FIRED}


def test_async_handlers_share_a_transaction(orders: list[Order], declare: Declare) -> None:
    async def handler(obj: Order, timeout: Timeout) -> None:
        await Effect.objects.acreate(what="done", object_id=obj.pk)

    policy = declare(Order, handler, name="later", together=20)
    rows = [due(order, policy) for order in orders]
    assert transactions_of(*rows) == 1
    assert Effect.objects.count() == len(orders)


@needs_row_locks
def test_a_locked_object_keeps_no_other_from_firing(orders: list[Order], declare: Declare) -> None:
    policy = declare(Order, name="partly", together=20)
    rows = [due(order, policy) for order in orders]
    with locking(orders[0]):
        report = fire(*rows)
    assert (list(report.again), set(report.fired)) == ([rows[0].pk], {row.pk for row in rows[1:]})


@pytest.mark.parametrize("option", ["batch", "together"])
def test_what_had_no_turn_in_time_after_one_has_raised_is_released(
    declare: Declare, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    monkeypatch.setattr(running, "WORK_SECONDS", 0.0)
    calls: list[int] = []

    def handler(*_: Any) -> None:
        calls.append(1)
        if len(calls) == 1:
            raise ValueError

    policy = declare(Order, handler, name="raises_once", **{option: 10})
    rows = [due(Order.objects.create(), policy) for _ in range(6)]
    [work], _ = plan({row.pk: 1 for row in rows}, "default")
    report = run(work, "default")
    assert report.fired == (rows[0].pk,)
    assert set(report.untried) == set(report.again) == {row.pk for row in rows[1:]}
    assert all(at <= report.now for at in report.again.values() if report.now)


def test_a_failure_that_undid_others_is_not_part_of_another_one(orders: list[Order], declare: Declare) -> None:
    """The text of an exception may name a customer, and the second one had nothing to do with the first."""

    def handler(obj: Order, timeout: Timeout) -> None:
        if obj.pk == orders[0].pk:
            raise dq.Snooze(minutes=5, reason="the line of Ada Lovelace is busy")
        if obj.pk == orders[1].pk:
            raise ConnectionError("no answer")

    policy = declare(Order, handler, name="fails_twice", retry=dq.Retry([60]), together=20)
    rows = [due(order, policy) for order in orders]
    fire(*rows)
    assert [state(row)[0] for row in rows] == ["pending", "pending", *["fired"] * 3]
    assert "no answer" in rows[1].errors[0]["traceback"]
    assert "Ada" not in rows[1].errors[0]["traceback"]
