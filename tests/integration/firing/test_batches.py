"""`batch=n`: one call for many objects; one bad one does not hold up the rest."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.db.models import Q, QuerySet
from django.utils import timezone

import django_delayq as dq
from django_delayq.firing import plan
from django_delayq.firing.handler import set_checkpoint_hook
from django_delayq.models import Timeout
from tests.integration.firing.conftest import due, fire, locking, needs_row_locks, state
from tests.testapp.models import Effect, Order, Parcel, Voucher

pytestmark = pytest.mark.django_db(transaction=True)
Declare = Callable[..., dq.TimeoutPolicy[Any]]
FIRED = ("fired", "due")


def test_a_batch_gets_a_queryset_of_locked_objects_and_their_timeouts_in_the_same_order(declare: Declare) -> None:
    calls: list[tuple[list[int], list[str], set[str], str]] = []

    def handler(queryset: QuerySet[Order], timeouts: list[Timeout]) -> None:
        pks, ids = [obj.pk for obj in queryset], [timeout.object_id for timeout in timeouts]
        calls.append((pks, ids, {timeout.state for timeout in timeouts}, queryset.db))
        queryset.update(status="closed")

    policy = declare(Order, handler, name="closes", batch=3, when=Q(status="unpaid"))
    orders = [Order.objects.create() for _ in range(5)]
    rows = [due(order, policy) for order in reversed(orders)]
    paid = due(Order.objects.create(status="paid"), policy)
    works, _ = plan({row.pk: 1 for row in [*rows, paid]}, "default")
    assert [len(work.ids) for work in works] == [3, 3]
    fire(*rows, paid)
    assert [pks for pks, *_ in calls] == [[order.pk for order in orders[2:]], [order.pk for order in orders[:2]]]
    for pks, object_ids, states, using in calls:
        assert [str(pk) for pk in pks] == object_ids
        assert (states, using) == ({"fired"}, "default")
    assert {state(row) for row in rows} == {FIRED}
    assert state(paid) == ("skipped", "condition")
    assert Order.objects.filter(status="closed").count() == 5


@pytest.mark.parametrize("model", [Parcel, Voucher])
def test_queryset_and_timeouts_correspond_whatever_the_keys(declare: Declare, model: Any) -> None:
    pairs: list[tuple[str, str]] = []

    def handler(queryset: QuerySet[Any], timeouts: list[Timeout]) -> None:
        pairs.extend((str(obj.pk), timeout.object_id) for obj, timeout in zip(queryset, timeouts, strict=True))

    policy = declare(model, handler, name="corresponds", batch=50)
    texts = ["b", "A", "ö", "Z", "a1", "0", "_"]
    objects = [model.objects.create(**({} if model is Parcel else {"code": text})) for text in texts]
    fire(*[due(obj, policy) for obj in objects])
    assert len(pairs) == len(objects)
    assert all(pk == object_id for pk, object_id in pairs)


def test_one_call_for_the_batch_and_one_commit(orders: list[Order], declare: Declare) -> None:
    calls: list[int] = []
    begun: list[str] = []
    policy = declare(Order, lambda queryset, timeouts: calls.append(len(timeouts)), name="once", batch=500)
    set_checkpoint_hook(lambda step: begun.append(step) if step == "begun" else None)
    fire(*[due(order, policy) for order in orders])
    assert (calls, begun) == ([5], ["begun"])


@pytest.mark.parametrize("error", [ValueError("bad"), dq.Skip("bad"), dq.Snooze(minutes=1), SystemExit(1)])
def test_a_bad_one_cannot_hold_the_rest(orders: list[Order], declare: Declare, error: BaseException) -> None:
    calls: list[int] = []

    def handler(queryset: QuerySet[Order], timeouts: list[Timeout]) -> None:
        calls.append(len(timeouts))
        for obj in queryset:
            Effect.objects.create(what="closed", object_id=obj.pk)
            if obj.pk == orders[3].pk:
                raise error

    policy = declare(Order, handler, name="one_bad", batch=10, retry=dq.Retry([60]))
    rows = [due(order, policy) for order in orders]
    fire(*rows)
    bad = rows.pop(3)
    assert calls == [5, 1, 1, 1, 1, 1]
    assert {state(row) for row in rows} == {FIRED}
    assert state(bad)[0] == ("skipped" if isinstance(error, dq.Skip) else "pending")
    assert bad.attempts == (0 if isinstance(error, dq.Snooze) else 1)
    assert sorted(Effect.objects.values_list("object_id", flat=True)) == sorted(row.object_id for row in rows)


@pytest.mark.dialect
@needs_row_locks
def test_a_batch_leaves_out_what_others_hold(orders: list[Order], declare: Declare) -> None:
    sizes: list[int] = []
    policy = declare(Order, lambda queryset, timeouts: sizes.append(queryset.count()), name="partly", batch=10)
    rows = [due(order, policy) for order in orders]
    with locking(orders[0]):
        assert set(fire(*rows).again) == {rows[0].pk}
    assert sizes == [4]


def test_two_timeouts_of_one_object_never_meet_in_a_batch(order: Order, declare: Declare) -> None:
    calls: list[list[str]] = []
    policy = declare(
        Order, lambda queryset, timeouts: calls.append([timeout.key for timeout in timeouts]), name="keys", batch=10
    )
    fire(*[due(order, policy, key=key) for key in "abc"])
    assert calls == [["a"], ["b"], ["c"]]


def test_what_a_batch_did_by_update_arms_and_cancels_in_the_same_transaction(declare: Declare) -> None:
    declare(Order, name="next_step", when=Q(status="closed"), since="paid_at", after=timedelta(days=1))

    def handler(queryset: QuerySet[Order], timeouts: list[Timeout]) -> None:
        queryset.update(status="closed", paid_at=timezone.now())

    policy = declare(Order, handler, name="closes", batch=10)
    orders = [Order.objects.create(created_at=timezone.now()) for _ in range(3)]
    assert Timeout.objects.pending().of_labels(["testapp.order.cancel_unpaid"]).count() == 3
    seen: list[int] = []
    set_checkpoint_hook(lambda step: seen.append(Timeout.objects.pending().count()) if step == "handled" else None)
    fire(*[due(order, policy) for order in orders])
    assert Timeout.objects.pending().of_labels(["testapp.order.next_step"]).count() == 3
    assert Timeout.objects.filter(policy="testapp.order.cancel_unpaid", state="cancelled").count() == 3
    assert seen == [3], "armed and cancelled before the commit"


def test_an_object_deleted_by_its_batch_is_no_trouble(orders: list[Order], declare: Declare) -> None:
    policy = declare(Order, lambda queryset, timeouts: queryset.delete(), name="deletes", batch=10)
    rows = [due(order, policy) for order in orders]
    fire(*rows)
    assert {state(row) for row in rows} == {FIRED}
    assert not Order.objects.exists()


def test_a_batch_in_which_nothing_matches_calls_no_handler(orders: list[Order], declare: Declare) -> None:
    policy = declare(Order, lambda queryset, timeouts: pytest.fail("called"), name="none", batch=9, when=Q(status="x"))
    rows = [due(order, policy) for order in orders]
    fire(*rows)
    assert {state(row) for row in rows} == {("skipped", "condition")}


def test_a_suspect_of_a_batch_policy_is_fired_as_a_batch_of_one(orders: list[Order], declare: Declare) -> None:
    calls: list[int] = []
    policy = declare(Order, lambda queryset, timeouts: calls.append(len(timeouts)), name="suspects", batch=10)
    rows = [due(order, policy) for order in orders[:2]]
    fire(*rows, deliveries=2)
    assert calls == [1, 1]
    assert {(state(row), row.attempts) for row in rows} == {(FIRED, 1)}
