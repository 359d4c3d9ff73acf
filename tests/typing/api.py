"""What type checkers report about the public interface. Checked, never run.

Each `type: ignore` marks a mistake that must be found: strict mypy complains about one that ignores nothing.
`assert_type` checks which types are inferred.
"""

from __future__ import annotations

from datetime import date, datetime, timedelta
from typing import Any, assert_type

from django.db.models import Q, QuerySet

import django_delayq
from django_delayq import (
    Deadline,
    Fired,
    Late,
    Limits,
    Progress,
    Retry,
    Skip,
    Snooze,
    Story,
    TimeoutPolicy,
    Wall,
    Working,
    WorkingHours,
    acancel_timeout,
    aextend_timeout,
    aget_deadline,
    areschedule_timeout,
    aschedule_timeout,
    before_deadline,
    cancel_timeout,
    cancel_timeouts,
    explain_timeout,
    extend_timeout,
    extend_timeouts,
    get_deadline,
    get_policies,
    get_policy,
    get_progress,
    hold_timeout,
    pending_timeouts,
    register_policy,
    reschedule_timeout,
    reschedule_timeouts,
    resume_timeout,
    schedule_timeout,
    schedule_timeouts,
    sync_timeouts,
    timeout_policy,
)
from django_delayq.contrib.countdown import countdown_of
from django_delayq.models import Timeout
from tests.testapp.models import ExpressOrder, Order, Parcel


@timeout_policy(Order, after=timedelta(minutes=30), since="created_at", when=Q(status="unpaid"))
def cancel_unpaid(order: Order, timeout: Timeout) -> None:
    assert_type(order, Order)


@timeout_policy(Order, after=lambda order: timedelta(hours=order.pk), since=lambda order: order.created_at)
async def remind(order: Order, timeout: Timeout) -> None:
    raise Snooze(minutes=5, reason="busy")


@timeout_policy(Parcel, batch=100, retry=Retry.exponential(base=1, factor=2, max=60, times=5, jitter=0.1))
def expire(parcels: QuerySet[Parcel], timeouts: list[Timeout]) -> None:
    parcels.update(status="expired")


@timeout_policy(Parcel, name="digest", batch=100, batch_by="status")
def digest(parcels: QuerySet[Parcel], timeouts: list[Timeout]) -> None: ...


@timeout_policy(Order, name="close", together=50)
def close(order: Order, timeout: Timeout) -> None:
    assert_type(order, Order)


@timeout_policy("testapp.Order", name="by_label", retry=Retry([0, timedelta(minutes=2)]), atomic=False, queue="slow")
def by_label(order: Order, timeout: Timeout) -> None: ...


@timeout_policy(Order)  # type: ignore[arg-type]
def of_another_model(parcel: Parcel, timeout: Timeout) -> None: ...


@timeout_policy(Parcel, batch=10)  # type: ignore[arg-type]
def batch_of_one(parcel: Parcel, timeout: Timeout) -> None: ...


def declarations() -> None:
    assert_type(cancel_unpaid, TimeoutPolicy[Order])
    assert_type(remind, TimeoutPolicy[Order])
    assert_type(expire, TimeoutPolicy[Parcel])
    assert_type(by_label, TimeoutPolicy[Any])
    assert_type(register_policy(cancel_unpaid), TimeoutPolicy[Order])
    assert_type(cancel_unpaid.model, type[Order])
    get_policy("shop.order.cancel_unpaid")
    get_policy((Order, "cancel_unpaid"))
    get_policies()
    timeout_policy(Order, when=Q(), since=None, silenced_checks="W001", limits=Limits(total=timedelta(hours=1)))
    special = {date(2026, 12, 24): "09:00-13:00", date(2026, 12, 31): None}
    office = WorkingHours("Europe/Berlin", {"mon-fri": "09:00-17:00"}, special=special)
    WorkingHours("Europe/Berlin", {"mon-fri": "09:00-17:00"}, special=lambda day: special[day])
    timeout_policy(Order, after=Working(hours=4, calendar=office), since="paid_at", when=Q(), hold_when=Q(status="x"))
    timeout_policy(Order, after=Wall(months=1, at="08:00", zone="shop__zone"), within=lambda order: office)
    timeout_policy(Order, after=lambda order: Wall(days=1), late=Late(Working(hours=1, calendar="shop__calendar")))
    timeout_policy(Order, retention=timedelta(days=730))
    timeout_policy(Order, retention=730)  # type: ignore[call-overload]
    timeout_policy(Order, within=5)  # type: ignore[call-overload]
    timeout_policy(Order, hold_when="waiting")  # type: ignore[call-overload]
    timeout_policy(Order, afte=timedelta(minutes=30))  # type: ignore[call-overload]
    timeout_policy(Order, after=30)  # type: ignore[call-overload]
    timeout_policy(Order, atomic="no")  # type: ignore[call-overload]


def single_verbs(order: Order, parcel: Parcel, row: Timeout, moment: datetime) -> None:
    assert_type(schedule_timeout(order, "cancel_unpaid", minutes=30), Timeout)
    assert_type(schedule_timeout(order, cancel_unpaid, hours=1, minutes=30, payload={"a": 1}), Timeout)
    schedule_timeout(order, cancel_unpaid, at=moment, key="second", on_conflict="keep", reason="phone call")
    schedule_timeout(order, cancel_unpaid, after=timedelta(days=1), on_conflict="error")
    schedule_timeout(order, cancel_unpaid, at=moment, key="day before", on_conflict="once")
    assert_type(cancel_timeout(order, cancel_unpaid, reason="phone call"), bool)
    assert_type(cancel_timeout(row), bool)
    assert_type(reschedule_timeout(order, "cancel_unpaid", at=moment), Timeout | None)
    assert_type(extend_timeout(order, cancel_unpaid, after=Wall(days=1)), Timeout | None)
    assert_type(get_deadline(order, "cancel_unpaid"), datetime | None)
    assert_type(explain_timeout(order, "cancel_unpaid"), Story)
    assert_type(hold_timeout(order, cancel_unpaid, until=moment, reason="in talks"), Timeout | None)
    assert_type(resume_timeout(row), Timeout | None)
    with before_deadline(order, cancel_unpaid) as timeout:
        assert_type(timeout, Timeout | None)
    with before_deadline(order, cancel_unpaid, strict=True, waiting=True):
        pass

    schedule_timeout(parcel, cancel_unpaid, minutes=30)  # type: ignore[misc]
    cancel_timeout(parcel, cancel_unpaid)  # type: ignore[misc]
    hold_timeout(parcel, cancel_unpaid)  # type: ignore[misc]
    resume_timeout(parcel, cancel_unpaid)  # type: ignore[misc]
    hold_timeout(order, cancel_unpaid, until=30)  # type: ignore[arg-type]
    reschedule_timeout(parcel, cancel_unpaid, hours=1)  # type: ignore[misc]
    extend_timeout(parcel, cancel_unpaid, hours=1)  # type: ignore[misc]
    get_deadline(parcel, cancel_unpaid)  # type: ignore[misc]
    explain_timeout(parcel, cancel_unpaid)  # type: ignore[misc]
    countdown_of(parcel, cancel_unpaid)  # type: ignore[misc]
    schedule_timeout(order, "cancel_unpaid", minuts=30)  # type: ignore[call-arg]
    schedule_timeout(order, "cancel_unpaid", minutes="30")  # type: ignore[arg-type]
    schedule_timeout(order, "cancel_unpaid", minutes=30, on_conflict="kep")  # type: ignore[arg-type]
    schedule_timeout("order 7", "cancel_unpaid", minutes=30)  # type: ignore[type-var]
    extend_timeout(order, "cancel_unpaid", at=moment)  # type: ignore[call-arg]
    reschedule_timeout(order, "cancel_unpaid", on_conflict="keep", minutes=1)  # type: ignore[call-arg]
    with before_deadline(parcel, cancel_unpaid):  # type: ignore[misc]
        pass
    django_delayq.schedule_timeot(order, "cancel_unpaid")  # type: ignore[attr-defined]
    Snooze(minuts=5)  # type: ignore[call-arg]
    Retry(delays="often")  # type: ignore[arg-type]


def children_too(express: ExpressOrder, orders: QuerySet[Order]) -> None:
    cancel_timeout(express, cancel_unpaid)
    get_deadline(express, cancel_unpaid)
    pending_timeouts(ExpressOrder, cancel_unpaid)
    pending_timeouts(policy=cancel_unpaid)
    schedule_timeouts(ExpressOrder.objects.all(), cancel_unpaid, minutes=5)
    schedule_timeouts(orders.annotate(deadline=Deadline("cancel_unpaid")), cancel_unpaid, minutes=5)
    with before_deadline(express, cancel_unpaid):
        pass


def relation(order: Order) -> None:
    assert_type(order.timeouts.get(), Timeout)
    assert_type(order.timeouts.pending().first(), Timeout | None)
    assert_type([row.due_at for row in order.timeouts.filter(state="fired").order_by("id")], list[datetime])
    cancel_timeouts(order.timeouts.all())
    order.timeouts.pendig()  # type: ignore[attr-defined]


def selecting_and_bulk(orders: QuerySet[Order], order: Order, parcels: QuerySet[Parcel], parcel: Parcel) -> None:
    assert_type(get_progress(order, "cancel_unpaid"), Progress | None)
    get_progress(parcel, cancel_unpaid)  # type: ignore[misc]
    pending = pending_timeouts(order, "cancel_unpaid")
    pending_timeouts(Order, cancel_unpaid, key="second")
    pending_timeouts([order])
    assert_type(pending.get(), Timeout)
    assert_type(schedule_timeouts(orders, cancel_unpaid, minutes=5), int)
    assert_type(cancel_timeouts(pending), int)
    assert_type(extend_timeouts(pending, hours=1), int)
    assert_type(reschedule_timeouts(pending, days=1), int)
    assert_type(sync_timeouts(orders), int)
    assert_type(sync_timeouts(order), int)
    orders.annotate(deadline=Deadline("cancel_unpaid")).order_by("deadline")

    schedule_timeouts(orders, cancel_unpaid, minuts=5)  # type: ignore[call-arg]
    schedule_timeouts(parcels, cancel_unpaid, minutes=5)  # type: ignore[misc]
    schedule_timeouts([parcel], cancel_unpaid, minutes=5)  # type: ignore[misc]
    pending_timeouts(parcel, cancel_unpaid)  # type: ignore[misc]
    pending_timeouts(Parcel, cancel_unpaid)  # type: ignore[misc]
    cancel_timeouts(orders)  # type: ignore[arg-type]
    orders.annotate(deadline=Deadline(7))  # type: ignore[arg-type]


async def async_twins(order: Order, parcel: Parcel, moment: datetime) -> None:
    assert_type(await aschedule_timeout(order, cancel_unpaid, minutes=30), Timeout)
    assert_type(await acancel_timeout(order, "cancel_unpaid"), bool)
    assert_type(await areschedule_timeout(order, "cancel_unpaid", at=moment), Timeout | None)
    assert_type(await aextend_timeout(order, "cancel_unpaid", hours=1), Timeout | None)
    assert_type(await aget_deadline(order, "cancel_unpaid"), datetime | None)
    await aschedule_timeout(parcel, cancel_unpaid, minutes=30)  # type: ignore[misc]
    await acancel_timeout(parcel, cancel_unpaid)  # type: ignore[misc]
    await areschedule_timeout(parcel, cancel_unpaid, at=moment)  # type: ignore[misc]
    await aextend_timeout(parcel, cancel_unpaid, hours=1)  # type: ignore[misc]
    await aget_deadline(parcel, cancel_unpaid)  # type: ignore[misc]


def rows(row: Timeout) -> None:
    assert_type(row.state, str)
    assert_type(row.due_at, datetime)
    assert_type(row.settled_at, datetime | None)
    assert_type(row.idempotency_key, str)
    row.due_at = 7  # type: ignore[assignment]


@cancel_unpaid.confirm(timeout=timedelta(seconds=10))
def ask(order: Order, timeout: Timeout) -> Skip | Snooze | None:
    assert_type(order, Order)
    return Skip("paid") if order.note else None


@cancel_unpaid.confirm()
async def ask_later(order: Order, timeout: Timeout) -> Snooze | None:
    return Snooze(minutes=5)


@cancel_unpaid.confirm()  # type: ignore[arg-type] # neither yes nor no
def answer_yes(order: Order, timeout: Timeout) -> bool:
    return True


@cancel_unpaid.confirm()  # type: ignore[arg-type] # only a handler returns it
def answer_fired(order: Order, timeout: Timeout) -> Fired:
    return Fired("no")


cancel_unpaid.confirm(timeout=10)  # type: ignore[arg-type]


@timeout_policy(Order)
def keep(order: Order, timeout: Timeout) -> Fired | Skip | None:
    return Fired("found paid") if order.note else Skip("why")
