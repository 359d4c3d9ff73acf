"""A round that is armed again, because its condition holds again, keeps its extensions and its moved deadline."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from django.db import connection, transaction
from django.db.models import Q
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

import django_delayq as dq
from django_delayq import clock, operations, testing
from django_delayq.arming.sync import sync_policy
from django_delayq.models import Timeout
from tests.testapp.models import Order

if TYPE_CHECKING:
    from django_delayq import TimeoutPolicy

Declare = Callable[..., "TimeoutPolicy[Any]"]
pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("controls_are_read_again")]
MINUTE = timedelta(minutes=1)


def extend(order: Order) -> None:
    assert dq.extend_timeout(order, "cancel_unpaid", minutes=60)


def postpone(order: Order) -> None:
    operations.postpone(order.timeouts.get(), by="admin:a", minutes=60, reason="promised on the phone")


def reschedule(order: Order) -> None:
    assert dq.reschedule_timeout(order, "cancel_unpaid", minutes=65)


def hold(order: Order) -> None:
    label = "testapp.order.cancel_unpaid"
    operations.hold(label, by="admin:a", reason="payment provider is down")
    with clock.set_to(clock.now() + 60 * MINUTE):
        operations.resume(label, by="admin:a")


def fail_to_pay(how: str) -> None:
    """Make the condition of all orders false, and then true again."""
    for status in ("paying", "unpaid"):
        if how == "save":
            for order in Order.objects.all():
                order.status = status
                order.save()
            continue
        Order.objects.update(status=status)
        if how == "bulk":
            dq.sync_timeouts(Order.objects.all())
        else:
            sync_policy(dq.get_policy((Order, "cancel_unpaid")), "default")


@pytest.mark.parametrize("how", ["save", "bulk", "sync"])
@pytest.mark.parametrize("move", [extend, postpone, reschedule, hold])
def test_a_moved_deadline_survives_a_payment_that_fails(move: Callable[[Order], None], how: str, settings: Any) -> None:
    settings.DELAYQ = {**settings.DELAYQ, "SYNC_INTERVAL": timedelta(hours=1)}  # no first deadline is too old
    begin = timezone.now()
    order, other = (Order.objects.create(status="unpaid", created_at=begin) for _ in range(2))
    with clock.set_to(begin + 25 * MINUTE):
        move(order)
    before = order.timeouts.values_list("due_at", "first_due_at", "extensions").get()
    plain = other.timeouts.values_list("due_at", "first_due_at", "extensions").get()
    with clock.set_to(begin + (86 if move is hold else 26) * MINUTE):  # the hold ends after 85
        for _ in range(2):
            fail_to_pay(how)
    for each, expected in ((order, before), (other, plain)):
        row = each.timeouts.get(state="pending")
        assert (row.due_at, row.first_due_at, row.extensions) == expected
        assert row.run_at == row.due_at
    with clock.set_to(begin + 80 * MINUTE):
        testing.fire_due()
    order.refresh_from_db()
    assert order.status == "unpaid", "the deadline that was granted is 90 minutes after the begin"


def test_extensions_are_limited_although_the_condition_did_not_hold_in_between(declare: Declare) -> None:
    options = {"after": 30 * MINUTE, "since": "created_at", "when": Q(status="unpaid")}
    policy = declare(Order, name="capped", max_extensions=1, **options)
    order = Order.objects.create(status="unpaid", created_at=timezone.now())
    dq.extend_timeout(order, policy, minutes=5)
    fail_to_pay("save")
    with pytest.raises(dq.ExtensionLimit):
        dq.extend_timeout(order, policy, minutes=5)


def test_a_new_value_of_since_keeps_nothing() -> None:
    order = Order.objects.create(status="unpaid", created_at=timezone.now())
    extend(order)
    order.status = "paying"
    order.save()
    order.status, order.created_at = "unpaid", timezone.now() + MINUTE
    order.save()
    row = order.timeouts.get(state="pending")
    assert (row.extensions, row.due_at) == (0, order.created_at + 30 * MINUTE)


def test_a_request_to_fire_now_is_not_kept() -> None:
    """Its condition did not hold, so it was skipped; when it holds again, nothing fires early."""
    begin = timezone.now()
    order = Order.objects.create(status="unpaid", created_at=begin)
    extend(order)
    operations.fire_now(order.timeouts.get(), by="admin:a")
    fail_to_pay("save")
    row = order.timeouts.get(state="pending")
    assert (row.extensions, row.due_at) == (1, begin + 30 * MINUTE)


def test_a_request_to_fire_now_is_not_kept_after_an_attempt_that_failed(declare: Declare) -> None:
    begin = timezone.now()

    def handler(order: Order, timeout: Timeout) -> None:
        raise RuntimeError("the partner is down")

    options = {"after": 30 * MINUTE, "since": "created_at", "when": Q(status="unpaid"), "retry": dq.Retry([3600])}
    policy = declare(Order, name="failing", handler=handler, **options)
    order = Order.objects.create(status="unpaid", created_at=begin)
    dq.extend_timeout(order, policy, minutes=60)
    row = order.timeouts.get(policy=policy.label)
    operations.fire_now(row, by="admin:a")
    testing.fire_due(policy, raises=False)
    fail_to_pay("save")
    assert order.timeouts.get(policy=policy.label, state="pending").due_at == begin + 30 * MINUTE


@pytest.mark.parametrize("how", ["save", "bulk"])
@pytest.mark.parametrize("by_callable", [False, True])
def test_an_attempt_after_a_payment_that_failed_has_the_idempotency_key_of_the_one_before(
    declare: Declare, how: str, by_callable: bool
) -> None:
    """The provider may have received the first one, although it seemed to fail."""
    sent: list[str] = []

    def send(order: Order, timeout: Timeout) -> None:
        sent.append(timeout.idempotency_key)
        raise TimeoutError("the provider did not answer in time")

    since: Any = (lambda order: order.created_at) if by_callable else "created_at"
    options = {"after": 30 * MINUTE, "since": since, "when": Q(status="unpaid"), "retry": dq.Retry([86400])}
    policy = declare(Order, send, name="sends", atomic=False, **options)
    order = Order.objects.create(status="unpaid", created_at=timezone.now() - 31 * MINUTE)
    testing.fire_due(policy, raises=False)
    for _ in range(2):
        fail_to_pay(how)
    Timeout.objects.filter(state="pending").update(run_at=timezone.now())  # a day later
    testing.fire_due(policy, raises=False)
    assert len(sent) == 2 and len(set(sent)) == 1
    order.created_at = timezone.now() - 32 * MINUTE
    order.save()
    testing.fire_due(policy, raises=False)
    assert len(sent) == 3 and len(set(sent)) == 2, "a new round"


def test_an_idempotency_key_of_another_installation_is_not_used_again(settings: Any) -> None:
    order = Order.objects.create(status="unpaid", created_at=timezone.now())
    order.status = "paying"
    order.save()
    settings.DELAYQ = {**settings.DELAYQ, "INSTALLATION": "staging", "REDIS": None}
    operations.adopt(by="script:restore")
    order.status = "unpaid"
    order.save()
    former, row = order.timeouts.order_by("id")
    assert former.idempotency_key != row.idempotency_key
    fail_to_pay("save")
    assert order.timeouts.get(state="pending").idempotency_key == row.idempotency_key


@pytest.mark.parametrize("what", ["hold", "shift"])
def test_a_request_to_fire_now_is_not_kept_because_all_deadlines_were_moved_since(declare: Declare, what: str) -> None:
    """The partner is down, so the policy is held. Nothing fires early when a payment fails later."""
    begin, days = timezone.now(), timedelta(days=20)

    def handler(order: Order, timeout: Timeout) -> None:
        raise RuntimeError("the partner is down")

    options = {"after": days, "since": "created_at", "when": Q(status="unpaid"), "retry": dq.Retry([86400])}
    policy = declare(Order, name="failing", handler=handler, **options)
    order = Order.objects.create(status="unpaid", created_at=begin)
    operations.fire_now(order.timeouts.get(policy=policy.label), by="admin:a")
    testing.fire_due(policy, raises=False)
    later = MINUTE
    if what == "hold":
        with clock.set_to(begin + 30 * MINUTE):
            operations.hold(policy, by="admin:a")
        with clock.set_to(begin + 60 * MINUTE):
            operations.resume(policy, by="admin:a")
        later = 30 * MINUTE
    else:
        operations.change_delay(policy, days + later, by="admin:a", mode="shift")
    with clock.set_to(begin + 120 * MINUTE):
        fail_to_pay("save")
    assert order.timeouts.get(policy=policy.label, state="pending").due_at == begin + days + later


@pytest.mark.parametrize("how", ["save", "bulk"])
@pytest.mark.parametrize("age", [timedelta(days=20), timedelta(hours=2), timedelta(0)])
@pytest.mark.parametrize("by_callable", [False, True])
def test_a_later_deadline_given_by_hand_survives_a_payment_that_fails(
    declare: Declare, age: timedelta, how: str, by_callable: bool
) -> None:
    """The order was not armed before: its own deadline may have passed long ago."""
    since: Any = (lambda order: order.created_at) if by_callable else "created_at"
    policy = declare(Order, name="given", after=30 * MINUTE, since=since, when=Q(status="unpaid"))
    Order.objects.bulk_create([Order(status="unpaid", created_at=timezone.now() - age)])
    row = dq.schedule_timeout(Order.objects.get(), policy, hours=48)
    for _ in range(2):
        fail_to_pay(how)
    again = Timeout.objects.get(policy=policy.label, state="pending")
    assert (again.due_at, again.first_due_at, again.since_at) == (row.due_at, row.due_at, row.since_at)


def test_an_unmoved_deadline_that_its_policy_has_computed_follows_its_data(declare: Declare) -> None:
    begin = timezone.now()
    delays = {None: 30 * MINUTE, "patient": 60 * MINUTE, "hurried": 5 * MINUTE}
    options = {"since": "created_at", "when": Q(status="unpaid")}
    policy = declare(Order, name="varied", after=lambda order: delays[order.note], **options)
    order = Order.objects.create(status="unpaid", created_at=begin)
    for note, minutes in (("hurried", 5), ("patient", 60), (None, 30)):
        Order.objects.update(note=note)
        fail_to_pay("save")
        assert dq.get_deadline(order, policy) == begin + minutes * MINUTE


def test_an_object_that_is_exempt_is_not_armed_again_although_its_deadline_was_moved(declare: Declare) -> None:
    options = {"since": "created_at", "when": Q(status="unpaid")}
    policy = declare(Order, name="exempting", after=lambda each: None if each.note else 30 * MINUTE, **options)
    order = Order.objects.create(status="unpaid", created_at=timezone.now())
    dq.extend_timeout(order, policy, minutes=60)
    Order.objects.update(note="exempt")
    fail_to_pay("save")
    assert dq.get_deadline(order, policy) is None


def test_an_extended_round_is_armed_again_although_its_first_deadline_is_too_old() -> None:
    begin = timezone.now() - timedelta(days=20)
    with clock.set_to(begin):
        order = Order.objects.create(status="unpaid", created_at=begin)
        dq.extend_timeout(order, "cancel_unpaid", days=30)
    fail_to_pay("save")
    assert order.timeouts.get(state="pending").due_at == begin + 30 * MINUTE + timedelta(days=30)


@pytest.mark.parametrize("days", [2, 20])
def test_the_sync_of_the_workers_sees_the_moved_deadline(days: int) -> None:
    """The first deadline is too old to be armed, and with 20 days also for a save."""
    begin = timezone.now()
    order = Order.objects.create(status="unpaid", created_at=begin)
    dq.extend_timeout(order, "cancel_unpaid", days=days)
    order.status = "paying"
    order.save()
    Order.objects.update(status="unpaid")
    with clock.set_to(begin + timedelta(days=days - 1)):
        assert "save or sync_timeouts()" in dq.explain_timeout(order, "cancel_unpaid").outlook
        assert sync_policy(dq.get_policy((Order, "cancel_unpaid")), "default").armed == 1
    assert order.timeouts.get(state="pending").due_at == begin + 30 * MINUTE + timedelta(days=days)


def test_arming_a_new_object_reads_no_earlier_rounds() -> None:
    with transaction.atomic(), CaptureQueriesContext(connection) as captured:
        Order.objects.create(status="unpaid", created_at=timezone.now())
    reads = [query["sql"] for query in captured if "condition" in query["sql"]]
    assert Timeout.objects.count() == 1
    assert not reads


def test_saving_an_object_that_is_exempt_reads_no_earlier_rounds(declare: Declare) -> None:
    declare(Order, name="exempting", after=lambda order: None, since="created_at", when=Q(status="new"))
    order = Order.objects.create(status="new", created_at=timezone.now())
    with CaptureQueriesContext(connection) as captured:
        order.save()
    assert not [query["sql"] for query in captured if "condition" in query["sql"]]


@pytest.mark.parametrize("by_callable", [False, True])
def test_a_new_object_with_the_key_of_a_deleted_one_keeps_nothing(declare: Declare, by_callable: bool) -> None:
    begin = timezone.now()
    since: Any = (lambda order: order.created_at) if by_callable else "created_at"
    policy = declare(Order, name="reused", after=30 * MINUTE, since=since, when=Q(status="unpaid"))
    order = Order.objects.create(status="unpaid", created_at=begin)
    dq.extend_timeout(order, policy, minutes=60)
    order.status = "paying"
    order.save()
    key = order.pk
    order.delete()
    Order.objects.create(pk=key, status="unpaid", created_at=begin)
    row = Timeout.objects.get(policy=policy.label, state="pending")
    assert (row.extensions, row.due_at) == (0, begin + 30 * MINUTE)
