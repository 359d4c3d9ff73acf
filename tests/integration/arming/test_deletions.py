"""Deleting objects cancels their timeouts, however the deletions are nested, grouped or undone."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection, transaction
from django.db.models import Q
from django.db.models.deletion import Collector
from django.db.models.signals import pre_delete
from django.utils import timezone

from django_delayq.arming import receivers
from django_delayq.models import Timeout
from tests.support.seen import sql_of
from tests.testapp.models import Order, OrderProxy

pytestmark = pytest.mark.django_db(transaction=True)


def new_orders(count: int) -> list[Order]:
    return [Order.objects.create(created_at=timezone.now()) for _ in range(count)]


def states() -> list[tuple[str, str]]:
    return list(Timeout.objects.order_by("id").values_list("state", "cause"))


LEDGER = Timeout._meta.db_table
GONE = ("cancelled", "gone")


@contextmanager
def before_delete(do: Callable[[Order], object]) -> Iterator[None]:
    def receive(instance: Order, **_: Any) -> None:
        do(instance)

    pre_delete.connect(receive, Order)
    try:
        yield
    finally:
        pre_delete.disconnect(receive, Order)


def test_deleting_many_cancels_them_in_few_queries() -> None:
    new_orders(30)
    sent = sql_of(lambda: Order.objects.all().delete())
    assert states() == [GONE] * 30
    assert len([sql for sql in sent if LEDGER in sql]) <= 4


def test_a_receiver_that_deletes_other_rows_of_the_table_does_not_hide_the_first_deletion() -> None:
    outer, inner, kept = new_orders(3)

    def delete_inner(order: Order) -> None:
        if order.pk == outer.pk:
            Order.objects.get(pk=inner.pk).delete()

    with before_delete(delete_inner):
        Order.objects.get(pk=outer.pk).delete()
    assert states() == [GONE, GONE, ("pending", "")]
    assert Order.objects.get() == kept


def test_proxies_and_rows_of_one_table_are_cancelled_together() -> None:
    """As a cascade from a proxy to the rows of its table, which are deleted in two statements."""
    orders = new_orders(20)
    collector = Collector(using="default")
    collector.collect(OrderProxy.objects.filter(pk__in=[order.pk for order in orders[:10]]))
    collector.collect(Order.objects.filter(pk__in=[order.pk for order in orders[10:]]))
    sent = sql_of(collector.delete)
    assert states() == [GONE] * 20
    checks = [sql for sql in sent if "SELECT" in sql and '"testapp_order"' in sql]
    assert len(checks) <= 2, "one for each statement, not one for each row"


@pytest.mark.parametrize("fails", [True, False], ids=["raised", "rolled_back"])
def test_a_deletion_that_is_undone_leaves_no_keys_behind(fails: bool) -> None:
    undone, deleted = new_orders(2)

    def refuse(order: Order) -> None:
        if fails and order.pk == undone.pk:
            raise RuntimeError("refused")

    with before_delete(refuse), pytest.raises(RuntimeError), transaction.atomic():
        Order.objects.get(pk=undone.pk).delete()
        raise RuntimeError
    deleted.delete()
    assert states() == [("pending", ""), GONE]
    gc.collect()
    assert not any(noted for by_table in receivers._being_deleted.values() for noted in by_table.values())
    Order.objects.get(pk=undone.pk).delete()
    assert states() == [GONE, GONE]


@pytest.mark.parametrize("pending", [False, True])
def test_a_row_that_is_deleted_while_a_save_is_being_armed_is_left_alone(declare: Any, pending: bool) -> None:
    """Outside a transaction the save is committed, and another one may delete the row at any time."""
    policy = declare(Order, name="called", since=lambda order: order.created_at, after=timedelta(hours=1), when=Q())
    (order,) = new_orders(1)
    if not pending:
        Timeout.objects.all().delete()
    Order.objects.update(created_at=timezone.now() + timedelta(hours=1))
    ends: Iterator[Callable[[], object]] = iter([lambda: Order.objects.filter(pk=order.pk)._raw_delete("default")])

    def delete_after_the_state_is_read(execute: Callable[..., Any], sql: str, *rest: Any) -> Any:
        done = execute(sql, *rest)
        if sql.startswith("SELECT") and LEDGER in sql and (delete := next(ends, None)):
            delete()
        return done

    with connection.execute_wrapper(delete_after_the_state_is_read):
        order.save()
    assert Timeout.objects.pending().filter(policy=policy.label).count() == pending
