"""Deadlines whose length is data: of the object or of related rows. They follow it, unless they were set by hand."""

from __future__ import annotations

from typing import Any

import pytest

import django_delayq as dq
from django_delayq import Wall, Working, WorkingHours, clock, operations, pending_timeouts
from django_delayq.arming.sync import sync_policy, sync_timeouts
from django_delayq.models import Timeout
from django_delayq.operations import Refusal, replan
from django_delayq.policy.policies import registry
from django_delayq.testing import fire_due
from tests.support.purchases import MINUTE, UNPAID, Declare, at, bought, due, noon  # noqa: F401 - a fixture
from tests.testapp.market import Channel, Merchant, Purchase

pytestmark = [pytest.mark.dialect, pytest.mark.django_db(transaction=True)]
ALWAYS = WorkingHours("UTC", {"mon-sun": "00:00-24:00"})


def by_code(purchase: Purchase) -> Any:
    return purchase.grace


def name_of(value: Any) -> str:
    return "code" if value is by_code else str(value)[:40]


LENGTHS: list[tuple[Any, float]] = [
    ("grace", 20),
    ("channel__pay_within", 30),
    (Working(hours="channel__hours", calendar=ALWAYS), 90),
    (Working(minutes="channel__days", calendar=ALWAYS), 2),
    (Working(days="channel__days", at="12:00", calendar=ALWAYS), 2 * 24 * 60),
    (Wall(days="channel__days", at="12:00", zone="channel__merchant__zone"), 2 * 24 * 60),
    (by_code, 20),
]


@pytest.fixture
def channel() -> Channel:
    merchant = Merchant.objects.create(zone="UTC")
    return Channel.objects.create(merchant=merchant, pay_within=30 * MINUTE, hours="1.5", days=2)


@pytest.mark.parametrize(("after", "minutes"), LENGTHS, ids=name_of)
def test_each_way_to_arm_computes_the_deadline(declare: Declare, channel: Channel, after: Any, minutes: float) -> None:
    declare(Purchase, name="pay", after=after, **UNPAID)
    values = {"channel": channel, "grace": 20 * MINUTE, "created_at": at()}
    Purchase.objects.create(**values)
    Purchase.objects.bulk_create([Purchase(**values) for _ in range(2)])
    Purchase._base_manager.bulk_create([Purchase(**values)])
    sync_policy(dq.get_policy((Purchase, "pay")), "default")
    first, second, *_ = Purchase.objects.order_by("pk")
    dq.schedule_timeout(first, "pay")
    dq.schedule_timeouts([second], "pay")
    rows = Timeout.objects.all()
    assert [(row.due_at - at()) / MINUTE for row in rows] == [minutes] * 4
    assert all(row.is_computed for row in rows)
    assert sync_policy(dq.get_policy((Purchase, "pay")), "default") == (0,) * 6
    assert sync_timeouts(Purchase.objects.all()) == 0


@pytest.mark.parametrize("after", ["grace", by_code], ids=name_of)
def test_a_changed_value_moves_the_deadline_and_null_exempts(declare: Declare, after: Any) -> None:
    policy = declare(Purchase, name="pay", after=after, **UNPAID)
    obj, by_sync = bought(grace=20 * MINUTE), bought(grace=20 * MINUTE)

    def write(grace: Any) -> list[list[float]]:
        obj.grace = grace
        obj.save(update_fields=["grace"])
        Purchase._base_manager.filter(pk=by_sync.pk).update(grace=grace)
        sync_policy(policy, "default")
        return [due(obj), *([due(by_sync)] if after == "grace" else [])]

    for minutes in (40, 10, -5):
        assert all(found == [minutes] for found in write(minutes * MINUTE))
    assert not any(write(None))
    assert Timeout.objects.get(object_id=obj.pk).cause == Timeout.Cause.CONDITION
    assert all(found == [15] for found in write(15 * MINUTE))
    Purchase.objects.filter(pk=obj.pk).update(status="paid")
    assert write(40 * MINUTE)[0] == []
    Purchase.objects.filter(pk=obj.pk).update(status="unpaid")
    assert due(obj) == [40], "a round that continues has the present value"


def test_a_story_says_how_a_deadline_was_computed(declare: Declare, channel: Channel) -> None:
    declare(Purchase, name="pay", after="channel__pay_within", **UNPAID)
    obj, story = bought(channel=channel), lambda: dq.explain_timeout(obj, "pay").deadline
    assert story() == "Its deadline was computed by its policy with channel__pay_within = 30 min."
    dq.extend_timeout(obj, "pay", minutes=5)
    assert story().startswith("Its deadline was set by hand")


BY_HAND: dict[str, Any] = {
    "schedule_timeout": lambda obj: dq.schedule_timeout(obj, "pay", minutes=50),
    "reschedule_timeout": lambda obj: dq.reschedule_timeout(obj, "pay", minutes=50),
    "extend_timeout": lambda obj: dq.extend_timeout(obj, "pay", minutes=30),
    "schedule_timeouts": lambda obj: dq.schedule_timeouts([obj], "pay", minutes=50),
}


def test_a_deadline_that_was_set_by_hand_stays_until_a_new_round_begins(declare: Declare) -> None:
    policy = declare(Purchase, name="pay", after="grace", **UNPAID)
    for name, verb in BY_HAND.items():
        obj = bought(grace=20 * MINUTE)
        verb(obj)
        assert not Timeout.objects.get(object_id=obj.pk).is_computed, name
        obj.grace = 10 * MINUTE
        obj.save()
        sync_policy(policy, "default")
        assert due(obj) == [50]
        obj.created_at = at(1)
        obj.save()
        assert due(obj) == [11]
        assert Timeout.objects.get(object_id=obj.pk).is_computed


def test_a_change_of_code_moves_nothing(declare: Declare, channel: Channel) -> None:
    declare(Purchase, name="pay", after=25 * MINUTE, **UNPAID)
    obj = bought(grace=20 * MINUTE, channel=channel)
    for after in ("grace", "channel__pay_within", 26 * MINUTE, Working(hours="channel__hours", calendar=ALWAYS)):
        registry.remove(dq.get_policy((Purchase, "pay")))
        policy = declare(Purchase, name="pay", after=after, **UNPAID)
        obj.save()
        sync_policy(policy, "default")
        sync_timeouts(obj)
        assert due(obj) == [25]


def test_holds_of_a_timeout_and_of_its_policy_move_the_new_deadline_as_far(declare: Declare) -> None:
    policy = declare(Purchase, name="pay", after="grace", **UNPAID)
    obj, other = bought(grace=20 * MINUTE), bought(grace=40 * MINUTE)

    def let(purchase: Purchase, minutes: float, status: str = "unpaid") -> list[float]:
        purchase.grace, purchase.status = minutes * MINUTE, status
        purchase.save()
        return due(purchase)

    with clock.set_to(at(5)):
        dq.hold_timeout(obj, "pay")
    with clock.set_to(at(10)):
        let(obj, 30)
        assert Timeout.objects.get(object_id=obj.pk).remaining == 25 * MINUTE
    with clock.set_to(at(12)):
        dq.resume_timeout(obj, "pay")
        assert due(obj) == [37]
        assert let(obj, 40) == [47]
        operations.hold(policy, by="admin:a")
    with clock.set_to(at(22)):
        operations.resume(policy, by="admin:a")
        assert due(other) == [50]
        assert let(other, 60) == [70]
        assert let(other, 60, "paid") == []
        assert let(other, 20) == [30]


@pytest.mark.parametrize("options", [{}, {"batch": 5}, {"together": 5}, {"atomic": False}], ids=str)
def test_a_deadline_that_became_later_does_not_fire_before_a_sync_has_moved_it(declare: Declare, options: Any) -> None:
    fired: list[Any] = []
    declare(Purchase, lambda obj, _: fired.append(obj), name="pay", after="grace", **UNPAID, **options)
    later, exempt, same = (bought(grace=20 * MINUTE) for _ in range(3))
    Purchase._base_manager.filter(pk=later.pk).update(grace=40 * MINUTE)
    Purchase._base_manager.filter(pk=exempt.pk).update(grace=None)
    with clock.set_to(at(21)):
        assert fire_due() == 1
        assert Timeout.objects.get(object_id=same.pk).state == "fired"
        assert due(later) == [40]
        assert Timeout.objects.get(object_id=exempt.pk).cause == Timeout.Cause.CONDITION
    with clock.set_to(at(41)):
        assert fire_due() == 1
    assert len(fired) == 2


BY = "admin:alice"


def redeclared(declare: Declare, after: Any, **options: Any) -> Any:
    """The policy `pay` with another declaration, as after a deployment, which moves nothing by itself."""
    if (found := registry.get("testapp.purchase.pay")) is not None:
        registry.remove(found)
    return declare(Purchase, name="pay", after=after, **{**UNPAID, **options})


def row_of(obj: Purchase) -> Timeout:
    row: Timeout = pending_timeouts(obj).get()
    return row


def test_computed_deadlines_follow_the_present_declaration_and_those_set_by_hand_stay(declare: Declare) -> None:
    redeclared(declare, 30 * MINUTE)
    plain, by_hand = bought(), bought()
    dq.reschedule_timeout(by_hand, "pay", minutes=90)
    redeclared(declare, 45 * MINUTE)
    rows = pending_timeouts(Purchase, "pay")
    seen = replan(rows, by=BY, dry_run=True)
    assert (seen.changed, seen.refused) == (1, {Refusal.HAND_SET: 1})
    assert (due(plain), due(by_hand)) == ([30], [90])
    done = replan(rows, by=BY, reason="new terms")
    assert (done.verb, done.changed, done.refused) == ("replan", 1, {Refusal.HAND_SET: 1})
    assert (due(plain), due(by_hand)) == ([45], [90])
    assert replan(rows, by=BY).refused == {Refusal.HAND_SET: 1, Refusal.SAME_DEADLINE: 1}
    assert replan(rows, by=BY, hand_set=True).changed == 1
    assert due(by_hand) == [45]
    assert row_of(by_hand).is_computed and row_of(by_hand).first_due_at == at(45)
    (event,) = [each for each in row_of(plain).history if each["what"] == "replanned"]
    assert (event["by"], event["reason"]) == (BY, "new terms")
