"""`plan`: one query, and the pieces that it makes."""

from __future__ import annotations

import json
import pickle
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

import django_delayq as dq
from django_delayq import operations
from django_delayq.firing import Work, plan, run
from django_delayq.models import Timeout
from tests.integration.firing.conftest import Declare, due, work_of
from tests.testapp.models import Order, Parcel

pytestmark = [pytest.mark.dialect, pytest.mark.django_db(transaction=True)]


def test_one_query_for_everything_and_work_by_policy(orders: list[Order], declare: Declare) -> None:
    batch = declare(Order, name="batch", batch=2)
    together = declare(Order, name="together", together=3)
    outside = declare(Order, name="outside", atomic=False)
    rows = {
        "remind": [due(order) for order in orders],
        "batch": [due(order, batch) for order in orders],
        "together": [due(order, together) for order in orders],
        "outside": [due(order, outside) for order in orders[:2]],
        "chase": [due(Parcel.objects.create(), "chase")],
    }
    later = dq.schedule_timeout(orders[0], "cancel_unpaid", minutes=1)
    settled = due(orders[1], "cancel_unpaid")
    dq.cancel_timeout(settled)
    ids = [row.pk for some in rows.values() for row in some]
    deliveries = dict.fromkeys([*ids, later.pk, settled.pk, 10**9], 1)
    deliveries[rows["remind"][0].pk] = 2
    with CaptureQueriesContext(connection) as queries:
        works, report = plan(deliveries, "default")
    # And once a second one for what operators have stopped.
    [asked] = [query["sql"] for query in queries if "policycontrol" not in query["sql"]]
    assert "history" not in asked
    assert sorted(report.done) == [settled.pk, 10**9]
    assert report.again == {later.pk: later.run_at}
    assert report.now is not None
    found: dict[str, list[tuple[int, bool]]] = {}
    for work in works:
        found.setdefault(work.policy.rpartition(".")[2], []).append((len(work.ids), work.suspect))
    assert found == {
        "remind": [(1, True), *[(1, False)] * 4],
        "together": [(3, False), (2, False)],
        "batch": [(2, False), (2, False), (1, False)],
        "outside": [(1, False), (1, False)],
        "chase": [(1, False)],
    }
    assert sorted(timeout_id for work in works for timeout_id in work.ids) == sorted(ids)


@pytest.mark.parametrize("ids", [{}, {0: 1}, {-5: 1}, {2**63: 1}, {10**40: 3}, {123456789: 1}])
def test_ids_without_a_row_are_done(ids: dict[int, int]) -> None:
    works, report = plan(ids, "default")
    assert (works, report.done, report.again) == ([], tuple(ids), {})


@pytest.mark.parametrize("size", [None, 20])
def test_the_first_due_come_first(orders: list[Order], declare: Declare, size: int | None) -> None:
    policy = declare(Order, name="ordered", together=size)
    rows = [due(order, policy) for order in reversed(orders)]
    works, _ = plan({row.pk: 1 for row in reversed(rows)}, "default")
    assert [id for work in works for id in work.ids] == [row.pk for row in rows]


def test_rows_of_different_queues_do_not_share_work(orders: list[Order], declare: Declare) -> None:
    policy = declare(Order, name="shared", together=20)
    rows = [due(order, policy) for order in orders]
    Timeout.objects.filter(pk=rows[0].pk).update(queue="elsewhere")
    works, _ = plan({row.pk: 1 for row in rows}, "default")
    assert {(work.queue, len(work.ids)) for work in works} == {("elsewhere", 1), ("default", 4)}


@pytest.mark.parametrize("option", ["together", "batch"])
def test_one_object_is_never_twice_in_a_work(order: Order, declare: Declare, option: Any) -> None:
    policy = declare(Order, name="keys", **{option: 20})
    works, _ = plan({due(order, policy, key=key).pk: 1 for key in "abc"}, "default")
    assert [len(work.ids) for work in works] == [1, 1, 1]


def test_work_survives_pickling_and_json(order: Order) -> None:
    row = due(order)
    work = work_of(row)
    assert pickle.loads(pickle.dumps(work)) == work
    told = json.loads(json.dumps(asdict(work)))
    again = Work(told["policy"], tuple(told["ids"]), tuple(told["object_ids"]), told["queue"], told["suspect"])
    assert run(again, "default").fired == (row.pk,)


def test_the_timeouts_of_a_stopped_policy_are_not_planned(order: Order) -> None:
    row = due(order)
    operations.pause("testapp.order.remind", by="script:test")
    works, report = plan({row.pk: 1}, "default")
    assert works == []
    assert report.now is not None
    assert report.again[row.pk] > report.now


def test_what_is_due_within_the_time_ahead_is_planned(order: Order) -> None:
    row = dq.schedule_timeout(order, "remind", seconds=30)
    assert plan({row.pk: 1}, "default")[0] == []
    works, report = plan({row.pk: 1}, "default", timedelta(minutes=1))
    assert [work.ids for work in works] == [(row.pk,)]
    assert report.early == {row.pk: row.run_at}


def test_planned_ahead_only_what_is_due_at_nearly_the_same_time_shares_a_work(
    orders: list[Order], declare: Declare
) -> None:
    policy = declare(Order, name="shared", together=20)
    at = timezone.now() + timedelta(seconds=30)
    rows = [
        dq.schedule_timeout(order, policy, at=at + timedelta(milliseconds=after))
        for after, order in zip((0, 1, 3, 9), orders, strict=False)
    ]
    now = due(orders[4], policy)
    ids = [row.pk for row in rows]
    works, report = plan({row.pk: 1 for row in [*rows, now]}, "default", timedelta(minutes=1))
    assert sorted(work.ids for work in works) == sorted([(now.pk,), (ids[0], ids[1]), (ids[2],), (ids[3],)])
    assert report.early == {row.pk: row.run_at for row in rows}
