"""What type checkers report about the public interface. Checked, never run.

Each `type: ignore` marks a mistake that must be found: strict mypy complains about one that ignores nothing.
`assert_type` checks which types are inferred.
"""

from __future__ import annotations

from datetime import date, datetime, timedelta
from typing import Any, assert_type

from django.db.models import Q, QuerySet

import django_delayq as dq
from django_delayq.contrib.countdown import countdown_of
from django_delayq.models import Timeout
from tests.testapp.models import ExpressOrder, Order, Parcel


@dq.timeout_policy(Order, after=timedelta(minutes=30), since="created_at", when=Q(status="unpaid"))
def cancel_unpaid(order: Order, timeout: Timeout) -> None:
    assert_type(order, Order)


@dq.timeout_policy(Order, after=lambda order: timedelta(hours=order.pk), since=lambda order: order.created_at)
async def remind(order: Order, timeout: Timeout) -> None:
    raise dq.Snooze(minutes=5, reason="busy")


@dq.timeout_policy(Parcel, batch=100, retry=dq.Retry.exponential(base=1, factor=2, max=60, times=5, jitter=0.1))
def expire(parcels: QuerySet[Parcel], timeouts: list[Timeout]) -> None:
    parcels.update(status="expired")


@dq.timeout_policy(Parcel, name="digest", batch=100, batch_by="status")
def digest(parcels: QuerySet[Parcel], timeouts: list[Timeout]) -> None: ...


@dq.timeout_policy(Order, name="close", together=50)
def close(order: Order, timeout: Timeout) -> None:
    assert_type(order, Order)


@dq.timeout_policy(
    "testapp.Order", name="by_label", retry=dq.Retry([0, timedelta(minutes=2)]), atomic=False, queue="slow"
)
def by_label(order: Order, timeout: Timeout) -> None: ...


@dq.timeout_policy(Order)  # type: ignore[arg-type]
def of_another_model(parcel: Parcel, timeout: Timeout) -> None: ...


@dq.timeout_policy(Parcel, batch=10)  # type: ignore[arg-type]
def batch_of_one(parcel: Parcel, timeout: Timeout) -> None: ...


def declarations() -> None:
    assert_type(cancel_unpaid, dq.TimeoutPolicy[Order])
    assert_type(remind, dq.TimeoutPolicy[Order])
    assert_type(expire, dq.TimeoutPolicy[Parcel])
    assert_type(by_label, dq.TimeoutPolicy[Any])
    assert_type(dq.register_policy(cancel_unpaid), dq.TimeoutPolicy[Order])
    assert_type(cancel_unpaid.model, type[Order])
    dq.get_policy("shop.order.cancel_unpaid")
    dq.get_policy((Order, "cancel_unpaid"))
    dq.get_policies()
    dq.timeout_policy(Order, when=Q(), since=None, silenced_checks="W001", limits=dq.Limits(total=timedelta(hours=1)))
    special = {date(2026, 12, 24): "09:00-13:00", date(2026, 12, 31): None}
    office = dq.WorkingHours("Europe/Berlin", {"mon-fri": "09:00-17:00"}, special=special)
    dq.WorkingHours("Europe/Berlin", {"mon-fri": "09:00-17:00"}, special=lambda day: special[day])
    dq.timeout_policy(
        Order, after=dq.Working(hours=4, calendar=office), since="paid_at", when=Q(), hold_when=Q(status="x")
    )
    dq.timeout_policy(Order, after=dq.Wall(months=1, at="08:00", zone="shop__zone"), within=lambda order: office)
    dq.timeout_policy(
        Order, after=lambda order: dq.Wall(days=1), late=dq.Late(dq.Working(hours=1, calendar="shop__calendar"))
    )
    dq.timeout_policy(Order, retention=timedelta(days=730))
    dq.timeout_policy(Order, retention=730)  # type: ignore[call-overload]
    dq.timeout_policy(Order, within=5)  # type: ignore[call-overload]
    dq.timeout_policy(Order, hold_when="waiting")  # type: ignore[call-overload]
    dq.timeout_policy(Order, afte=timedelta(minutes=30))  # type: ignore[call-overload]
    dq.timeout_policy(Order, after=30)  # type: ignore[call-overload]
    dq.timeout_policy(Order, atomic="no")  # type: ignore[call-overload]


def single_verbs(order: Order, parcel: Parcel, row: Timeout, moment: datetime) -> None:
    assert_type(dq.schedule_timeout(order, "cancel_unpaid", minutes=30), Timeout)
    assert_type(dq.schedule_timeout(order, cancel_unpaid, hours=1, minutes=30, payload={"a": 1}), Timeout)
    dq.schedule_timeout(order, cancel_unpaid, at=moment, key="second", on_conflict="keep", reason="phone call")
    dq.schedule_timeout(order, cancel_unpaid, after=timedelta(days=1), on_conflict="error")
    dq.schedule_timeout(order, cancel_unpaid, at=moment, key="day before", on_conflict="once")
    assert_type(dq.cancel_timeout(order, cancel_unpaid, reason="phone call"), bool)
    assert_type(dq.cancel_timeout(row), bool)
    assert_type(dq.reschedule_timeout(order, "cancel_unpaid", at=moment), Timeout | None)
    assert_type(dq.extend_timeout(order, cancel_unpaid, after=dq.Wall(days=1)), Timeout | None)
    assert_type(dq.get_deadline(order, "cancel_unpaid"), datetime | None)
    assert_type(dq.explain_timeout(order, "cancel_unpaid"), dq.Story)
    assert_type(dq.hold_timeout(order, cancel_unpaid, until=moment, reason="in talks"), Timeout | None)
    assert_type(dq.resume_timeout(row), Timeout | None)
    with dq.before_deadline(order, cancel_unpaid) as timeout:
        assert_type(timeout, Timeout | None)
    with dq.before_deadline(order, cancel_unpaid, strict=True, waiting=True):
        pass

    dq.schedule_timeout(parcel, cancel_unpaid, minutes=30)  # type: ignore[misc]
    dq.cancel_timeout(parcel, cancel_unpaid)  # type: ignore[misc]
    dq.hold_timeout(parcel, cancel_unpaid)  # type: ignore[misc]
    dq.resume_timeout(parcel, cancel_unpaid)  # type: ignore[misc]
    dq.hold_timeout(order, cancel_unpaid, until=30)  # type: ignore[arg-type]
    dq.reschedule_timeout(parcel, cancel_unpaid, hours=1)  # type: ignore[misc]
    dq.extend_timeout(parcel, cancel_unpaid, hours=1)  # type: ignore[misc]
    dq.get_deadline(parcel, cancel_unpaid)  # type: ignore[misc]
    dq.explain_timeout(parcel, cancel_unpaid)  # type: ignore[misc]
    countdown_of(parcel, cancel_unpaid)  # type: ignore[misc]
    dq.schedule_timeout(order, "cancel_unpaid", minuts=30)  # type: ignore[call-arg]
    dq.schedule_timeout(order, "cancel_unpaid", minutes="30")  # type: ignore[arg-type]
    dq.schedule_timeout(order, "cancel_unpaid", minutes=30, on_conflict="kep")  # type: ignore[arg-type]
    dq.schedule_timeout("order 7", "cancel_unpaid", minutes=30)  # type: ignore[type-var]
    dq.extend_timeout(order, "cancel_unpaid", at=moment)  # type: ignore[call-arg]
    dq.reschedule_timeout(order, "cancel_unpaid", on_conflict="keep", minutes=1)  # type: ignore[call-arg]
    with dq.before_deadline(parcel, cancel_unpaid):  # type: ignore[misc]
        pass
    dq.schedule_timeot(order, "cancel_unpaid")  # type: ignore[attr-defined]
    dq.Snooze(minuts=5)  # type: ignore[call-arg]
    dq.Retry(delays="often")  # type: ignore[arg-type]


def children_too(express: ExpressOrder, orders: QuerySet[Order]) -> None:
    dq.cancel_timeout(express, cancel_unpaid)
    dq.get_deadline(express, cancel_unpaid)
    dq.pending_timeouts(ExpressOrder, cancel_unpaid)
    dq.pending_timeouts(policy=cancel_unpaid)
    dq.schedule_timeouts(ExpressOrder.objects.all(), cancel_unpaid, minutes=5)
    dq.schedule_timeouts(orders.annotate(deadline=dq.Deadline("cancel_unpaid")), cancel_unpaid, minutes=5)
    with dq.before_deadline(express, cancel_unpaid):
        pass


def relation(order: Order) -> None:
    assert_type(order.timeouts.get(), Timeout)
    assert_type(order.timeouts.pending().first(), Timeout | None)
    assert_type([row.due_at for row in order.timeouts.filter(state="fired").order_by("id")], list[datetime])
    dq.cancel_timeouts(order.timeouts.all())
    order.timeouts.pendig()  # type: ignore[attr-defined]


def selecting_and_bulk(orders: QuerySet[Order], order: Order, parcels: QuerySet[Parcel], parcel: Parcel) -> None:
    assert_type(dq.get_progress(order, "cancel_unpaid"), dq.Progress | None)
    dq.get_progress(parcel, cancel_unpaid)  # type: ignore[misc]
    pending = dq.pending_timeouts(order, "cancel_unpaid")
    dq.pending_timeouts(Order, cancel_unpaid, key="second")
    dq.pending_timeouts([order])
    assert_type(pending.get(), Timeout)
    assert_type(dq.schedule_timeouts(orders, cancel_unpaid, minutes=5), int)
    assert_type(dq.cancel_timeouts(pending), int)
    assert_type(dq.extend_timeouts(pending, hours=1), int)
    assert_type(dq.reschedule_timeouts(pending, days=1), int)
    assert_type(dq.sync_timeouts(orders), int)
    assert_type(dq.sync_timeouts(order), int)
    orders.annotate(deadline=dq.Deadline("cancel_unpaid")).order_by("deadline")

    dq.schedule_timeouts(orders, cancel_unpaid, minuts=5)  # type: ignore[call-arg]
    dq.schedule_timeouts(parcels, cancel_unpaid, minutes=5)  # type: ignore[misc]
    dq.schedule_timeouts([parcel], cancel_unpaid, minutes=5)  # type: ignore[misc]
    dq.pending_timeouts(parcel, cancel_unpaid)  # type: ignore[misc]
    dq.pending_timeouts(Parcel, cancel_unpaid)  # type: ignore[misc]
    dq.cancel_timeouts(orders)  # type: ignore[arg-type]
    orders.annotate(deadline=dq.Deadline(7))  # type: ignore[arg-type]


async def async_twins(order: Order, parcel: Parcel, moment: datetime) -> None:
    assert_type(await dq.aschedule_timeout(order, cancel_unpaid, minutes=30), Timeout)
    assert_type(await dq.acancel_timeout(order, "cancel_unpaid"), bool)
    assert_type(await dq.areschedule_timeout(order, "cancel_unpaid", at=moment), Timeout | None)
    assert_type(await dq.aextend_timeout(order, "cancel_unpaid", hours=1), Timeout | None)
    assert_type(await dq.aget_deadline(order, "cancel_unpaid"), datetime | None)
    await dq.aschedule_timeout(parcel, cancel_unpaid, minutes=30)  # type: ignore[misc]
    await dq.acancel_timeout(parcel, cancel_unpaid)  # type: ignore[misc]
    await dq.areschedule_timeout(parcel, cancel_unpaid, at=moment)  # type: ignore[misc]
    await dq.aextend_timeout(parcel, cancel_unpaid, hours=1)  # type: ignore[misc]
    await dq.aget_deadline(parcel, cancel_unpaid)  # type: ignore[misc]


def rows(row: Timeout) -> None:
    assert_type(row.state, str)
    assert_type(row.due_at, datetime)
    assert_type(row.settled_at, datetime | None)
    assert_type(row.idempotency_key, str)
    row.due_at = 7  # type: ignore[assignment]


@cancel_unpaid.confirm(timeout=timedelta(seconds=10))
def ask(order: Order, timeout: Timeout) -> dq.Skip | dq.Snooze | None:
    assert_type(order, Order)
    return dq.Skip("paid") if order.note else None


@cancel_unpaid.confirm()
async def ask_later(order: Order, timeout: Timeout) -> dq.Snooze | None:
    return dq.Snooze(minutes=5)


@cancel_unpaid.confirm()  # type: ignore[arg-type] # neither yes nor no
def answer_yes(order: Order, timeout: Timeout) -> bool:
    return True


@cancel_unpaid.confirm()  # type: ignore[arg-type] # only a handler returns it
def answer_fired(order: Order, timeout: Timeout) -> dq.Fired:
    return dq.Fired("no")


cancel_unpaid.confirm(timeout=10)  # type: ignore[arg-type]


@dq.timeout_policy(Order)
def keep(order: Order, timeout: Timeout) -> dq.Fired | dq.Skip | None:
    return dq.Fired("found paid") if order.note else dq.Skip("why")
