"""The order of locks, and the data after waiting for a lock. Each test is a bug that occurred in a race."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
from django.db import transaction
from django.db.models import Q
from django.utils import timezone

import django_delayq as dq
from django_delayq import operations
from django_delayq.arming.receivers import arm_saved
from django_delayq.arming.reconcile import arm_one
from django_delayq.firing import plan, run
from django_delayq.firing.handler import set_checkpoint_hook
from django_delayq.models import PolicyChange, PolicyControl, Timeout
from tests.e2e.races.actor import PATIENCE
from tests.e2e.races.sessions import (
    Session,
    cross,
    deadlocks,
    impatient,
    meanwhile,
    needs_row_locks,
    transaction_with,
)
from tests.support.typed import Declare
from tests.testapp.market import Payment, Purchase
from tests.testapp.models import ExpressOrder, Order
from tests.testapp.timeouts import LOSE_UNPAID, cancel_unpaid, lose

pytestmark = [pytest.mark.dialect, pytest.mark.slow, pytest.mark.django_db(transaction=True), needs_row_locks]

FIRST, AMONG, LAST = 99_700, 99_900, 100_400
"""As strings, the keys from 100,000 on come before all others: a page in that order locks objects out of order."""


@pytest.fixture
def orders() -> list[Order]:
    Order.objects.bulk_create([Order(pk=pk) for pk in range(FIRST, LAST)])
    assert dq.schedule_timeouts(Order.objects.all(), "remind", hours=1) == LAST - FIRST
    return list(Order.objects.order_by("pk"))


@pytest.mark.parametrize("given", ["queryset", "list"])
def test_pages_of_one_transaction_lock_objects_in_the_order_of_their_keys(orders: list[Order], given: str) -> None:
    later = [order for order in orders if order.pk >= AMONG]
    rows: Any = dq.pending_timeouts(Order, "remind")
    with meanwhile(lambda: dq.schedule_timeouts(later, "remind", hours=2), lambda sql: sql.startswith("UPDATE")):
        assert dq.cancel_timeouts(rows if given == "queryset" else list(rows)) == len(orders)
    assert Timeout.objects.pending().filter(object_id__in=[str(order.pk) for order in later]).count() == len(later)


def test_single_verbs_wait_for_no_timeout_of_another_object(declare: Declare) -> None:
    """MariaDB walks the primary key backwards to find the newest round of a slot in a small ledger.

    So it reads all rows, and waits for locked ones.
    """
    own, other = Order.objects.create(), Order.objects.create()
    policy = declare(Order, name="renamed", aliases=("formerly",))  # two slots to read
    for _ in range(5):
        dq.schedule_timeout(own, policy, hours=1)
        assert dq.cancel_timeout(own, policy)
    dq.schedule_timeout(own, policy, hours=1)
    rows = [dq.schedule_timeout(other, policy, hours=1, key=str(number)).pk for number in range(3)]
    with transaction_with(lambda: locked(*rows)), impatient():
        assert dq.extend_timeout(own, policy, hours=1)
        with dq.before_deadline(own, policy) as found:
            assert found is not None
        assert dq.schedule_timeout(own, policy, hours=1).pk
        assert dq.cancel_timeout(own, policy)


def lock_both(express: ExpressOrder) -> None:
    """Lock as docs/databases.md advises: a statement that locks both locks the child's row first."""
    with transaction.atomic():
        Order.objects.select_for_update().get(pk=express.pk)
        ExpressOrder.objects.select_for_update().get(pk=express.pk)
        assert dq.schedule_timeout(express, "of_child", hours=1).pk


CHILDS: dict[str, Callable[[ExpressOrder], object]] = {
    "schedule_many": lambda express: dq.schedule_timeouts([express], "of_child", hours=2),
    "cancel": lambda express: dq.cancel_timeout(express, "of_child"),
    "guard": lambda express: dq.before_deadline(express, "of_child").__enter__(),
    "arm_saved": lambda express: arm_saved(ExpressOrder, express, "default"),
    "lock_both": lock_both,
}


@pytest.mark.parametrize("verb", CHILDS)
def test_a_childs_verbs_lock_its_parents_half_first_as_saving_does(declare: Declare, verb: str) -> None:
    declare(ExpressOrder, name="of_child", when=Q(status="unpaid"), since="created_at", after=timedelta(hours=1))
    express = ExpressOrder.objects.create(created_at=timezone.now())
    cross(
        lambda: CHILDS[verb](express),
        first=lambda: Order.objects.filter(pk=express.pk).update(note="saving"),
        then=lambda: ExpressOrder.objects.filter(pk=express.pk).update(courier="saving"),
    )


def test_two_saves_of_a_child_do_not_deadlock_if_one_names_only_the_childs_columns(declare: Declare) -> None:
    """Django updates only the child's table then, and arming would lock the parent's row after the child's."""
    options: dict[str, Any] = {"since": lambda order: order.created_at, "after": timedelta(hours=1), "when": Q()}
    declare(Order, name="every_save", **options)
    express = ExpressOrder.objects.create(created_at=timezone.now())
    other, table = ExpressOrder.objects.get(pk=express.pk), ExpressOrder._meta.db_table
    with meanwhile(other.save, lambda sql: sql.startswith("UPDATE") and table in sql):
        express.courier = "swift"
        express.save(update_fields=["courier"])


@pytest.fixture
def few() -> list[Order]:
    """Orders of which most are about to be written: for MariaDB a reason to read the whole ledger."""
    few = [Order.objects.create() for _ in range(30)]
    dq.schedule_timeouts(few, "remind", hours=1)
    return few


def test_bulk_verbs_wait_for_no_timeout_of_another_object(few: list[Order]) -> None:
    others, own = few[:3], few[3:]
    rows = dq.pending_timeouts(others, "remind").values_list("pk", flat=True)
    with transaction_with(lambda: locked(*rows)), impatient():
        assert dq.schedule_timeouts(own, "remind", hours=2) == len(own)
        assert dq.extend_timeouts(dq.pending_timeouts(own, "remind"), hours=2) == len(own)
        assert dq.cancel_timeouts(dq.pending_timeouts(own, "remind")) == len(own)


def locked(*rows: int) -> list[Timeout]:
    return list(Timeout.objects.select_for_update().filter(pk__in=rows))


def test_an_arming_that_waited_for_the_row_sees_what_was_closed_meanwhile() -> None:
    """A save outside a transaction is committed when its arming begins, and others may lock the row in between."""
    order = Order.objects.create(status="paid", created_at=timezone.now())
    with transaction.atomic():
        order.status = "unpaid"
        order.save()
        assert dq.cancel_timeout(order, "cancel_unpaid")
        session = Session(lambda: arm_one([cancel_unpaid], order.pk, "default", is_new=True))
        session.wait_until_it_waits()
    session.end()
    assert list(Timeout.objects.values_list("state", "cause")) == [("cancelled", "hand")]


def no_answer(order: Order, timeout: Timeout) -> None:
    raise RuntimeError("no answer")


@pytest.fixture
def next_is_moving(declare: Declare) -> Callable[..., Any]:
    """`next_is_moving(policy)`: another transaction moves the row that is due next, and commits late."""
    Order.objects.bulk_create([Order() for _ in range(200)])
    settled = declare(Order, name="settled")
    dq.schedule_timeouts(Order.objects.all(), settled, hours=1)
    dq.cancel_timeouts(dq.pending_timeouts(Order, settled))

    @contextmanager
    def moving(policy: dq.TimeoutPolicy[Any]) -> Iterator[None]:
        next_one = dq.schedule_timeout(Order.objects.create(), policy, hours=1)
        with transaction_with(lambda: dq.extend_timeout(next_one, minutes=1)), impatient():
            yield

    return moving


@pytest.mark.parametrize(
    ("options", "end"),
    [
        ({}, ("fired", 1)),
        ({"when": Q(status="paid")}, ("skipped", 0)),
        ({"handler": no_answer, "atomic": False}, ("pending", 1)),
    ],
    ids=["fired", "skipped", "failed_outside"],
)
def test_a_firing_waits_for_no_timeout_of_another_object(
    declare: Declare, next_is_moving: Callable[..., Any], options: dict[str, Any], end: tuple[str, int]
) -> None:
    """MariaDB prefers the index of due rows to the primary key while few rows are due.

    So a compare-and-set read the row that is due next, and waited for the transaction that moved it.
    """
    policy = declare(Order, name="due", **options)
    row = dq.schedule_timeout(Order.objects.create(), policy, seconds=0)
    works, _ = plan({row.pk: 1}, "default")
    with next_is_moving(policy):
        run(works[0], "default")
        row.refresh_from_db()
        assert (row.state, row.attempts) == end


@pytest.mark.usefixtures("counted_deadlocks")
def test_operators_who_are_all_the_first_to_touch_a_policy_take_turns() -> None:
    """Its row is created then. If several find a gap lock at the same time, none could lock it exclusively."""
    before, sessions = deadlocks(), []
    with transaction.atomic():
        operations.pause(cancel_unpaid, by="the first")
        for number in (1, 2):
            pause = functools.partial(operations.pause, cancel_unpaid, by="another", reason=f"reason {number}")
            sessions.append(Session(pause))
            sessions[-1].wait_until_it_waits(sessions=number)
    for session in sessions:
        session.end()
    assert deadlocks() == before
    assert PolicyChange.objects.count() == 3
    assert PolicyControl.objects.get().by == "another"


# Before a watched row is locked or written, its owner is locked: the order of a firing, and of saves.

Payments = list[Any]
"""Of `Payment`."""


@pytest.fixture
def payments(declare: Declare) -> Payments:
    """Two payments, in the order of their keys. Their purchases have the opposite order."""
    declare(Purchase, lose, name="lose_unpaid", **LOSE_UNPAID)
    second, first = Purchase.objects.create(), Purchase.objects.create()
    return [Payment.objects.create(purchase=purchase) for purchase in (first, second)]


def lock(purchase: int) -> None:
    Purchase.objects.select_for_update().get(pk=purchase)


def save_each(rows: Any) -> None:
    for payment in rows:
        payment.status = "failed"
        payment.save()


# That each way to write does so: tests/integration/arming/test_watched.py.


def test_what_locks_a_watched_row_locks_its_owner_first(payments: Payments) -> None:
    """A firing has locked the owner, and its handler writes the row that the request wants, too."""
    pk = payments[0].pk
    cross(
        transaction.atomic(lambda: save_each(Payment.objects.select_for_update().filter(pk=pk).iterator())),
        first=lambda: lock(payments[0].purchase_id),
        then=lambda: Payment._base_manager.filter(pk=pk).update(status="void"),
    )


def test_what_writes_several_watched_rows_locks_their_owners_in_the_order_of_their_keys(payments: Payments) -> None:
    first, second = Purchase.objects.order_by("pk")
    act = transaction.atomic(lambda: Payment.objects.bulk_update(payments, ["status"], batch_size=1))
    cross(act, first=lambda: lock(first.pk), then=lambda: lock(second.pk))


# The next round takes the slot of one that is firing outside a transaction.


def test_a_failed_attempt_waits_for_no_transaction_that_has_scheduled_the_next_round(
    declare: Declare,
) -> None:
    """It would hold its row meanwhile, for which that transaction may wait."""
    began, may_fail, tried = threading.Event(), threading.Event(), threading.Semaphore(0)

    def fail(order: Order, timeout: Timeout) -> None:
        began.set()
        assert may_fail.wait(PATIENCE)
        raise RuntimeError("no answer")

    policy, order = declare(Order, fail, name="outside", atomic=False), Order.objects.create()
    works, _ = plan({dq.schedule_timeout(order, policy, seconds=0).pk: 1}, "default")
    set_checkpoint_hook(lambda step: tried.release() if step == "undone" else None)
    try:
        worker = Session(lambda: run(works[0], "default"))
        assert began.wait(PATIENCE)
        with transaction.atomic():
            dq.schedule_timeout(order, policy, hours=1)
            may_fail.set()
            assert tried.acquire(timeout=PATIENCE)
            assert tried.acquire(timeout=PATIENCE)  # again, so the first one did not wait for the slot
            assert dq.cancel_timeouts(order.timeouts.all()) == 1
        worker.end()
    finally:
        set_checkpoint_hook(None)
    rows = Timeout.objects.order_by("pk").values_list("state", "cause", "attempts")
    assert list(rows) == [("cancelled", "hand", 1), ("cancelled", "hand", 0)]
