"""What models send: saves of late proxies, deletions, and bulk writes, which arm as saving does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.apps import apps
from django.db import IntegrityError, connection, transaction
from django.db.models import Case, Exists, Q, QuerySet, When
from django.db.models.signals import post_delete, post_save, pre_delete, pre_save
from django.utils import timezone

from django_delayq import ArmingManager, ArmingQuerySet, get_deadline
from django_delayq.models import Timeout
from django_delayq.policy.policies import M
from django_delayq.sql import statements
from django_delayq.testing import assert_cancelled, assert_not_scheduled, assert_scheduled
from tests.e2e.races.sessions import Session, needs_row_locks
from tests.support.typed import Declare
from tests.testapp.models import ExpressOrder, Item, Order, OrderProxy, Parcel, Task, Voucher

pytestmark = [pytest.mark.dialect, pytest.mark.django_db(transaction=True)]
HALF_AN_HOUR = timedelta(minutes=30)


@pytest.fixture
def now() -> datetime:
    return timezone.now().replace(microsecond=0)


@pytest.fixture
def placed(now: datetime) -> list[Order]:
    """Five unpaid orders, with their timeouts."""
    return orders().bulk_create([Order(created_at=now) for _ in range(5)])


@pytest.fixture
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statements, "CHUNK", 2)


def rows_of(model: type[M]) -> ArmingQuerySet[M]:
    return ArmingQuerySet(model)


def orders() -> ArmingQuerySet[Order]:
    return rows_of(Order)


def ends() -> list[tuple[str, str]]:
    return list(Timeout.objects.order_by("id").values_list("state", "cause"))


def pending() -> int:
    return Timeout.objects.pending().count()


@pytest.fixture
def make_proxy() -> Iterator[Callable[..., Any]]:
    """Make a proxy of a model after the policies are declared, as in an `admin.py`; the end of the test removes it."""
    made: list[Any] = []

    def do(base: Any) -> Any:
        meta = type("Meta", (), {"app_label": "testapp", "proxy": True})
        made.append(type("LateOrder", (base,), {"__module__": __name__, "Meta": meta}))
        return made[-1]

    yield do
    for model in made:
        for signal in (pre_save, post_save, pre_delete, post_delete):
            for receiver in ("arm_saved", "lock_parents_first", "note_deletion", "cancel_deleted"):
                signal.disconnect(sender=model, dispatch_uid=f"django_delayq.{receiver}")
        del apps.all_models["testapp"][model._meta.model_name]
    apps.clear_cache()


@pytest.mark.parametrize("base", [Order, OrderProxy])
def test_a_proxy_that_is_loaded_after_the_policies_arms_and_cancels(
    make_proxy: Callable[..., Any], base: Any, now: datetime
) -> None:
    late = make_proxy(base)
    order, other = (late.objects.create(created_at=now) for _ in range(2))
    assert pending() == 2
    order.status = "paid"
    order.save()
    late.objects.filter(pk=other.pk).delete()
    assert ends() == [("cancelled", "condition"), ("cancelled", "gone")]


def test_a_receiver_that_deletes_other_rows_of_the_table_does_not_hide_the_first_deletion(placed: list[Order]) -> None:
    def delete_next(instance: Order, **_: Any) -> None:
        if instance.pk == placed[0].pk:
            Order.objects.get(pk=placed[1].pk).delete()

    pre_delete.connect(delete_next, Order)
    try:
        Order.objects.get(pk=placed[0].pk).delete()
    finally:
        pre_delete.disconnect(delete_next, Order)
    assert sorted(ends()) == [*[("cancelled", "gone")] * 2, *[("pending", "")] * 3]


# `ArmingQuerySet` and `ArmingManager`: bulk writes schedule and cancel in the same transaction, as saving does.


def test_bulk_create_arms(placed: list[Order], now: datetime) -> None:
    assert [get_deadline(order, "cancel_unpaid") for order in placed] == [now + HALF_AN_HOUR] * 5
    orders().bulk_create([Order(created_at=now, status="paid"), Order()], batch_size=1)
    assert pending() == 5
    assert orders().bulk_create([]) == []


def test_rows_whose_policy_raises_are_not_written(declare: Declare, now: datetime) -> None:
    def since(order: Order) -> datetime:
        if order.note == "wrong":
            raise ZeroDivisionError
        return now

    declare(Order, name="wrong", since=since, after=HALF_AN_HOUR, when=Q(status="unpaid"))
    with pytest.raises(ZeroDivisionError):
        orders().bulk_create([Order(note="wrong")])
    assert not Order.objects.exists()
    order = Order.objects.create()
    with pytest.raises(ZeroDivisionError):
        orders().update(note="wrong")
    order.refresh_from_db()
    assert order.note is None


def test_update_cancels_arms_and_moves(placed: list[Order], now: datetime, small_pages: None) -> None:
    assert orders().filter(pk__gt=placed[0].pk).update(status="paid") == 4
    assert_scheduled(placed[0], "cancel_unpaid")
    assert assert_cancelled(placed[4], "cancel_unpaid").cause == "condition"
    assert orders().order_by("-pk").update(status="unpaid", created_at=now + timedelta(hours=1)) == 5
    assert [get_deadline(order, "cancel_unpaid") for order in placed] == [now + timedelta(hours=1) + HALF_AN_HOUR] * 5
    assert orders().filter(status="nothing").update(status="paid") == 0


def test_a_condition_that_reads_what_the_update_changes_is_evaluated_once(
    placed: list[Order], small_pages: None
) -> None:
    first_is_unpaid = Exists(Order.objects.filter(pk=placed[0].pk, status="unpaid"))
    assert orders().filter(first_is_unpaid).update(status="paid") == 5
    assert pending() == 0


def test_an_update_arms_the_new_owners_of_the_rows_of_each_page(
    declare: Declare, now: datetime, small_pages: None
) -> None:
    declare(Task, name="opens", since="begun_at", after=HALF_AN_HOUR, when=Q(items__is_open=True))
    first, second = (Task.objects.create(begun_at=now) for _ in range(2))
    *_, last = [Item.objects.create(task=first) for _ in range(3)]
    rows_of(Item).update(task=Case(When(pk=last.pk, then=second.pk), default=first.pk))
    assert_scheduled(second, "opens")


def test_bulk_update_and_the_async_methods_arm(placed: list[Order], now: datetime) -> None:
    for order in placed[:2]:
        order.created_at = now + timedelta(hours=1)
    assert orders().bulk_update(placed[:2], ["created_at"], batch_size=1) == 2
    assert get_deadline(placed[1], "cancel_unpaid") == now + timedelta(hours=1) + HALF_AN_HOUR

    @async_to_sync
    async def write() -> list[Order]:
        made: list[Order] = await orders().abulk_create([Order(created_at=now)])
        assert await orders().filter(pk=placed[3].pk).aupdate(status="paid") == 1
        placed[4].status = "paid"
        await orders().abulk_update([placed[4]], ["status"])
        return made

    assert_scheduled(write()[0], "cancel_unpaid", due=now + HALF_AN_HOUR)
    assert_cancelled(placed[3], "cancel_unpaid")
    assert_cancelled(placed[4], "cancel_unpaid")
    child = ExpressOrder.objects.create(created_at=now)
    rows_of(ExpressOrder).filter(courier="").update(status="paid", courier="Ann")
    assert_cancelled(child, "cancel_unpaid")  # by a column of its parent


def test_with_ignored_conflicts_the_keys_must_be_known(now: datetime) -> None:
    present = Parcel.objects.create(sent_at=now, status="lost")
    new = Parcel(sent_at=now)
    rows_of(Parcel).bulk_create([Parcel(pk=present.pk, sent_at=now), new], ignore_conflicts=True)
    assert_not_scheduled(present, "chase")
    assert_scheduled(Parcel.objects.get(pk=new.pk), "chase")
    with pytest.raises(ValueError, match=r"because ignore_conflicts=True does not return.*Order\._base_manager"):
        orders().bulk_create([Order(created_at=now)], ignore_conflicts=True)
    assert not Order.objects.exists()


def test_an_upsert_arms_and_cancels(now: datetime) -> None:
    target: dict[str, Any] = {} if connection.vendor == "mysql" else {"unique_fields": ["code"]}
    for status, found in (("open", ["pending"]), ("used", ["cancelled"])):
        rows_of(Voucher).bulk_create(
            [Voucher(code="A", status=status, issued_at=now)],
            update_conflicts=True, update_fields=["status"], **target,
        )  # fmt: skip
        assert list(Timeout.objects.values_list("state", flat=True)) == found


def test_an_upsert_that_may_find_rows_under_other_keys_is_refused(
    now: datetime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Parcel._meta, "unique_together", (("status",),))
    options: dict[str, Any] = {} if connection.vendor == "mysql" else {"unique_fields": ["status"]}
    with pytest.raises(ValueError, match="keeps its own key"):
        rows_of(Parcel).bulk_create([Parcel(sent_at=now)], update_conflicts=True, update_fields=["sent_at"], **options)


def test_an_error_of_the_database_passes_and_arms_nothing(now: datetime) -> None:
    vouchers = [Voucher(code="B", issued_at=now), Voucher(code=Voucher.objects.create(code="A").code)]
    with pytest.raises(IntegrityError), transaction.atomic():
        rows_of(Voucher).bulk_create(vouchers)
    assert pending() == 0


@needs_row_locks
def test_a_row_that_stops_matching_while_it_is_waited_for_is_not_updated(placed: list[Order]) -> None:
    results: list[int] = []
    with transaction.atomic():
        Order.objects.filter(pk=placed[2].pk).update(status="paid")
        session = Session(lambda: results.append(orders().filter(status="unpaid").update(status="cancelled")))
        session.wait_until_it_waits()  # it has read the keys
    session.end()
    placed[2].refresh_from_db()
    assert (results, placed[2].status) == ([4], "paid")
    assert_cancelled(placed[2], "cancel_unpaid")


class Orders(ArmingQuerySet[Order]):
    def unpaid(self) -> Orders:
        return self.filter(status="unpaid")


@pytest.mark.parametrize("kind", [ArmingManager[Order], ArmingManager.from_queryset(Orders)], ids=["plain", "own"])
def test_a_manager_has_the_methods_of_a_queryset_that_arms_and_of_no_other(now: datetime, kind: Any) -> None:
    manager = kind()
    manager.model = Order
    [order] = manager.bulk_create([Order(created_at=now)])
    assert_scheduled(order, "cancel_unpaid")
    rows = manager.unpaid() if hasattr(manager, "unpaid") else manager.using("default").filter(pk=order.pk)
    assert rows.update(status="paid") == 1
    assert_cancelled(order, "cancel_unpaid")
    with pytest.raises(TypeError, match="QuerySet must derive from ArmingQuerySet"):
        ArmingManager.from_queryset(QuerySet)
