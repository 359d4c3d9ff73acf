"""The order of locks, and the data after waiting for a lock. Each test is a bug that occurred in a race."""

from __future__ import annotations

import functools
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
from django_delayq.arming.receivers import ArmingQuerySet, arm_saved
from django_delayq.arming.reconcile import arm_one
from django_delayq.firing import plan, run
from django_delayq.models import PolicyChange, PolicyControl, Timeout
from django_delayq.sql.statements import CHUNK
from django_delayq.testing import fire_due
from tests.e2e.races.sessions import (
    Session,
    cross,
    deadlocks,
    impatient,
    meanwhile,
    needs_row_locks,
    transaction_with,
)
from tests.testapp.models import Customer, ExpressOrder, Order, Voucher
from tests.testapp.timeouts import cancel_unpaid

pytestmark = [pytest.mark.dialect, pytest.mark.slow, pytest.mark.django_db(transaction=True), needs_row_locks]

FIRST, AMONG, LAST = 99_700, 99_900, 100_400
"""As strings, the keys from 100,000 on come before all others: a page in that order locks objects out of order."""


@pytest.fixture
def orders() -> list[Order]:
    Order.objects.bulk_create([Order(pk=pk) for pk in range(FIRST, LAST)])
    assert dq.schedule_timeouts(Order.objects.all(), "remind", hours=1) == LAST - FIRST
    return list(Order.objects.order_by("pk"))


@pytest.mark.parametrize("verb", ["cancel_timeouts", "extend_timeouts", "reschedule_timeouts"])
@pytest.mark.parametrize("given", ["queryset", "list"])
def test_pages_of_one_transaction_lock_objects_in_the_order_of_their_keys(
    orders: list[Order], verb: str, given: str
) -> None:
    later = [order for order in orders if order.pk >= AMONG]
    rows: Any = dq.pending_timeouts(Order, "remind")
    delay = {} if verb == "cancel_timeouts" else {"hours": 3}
    with meanwhile(lambda: dq.schedule_timeouts(later, "remind", hours=2), lambda sql: sql.startswith("UPDATE")):
        assert getattr(dq, verb)(rows if given == "queryset" else list(rows), **delay) == len(orders)
    assert Timeout.objects.pending().filter(object_id__in=[str(order.pk) for order in later]).count() == len(later)


def test_an_update_of_two_pages_locks_in_the_order_of_the_database() -> None:
    """MariaDB sorts letters without regard to case, PostgreSQL by its locale, and Python all capitals first."""
    Voucher.objects.bulk_create(Voucher(code=code) for code in ["a", *(f"B{number}" for number in range(CHUNK))])
    codes = list(Voucher.objects.order_by("pk").values_list("pk", flat=True))
    last = Voucher.objects.filter(pk__in=codes[codes.index("a") + 1 :][-1:])
    cross(
        lambda: ArmingQuerySet(Voucher).update(issued_at=timezone.now()),
        first=lambda: Voucher.objects.filter(pk="a").update(status="used"),
        then=lambda: last.update(status="used"),
    )
    assert Voucher.objects.filter(issued_at__isnull=False).count() == CHUNK + 1


@pytest.mark.parametrize("verb", ["cancel_timeout", "before_deadline", "schedule_timeout", "extend_timeout"])
def test_a_single_verb_waits_for_no_timeout_of_another_object(declare: Callable[..., Any], verb: str) -> None:
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
        if verb == "before_deadline":
            with dq.before_deadline(own, policy) as found:
                assert found is not None
        else:
            assert getattr(dq, verb)(own, policy, **({} if verb == "cancel_timeout" else {"hours": 1}))


def lock_both(express: ExpressOrder) -> None:
    """Lock as docs/databases.md advises: a statement that locks both locks the child's row first."""
    with transaction.atomic():
        Order.objects.select_for_update().get(pk=express.pk)
        ExpressOrder.objects.select_for_update().get(pk=express.pk)
        assert dq.schedule_timeout(express, "of_child", hours=1).pk


CHILDS: dict[str, Callable[[ExpressOrder], object]] = {
    "schedule": lambda express: dq.schedule_timeout(express, "of_child", hours=2),
    "schedule_many": lambda express: dq.schedule_timeouts([express], "of_child", hours=2),
    "cancel": lambda express: dq.cancel_timeout(express, "of_child"),
    "cancel_many": lambda express: dq.cancel_timeouts(dq.pending_timeouts(express, "of_child")),
    "guard": lambda express: dq.before_deadline(express, "of_child").__enter__(),
    "arm": lambda express: dq.sync_timeouts(express),
    "arm_saved": lambda express: arm_saved(ExpressOrder, express, "default"),
    "lock_both": lock_both,
}


@pytest.mark.parametrize("verb", CHILDS)
def test_a_childs_verbs_lock_its_parents_half_first_as_saving_does(declare: Callable[..., Any], verb: str) -> None:
    declare(ExpressOrder, name="of_child", when=Q(status="unpaid"), since="created_at", after=timedelta(hours=1))
    express = ExpressOrder.objects.create(created_at=timezone.now())
    cross(
        lambda: CHILDS[verb](express),
        first=lambda: Order.objects.filter(pk=express.pk).update(note="saving"),
        then=lambda: ExpressOrder.objects.filter(pk=express.pk).update(courier="saving"),
    )


@pytest.mark.parametrize("others", [1, CHUNK], ids=["one_page", "two_pages"])
def test_timeouts_of_parents_and_children_lock_the_parents_in_the_order_of_their_keys(
    declare: Callable[..., Any], others: int
) -> None:
    """An operator cancels everything. Parents of children were locked after all other orders, whatever their keys."""
    declare(ExpressOrder, name="of_child")
    express = ExpressOrder.objects.create()
    orders = Order.objects.bulk_create([Order() for _ in range(others)])
    dq.schedule_timeout(express, "of_child", hours=1)
    dq.schedule_timeouts(Order.objects.exclude(pk=express.pk), "remind", hours=1)
    cross(
        transaction.atomic(lambda: dq.cancel_timeouts(Timeout.objects.all())),
        first=lambda: Order.objects.filter(pk=express.pk).update(note="saving"),
        then=lambda: Order.objects.filter(pk=orders[0].pk).update(note="saving"),
    )
    assert Timeout.objects.filter(state="cancelled").count() == others + 1


@pytest.mark.parametrize("fields", [["courier"], ["courier", "status"]], ids=["own", "own_and_parents"])
@pytest.mark.parametrize(
    ("model", "options"),
    [(Order, {"since": lambda order: order.created_at}), (ExpressOrder, {"since": "created_at"})],
    ids=["policy_of_parent", "policy_of_child"],
)
def test_two_saves_of_a_child_do_not_deadlock_if_one_names_only_the_childs_columns(
    declare: Callable[..., Any], model: Any, options: dict[str, Any], fields: list[str]
) -> None:
    """Django updates only the child's table then, and arming would lock the parent's row after the child's."""
    condition = Q() if model is Order else Q(courier="swift")
    declare(model, name="every_save", after=timedelta(hours=1), when=condition, **options)
    express = ExpressOrder.objects.create(created_at=timezone.now())
    other, table = ExpressOrder.objects.get(pk=express.pk), ExpressOrder._meta.db_table
    with meanwhile(other.save, lambda sql: sql.startswith("UPDATE") and table in sql):
        express.courier = "swift"
        express.save(update_fields=fields)


@pytest.mark.parametrize("model", [Order, ExpressOrder])
def test_deleting_a_child_locks_its_parents_half_first_too(declare: Callable[..., Any], model: Any) -> None:
    """Django deletes the child's row first, and what schedules a timeout at that time locks the parent's row first."""
    declare(ExpressOrder, name="of_child")
    express, table = ExpressOrder.objects.create(), ExpressOrder._meta.db_table

    def schedule() -> None:
        with pytest.raises(ValueError, match="not in the database"):
            dq.schedule_timeout(express, "of_child", hours=1)

    with meanwhile(schedule, lambda sql: sql.startswith("DELETE") and table in sql):
        model.objects.get(pk=express.pk).delete()


def test_what_locks_an_object_before_it_inserts_a_row_that_refers_to_it_does_not_deadlock(
    declare: Callable[..., Any],
) -> None:
    """On MariaDB the insert locks the object, shared with others, so that a call after it would deadlock."""
    customer, policy = Customer.objects.create(), declare(Customer, name="of_customer")

    def act() -> None:
        with dq.before_deadline(customer, policy):
            Order.objects.create(customer=customer)
            if not sessions:
                sessions.append(Session(act))
                sessions[0].wait_until_it_waits()
            dq.schedule_timeout(customer, policy, hours=1)

    sessions: list[Session] = []
    act()
    sessions[0].end()
    assert Timeout.objects.pending().count() == 1


BULK: dict[str, Callable[[Any], int]] = {
    "schedule": lambda orders: dq.schedule_timeouts(orders, "remind", hours=2),
    "cancel": lambda orders: dq.cancel_timeouts(dq.pending_timeouts(orders, "remind")),
    "extend": lambda orders: dq.extend_timeouts(dq.pending_timeouts(orders, "remind"), hours=2),
    "reschedule": lambda orders: dq.reschedule_timeouts(dq.pending_timeouts(orders, "remind"), hours=2),
}


@pytest.fixture
def few() -> list[Order]:
    """Orders of which most are about to be written: for MariaDB a reason to read the whole ledger."""
    few = [Order.objects.create() for _ in range(30)]
    dq.schedule_timeouts(few, "remind", hours=1)
    return few


@pytest.mark.parametrize("verb", BULK)
def test_a_bulk_verb_waits_for_no_timeout_of_another_object(few: list[Order], verb: str) -> None:
    others, own = few[:3], few[3:]
    rows = dq.pending_timeouts(others, "remind").values_list("pk", flat=True)
    with transaction_with(lambda: locked(*rows)), impatient():
        assert BULK[verb](own) == len(own)


@pytest.mark.parametrize("verb", BULK)
def test_a_bulk_verb_waits_for_its_own_timeouts(few: list[Order], verb: str) -> None:
    done: list[int] = []
    rows = dq.pending_timeouts(few[10:12], "remind").values_list("pk", flat=True)
    cross(lambda: done.append(BULK[verb](few)), first=lambda: locked(*rows), then=lambda: done.append(0))
    assert done == [0, len(few)]


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
def next_is_moving(declare: Callable[..., Any]) -> Callable[..., Any]:
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
        ({"atomic": False}, ("fired", 1)),
        ({"when": Q(status="paid")}, ("skipped", 0)),
        ({"handler": no_answer}, ("pending", 1)),
        ({"handler": no_answer, "atomic": False}, ("pending", 1)),
    ],
    ids=["fired", "fired_outside", "skipped", "failed", "failed_outside"],
)
def test_a_firing_waits_for_no_timeout_of_another_object(
    declare: Callable[..., Any], next_is_moving: Callable[..., Any], options: dict[str, Any], end: tuple[str, int]
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


def test_burying_a_dead_timeout_waits_for_no_other(
    declare: Callable[..., Any], next_is_moving: Callable[..., Any]
) -> None:
    policy = declare(Order, no_answer, name="dead", retry=dq.Retry.never())
    order = Order.objects.create()
    dq.schedule_timeout(order, policy, seconds=0)
    assert fire_due(raises=False) == 0
    with next_is_moving(policy):
        assert dq.cancel_timeout(order, policy)
    assert Timeout.objects.filter(policy=policy.label, object_id=str(order.pk)).get().state == "cancelled"


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
