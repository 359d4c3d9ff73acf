"""Deleting objects cancels their timeouts, however the deletions are nested, grouped or undone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection
from django.db.models import Q
from django.db.models.signals import pre_delete
from django.utils import timezone

from django_delayq.models import Timeout
from tests.support.seen import sql_of
from tests.testapp.models import Order

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
