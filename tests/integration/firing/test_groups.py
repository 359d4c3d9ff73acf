"""Several timeouts of one policy in one transaction, and what must not leak from one member to another."""

from __future__ import annotations

import re
import time
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
from django_delayq.ledger.settling import can_mark_at_once
from django_delayq.models import Timeout
from tests.integration.firing.conftest import due, fire, grouping, state
from tests.testapp.models import Effect, ExpressOrder, Order

if TYPE_CHECKING:
    import redis

pytestmark = pytest.mark.django_db(transaction=True)
Declare = Callable[..., dq.TimeoutPolicy[Any]]
FIRED = ("fired", "due")


def transactions_of(*rows: Timeout) -> int:
    """Fire `rows`; return in how many transactions."""
    steps: list[str] = []
    set_checkpoint_hook(steps.append)
    fire(*rows)
    return steps.count("begun")


def test_a_group_takes_one_lock_one_mark_and_one_commit(orders: list[Order]) -> None:
    grouping(dq.get_policy("testapp.order.cancel_unpaid"))
    rows = [due(order, "cancel_unpaid") for order in orders]
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


def test_handlers_of_a_group_run_in_due_order(orders: list[Order], declare: Declare) -> None:
    ran: list[int] = []
    policy = declare(Order, lambda obj, timeout: ran.append(obj.pk), name="ordered")
    grouping(policy)
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

    policy = declare(Order, handler, name="one_raises", retry=dq.Retry([60]))
    grouping(policy)
    rows = [due(order, policy) for order in orders]
    fire(*rows)
    bad = rows.pop(2)
    assert {state(row) for row in rows} == {FIRED}
    assert {row.attempts for row in rows} == {1}
    assert state(bad)[0] == {"Skip": "skipped", "GiveUp": "dead"}.get(type(error).__name__, "pending")
    assert sorted(Effect.objects.values_list("object_id", flat=True)) == sorted(row.object_id for row in rows)


def test_what_an_undone_group_had_in_store_for_its_commit_does_not_happen_twice(
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

    policy = declare(Order, handler, name="stores", retry=dq.Retry([60]))
    grouping(policy)
    rows = [due(order, policy) for order in orders]
    dq.timeout_fired.connect(hear, sender=Order)
    try:
        fire(*rows)
    finally:
        dq.timeout_fired.disconnect(hear, sender=Order)
    expected = [order.pk for order in orders[:-1]]
    assert (called, told) == (expected, expected)


def test_one_that_raises_when_the_group_commits_is_found(orders: list[Order], declare: Declare) -> None:
    if connection.vendor == "mysql":
        pytest.skip("InnoDB checks foreign keys at once")

    def handler(obj: Order, timeout: Timeout) -> None:
        obj.customer_id = 987654 if obj.pk == orders[1].pk else None
        obj.save()

    policy = declare(Order, handler, name="at_commit", retry=dq.Retry([60]))
    grouping(policy)
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

    policy = declare(Order, handler, name="breaks", retry=dq.Retry([60]))
    grouping(policy)
    rows = [due(order, policy) for order in orders]
    fire(*rows)
    assert [state(row)[0] for row in rows] == ["pending", *["fired"] * 4]
    assert rows[0].errors[0]["error"] == "BrokenTransaction"
    assert Order.objects.filter(note="mine").count() == 4


WIDE: list[Callable[[Order], object]] = [
    lambda obj: Order.objects.exclude(pk=obj.pk).update(status="paid"),
    lambda obj: Order.objects.filter(status="unpaid").exclude(pk=obj.pk).update(status="paid"),
    lambda obj: Order.objects.filter(Q(pk=obj.pk + 1) | Q(pk=obj.pk)).update(status="paid"),
    lambda obj: Order.objects.filter(pk=obj.pk + 1).update(status="paid"),
    lambda obj: Order.objects.filter(pk__in=[obj.pk, obj.pk + 1]).update(status="paid"),
    lambda obj: save_all_others(obj),
    lambda obj: Order.objects.bulk_update([Order(pk=obj.pk + 1, status="paid")], ["status"]),
    lambda obj: raw("UPDATE testapp_order SET status = 'paid' WHERE id <> %s", [obj.pk]),
    lambda obj: raw(f"update testapp_order set status = 'paid' where id = {obj.pk + 1}"),
    lambda obj: Order.objects.exclude(pk=obj.pk).delete(),
]


def save_all_others(obj: Order) -> None:
    for other in Order.objects.exclude(pk=obj.pk):
        other.status = "paid"
        other.save()


def raw(sql: str, params: list[Any] | None = None) -> None:
    with connection.cursor() as cursor:
        cursor.execute(sql, params)


@pytest.mark.parametrize("write", WIDE)
def test_a_handler_that_writes_other_members_leaves_none_of_them_stale(
    declare: Declare, write: Callable[[Order], object]
) -> None:
    """Fired one by one, the second one finds itself paid, and skips; a stale one would overwrite that."""
    orders = [Order.objects.create(status="unpaid") for _ in range(2)]

    def handler(obj: Order, timeout: Timeout) -> None:
        write(obj)
        obj.status = "cancelled"
        obj.save()

    policy = declare(Order, handler, name="wide", when=Q(status="unpaid"))
    pace = grouping(policy)
    rows = [due(order, policy) for order in orders]
    fire(*rows)
    assert state(rows[0]) == FIRED
    assert state(rows[1])[0] in {"skipped", "cancelled"}
    assert not Order.objects.filter(pk=orders[1].pk).exclude(status="paid").exists()
    assert pace.is_alone
    assert pace.size() == 1


NARROW: list[Callable[[Order], object]] = [
    lambda obj: obj.save(),
    lambda obj: obj.save(update_fields=["note"]),
    lambda obj: Order.objects.filter(pk=obj.pk).update(note="x"),
    lambda obj: Order.objects.filter(pk=obj.pk, status="unpaid").update(note="x"),
    lambda obj: Order.objects.filter(pk=obj.pk).exclude(note="y").update(note="x"),
    lambda obj: Order.objects.filter(pk__in=[obj.pk]).update(note="x"),
    lambda obj: Order.objects.create(note="a new one"),
    lambda obj: Order.objects.bulk_create([Order(note="new"), Order(note="new")]),
    lambda obj: Effect.objects.create(what="testapp_order", object_id=obj.pk),
    lambda obj: Effect.objects.filter(what="x").update(what="y"),
    lambda obj: list(Order.objects.all()),
    lambda obj: Order.objects.select_for_update().get(pk=obj.pk),
    lambda obj: dq.schedule_timeout(obj, "remind", minutes=5),
    lambda obj: dq.cancel_timeout(obj, "remind"),
    lambda obj: obj.delete(),
]


@pytest.mark.parametrize("write", NARROW)
def test_a_handler_that_minds_its_own_business_stays_in_its_group(
    orders: list[Order], declare: Declare, write: Callable[[Order], object]
) -> None:
    policy = declare(Order, lambda obj, timeout: write(obj), name="narrow")
    pace = grouping(policy)
    rows = [due(order, policy) for order in orders]
    assert transactions_of(*rows) == 1
    assert {state(row) for row in rows} == {FIRED}
    assert not pace.is_alone


def test_arming_and_cancelling_other_policies_on_save_stays_in_the_group(declare: Declare) -> None:
    def handler(obj: Order, timeout: Timeout) -> None:
        obj.status = "done"
        obj.paid_at = timezone.now()
        obj.save()

    declare(Order, name="armed", when=Q(status="done"), since="paid_at", after=timedelta(days=1))
    policy = declare(Order, handler, name="arms")
    orders = [Order.objects.create(created_at=timezone.now()) for _ in range(4)]
    grouping(policy)
    rows = [due(order, policy) for order in orders]
    assert transactions_of(*rows) == 1
    assert {state(row) for row in rows} == {FIRED}
    assert Timeout.objects.pending().of_labels(["testapp.order.armed"]).count() == 4
    assert Timeout.objects.filter(state="cancelled", policy="testapp.order.cancel_unpaid").count() == 4


def test_a_child_of_two_tables_stays_in_its_group(declare: Declare) -> None:
    def handler(obj: ExpressOrder, timeout: Timeout) -> None:
        obj.status, obj.courier = "gone", "fast"
        obj.save()

    policy = declare(ExpressOrder, handler, name="narrow_child")
    grouping(policy)
    rows = [due(ExpressOrder.objects.create(), policy) for _ in range(3)]
    assert transactions_of(*rows) == 1
    assert {state(row) for row in rows} == {FIRED}
    assert ExpressOrder.objects.filter(status="gone", courier="fast").count() == 3


def test_a_handler_that_cancels_another_members_timeout_prevents_it(orders: list[Order], declare: Declare) -> None:
    """In its group the other one would count as fired already, and the answer would be: too late."""
    answers: list[bool] = []

    def handler(obj: Order, timeout: Timeout) -> None:
        answers.append(dq.cancel_timeout(orders[1], "cancels") if obj.pk == orders[0].pk else True)

    policy = declare(Order, handler, name="cancels")
    grouping(policy)
    rows = [due(order, policy) for order in orders]
    fire(*rows)
    assert [state(row)[0] for row in rows] == ["fired", "cancelled", "fired", "fired", "fired"]
    assert all(answers[-4:])


def test_a_policy_that_raises_often_is_fired_one_by_one_for_a_while(declare: Declare) -> None:
    bad: set[int] = set()

    def handler(obj: Order, timeout: Timeout) -> None:
        if obj.pk in bad:
            raise ValueError

    policy = declare(Order, handler, name="often", retry=dq.Retry([3600]))
    pace = grouping(policy)
    orders = [Order.objects.create() for _ in range(20)]
    bad.update(order.pk for order in orders[::2])
    fire(*[due(order, policy) for order in orders])
    assert pace.size() == 1


def test_slow_handlers_do_not_keep_others_locked(declare: Declare) -> None:
    policy = declare(Order, lambda obj, timeout: time.sleep(0.03), name="slow")
    pace = grouping(policy)
    rows = [due(Order.objects.create(), policy) for _ in range(3)]
    fire(*rows)
    assert pace.size() == 1
    assert pace.work_size() < 10


def test_a_policy_of_which_nothing_is_known_begins_with_one(declare: Declare) -> None:
    policy = declare(Order, name="unknown")
    assert transactions_of(*[due(Order.objects.create(), policy) for _ in range(2)]) == 2


def test_what_had_no_turn_in_time_is_given_back_at_once(declare: Declare, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "WORK_SECONDS", 0.02)
    policy = declare(Order, lambda obj, timeout: time.sleep(0.05), name="very_slow")
    rows = [due(Order.objects.create(), policy) for _ in range(6)]
    [work], _ = plan({row.pk: 1 for row in rows}, "default")
    report = run(work, "default")
    assert 1 <= len(report.fired) < 6
    assert sorted([*report.fired, *report.again]) == [row.pk for row in rows]
    assert set(report.untried) == set(report.again)
    assert all(at <= report.now for at in report.again.values() if report.now)
