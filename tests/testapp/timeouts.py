"""Policies for the tests. Tests that need a special one declare it with the fixture `declare`.

Those at the end are only declared in processes whose variable `DELAYQ_TEST_POLICIES` names them, so that releases of an
application that differ in their policies can run side by side.
"""

from __future__ import annotations

import asyncio
import os
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from django.db import transaction
from django.db.models import Q

from django_delayq import Retry, timeout_policy
from tests.testapp.market import Purchase
from tests.testapp.models import Effect, Order, Parcel, Voucher

if TYPE_CHECKING:
    from collections.abc import Callable

    from django.db.models import QuerySet

    from django_delayq.models import Timeout


@timeout_policy(Order, after=timedelta(minutes=30), since="created_at", when=Q(status="unpaid"))
def cancel_unpaid(order: Order, timeout: Timeout) -> None:
    order.status = "cancelled"
    order.save()
    Effect.objects.create(what="cancel_unpaid", object_id=order.pk, timeout_id=timeout.pk)


@timeout_policy(Order)
def remind(order: Order, timeout: Timeout) -> None:
    """By hand only, with a delay of its own each time; does nothing but count."""
    Effect.objects.create(what="remind", object_id=order.pk, timeout_id=timeout.pk)


@timeout_policy(Order, batch=20)
def remind_many(orders: QuerySet[Order], timeouts: list[Timeout]) -> None:
    """As `remind`, twenty at a time; and it writes the orders themselves."""
    orders.update(note="reminded")
    Effect.objects.bulk_create(
        Effect(what="remind_many", object_id=row.object_id, timeout_id=row.pk) for row in timeouts
    )


@timeout_policy(Order, atomic=False, retry=Retry([0, 0]))
def send_outside(order: Order, timeout: Timeout) -> None:
    """Outside a transaction, with the idempotency key."""
    with transaction.atomic():
        Effect.objects.create(
            what="send_outside", object_id=order.pk, timeout_id=timeout.pk, idempotency_key=timeout.idempotency_key
        )


@timeout_policy(Order, retry=Retry([0, 0]))
def kill_worker(order: Order, timeout: Timeout) -> None:
    """Kill the process before anything can be recorded."""
    if os.environ.get("DELAYQ_TEST_KILLER"):
        os.kill(os.getpid(), 9)
    raise RuntimeError("not in a worker that may die")


@timeout_policy(Order)
def linger(order: Order, timeout: Timeout) -> None:
    """Take some time, like a handler that does real work."""
    time.sleep(float(os.environ.get("DELAYQ_TEST_LINGER", "0.02")))
    Effect.objects.create(what="linger", object_id=order.pk, timeout_id=timeout.pk)


@timeout_policy(Parcel, after=timedelta(hours=1), since="sent_at", when=Q(status="open"))
def chase(parcel: Parcel, timeout: Timeout) -> None:
    parcel.status = "chased"
    parcel.save()


@timeout_policy(Voucher, after=timedelta(days=1), since="issued_at", when=Q(status="open"))
def expire(voucher: Voucher, timeout: Timeout) -> None:
    voucher.status = "expired"
    voucher.save()


LOSE_UNPAID: dict[str, Any] = {"after": timedelta(minutes=30), "since": "created_at"}
LOSE_UNPAID["when"] = Q(status="unpaid") & ~Q(payments__status="captured")


def lose(purchase: Purchase, timeout: Timeout) -> None:
    """Lose a purchase none of whose payments was captured."""
    purchase.status = "cancelled"
    purchase.save()
    Effect.objects.create(what="lose_unpaid", object_id=purchase.pk, timeout_id=timeout.pk)


SOME = os.environ.get("DELAYQ_TEST_POLICIES", "").split()


def only_in_some(name: str, **options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Declare a policy for orders in processes whose environment asks for it."""
    return timeout_policy(Order, name=name, **options) if name in SOME else lambda handler: handler


@only_in_some("dawdle", atomic=False)
def dawdle(order: Order, timeout: Timeout) -> None:
    """Take seconds, without a lock."""
    time.sleep(float(os.environ["DELAYQ_TEST_DAWDLE"]))


@only_in_some("adawdle", atomic=False)
async def adawdle(order: Order, timeout: Timeout) -> None:
    await asyncio.sleep(float(os.environ["DELAYQ_TEST_DAWDLE"]))


@only_in_some("former")
@only_in_some("current", aliases=("former",) if "alias" in SOME else ())
def do_nothing(order: Order, timeout: Timeout) -> None:
    """Do nothing; only some releases declare this policy."""


@only_in_some("harmless", retry=Retry.never())
@only_in_some("harmless_outside", retry=Retry.never(), atomic=False)
def do_no_harm(order: Order, timeout: Timeout) -> None:
    """Take some time, in which the process may end."""
    time.sleep(0.05)
    Effect.objects.create(what="harmless", object_id=order.pk, timeout_id=timeout.pk)


@only_in_some("deadly", retry=Retry.never())
@only_in_some("deadly_outside", retry=Retry.never(), atomic=False)
def end_process(order: Order, timeout: Timeout) -> None:
    """End the process while others run in it."""
    time.sleep(0.05)
    os._exit(7)


if "lose_unpaid" in SOME:

    @timeout_policy(Purchase, **LOSE_UNPAID)
    def lose_unpaid(purchase: Purchase, timeout: Timeout) -> None:
        """Write rows that the policy reads, too."""
        for payment in purchase.payments.filter(status="new"):
            payment.status = "void"
            payment.save()
        lose(purchase, timeout)


def collect(order: Order, timeout: Timeout) -> None:
    """Write which step was called, or that the handler was."""
    what, key = f"collect {timeout.step}".strip(), timeout.idempotency_key
    Effect.objects.create(what=what, object_id=order.pk, timeout_id=timeout.pk, idempotency_key=key)


def declare_collect() -> Any:
    """Declare a policy with steps some seconds before and after its deadline, for tests with real workers."""
    second = timedelta(seconds=1)
    policy: Any = timeout_policy(Order, name="collect", grace=2 * second, retry=Retry([0]))(collect)
    policy.step(-3 * second, name="early")(collect)
    policy.step(-2 * second, name="outside", atomic=False)(collect)
    policy.step(timedelta(0), every=second, times=2, name="firm")(collect)
    return policy


if "collect" in SOME:
    declare_collect()
