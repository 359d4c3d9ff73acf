"""Deadlines whose length is data: of the object or of related rows. They follow it, unless they were set by hand."""

from __future__ import annotations

from typing import Any

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

import django_delayq as dq
from django_delayq import PolicyError, Wall, Working, WorkingHours, clock, operations
from django_delayq.arming.sync import sync_policy, sync_timeouts
from django_delayq.models import Timeout
from django_delayq.policy.policies import registry
from django_delayq.testing import fire_due
from tests.integration.data.conftest import MINUTE, UNPAID, Declare, at, bought, due, only_row
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


@pytest.mark.parametrize("by_sync", [False, True])
def test_a_changed_value_moves_the_deadline_and_null_exempts(declare: Declare, channel: Channel, by_sync: bool) -> None:
    policy = declare(Purchase, name="pay", after="grace", **UNPAID)
    obj = bought(grace=20 * MINUTE)

    def write(grace: Any) -> None:
        if by_sync:
            Purchase._base_manager.update(grace=grace)
            sync_policy(policy, "default")
        else:
            obj.grace = grace
            obj.save(update_fields=["grace"])

    for minutes in (40, 10, -5):
        write(minutes * MINUTE)
        assert due(obj) == [minutes]
    write(None)
    assert due(obj) == []
    assert only_row().cause == Timeout.Cause.CONDITION
    write(15 * MINUTE)
    assert due(obj) == [15]


def test_a_deadline_that_was_set_by_hand_stays_until_since_changes(declare: Declare) -> None:
    policy = declare(Purchase, name="pay", after="grace", **UNPAID)
    for number, verb in enumerate(
        [
            lambda obj: dq.schedule_timeout(obj, "pay", minutes=50),
            lambda obj: dq.reschedule_timeout(obj, "pay", minutes=50),
            lambda obj: dq.extend_timeout(obj, "pay", minutes=30),
            lambda obj: dq.schedule_timeouts([obj], "pay", minutes=50),
        ]
    ):
        obj = bought(grace=20 * MINUTE)
        verb(obj)
        assert not Timeout.objects.get(object_id=obj.pk).is_computed, number
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


def test_a_function_is_called_again_when_the_object_is_saved(declare: Declare) -> None:
    declare(Purchase, name="pay", after=lambda obj: obj.grace, **UNPAID)
    obj = bought(grace=20 * MINUTE)
    obj.grace = 40 * MINUTE
    obj.save()
    assert due(obj) == [40]
    obj.grace = None
    obj.save()
    assert due(obj) == []


def test_a_save_needs_no_query_more_than_with_a_constant(declare: Declare, channel: Channel) -> None:
    counts = []
    for name, after in (("constant", 30 * MINUTE), ("path", "channel__pay_within")):
        policy = declare(Purchase, name=name, after=after, **UNPAID)
        bought(channel=channel)
        with CaptureQueriesContext(connection) as created:
            obj = bought(channel=channel)
        with CaptureQueriesContext(connection) as saved:
            obj.save()
        counts.append((len(created), len(saved)))
        registry.remove(policy)
        Timeout.objects.all().delete()
    assert counts[0] == counts[1]


def test_holds_and_stopped_clocks_move_the_new_deadline_as_far(declare: Declare) -> None:
    declare(Purchase, name="pay", after="grace", **UNPAID)
    obj = bought(grace=20 * MINUTE)
    with clock.set_to(at(5)):
        dq.hold_timeout(obj, "pay")
    with clock.set_to(at(10)):
        obj.grace = 30 * MINUTE
        obj.save()
        assert only_row().remaining == 25 * MINUTE
    with clock.set_to(at(12)):
        dq.resume_timeout(obj, "pay")
        assert due(obj) == [37]
        obj.grace = 40 * MINUTE
        obj.save()
        assert due(obj) == [47]


def test_a_round_that_continues_has_the_present_value(declare: Declare) -> None:
    declare(Purchase, name="pay", after="grace", **UNPAID)
    obj = bought(grace=20 * MINUTE)
    Purchase.objects.update(status="paid")
    obj.grace = 40 * MINUTE
    obj.save(update_fields=["grace"])
    assert due(obj) == []
    Purchase.objects.update(status="unpaid")
    assert due(obj) == [40]


@pytest.mark.parametrize("after", ["status", "nothing", "channel__days", "channel__nothing"])
def test_a_path_that_leads_to_no_duration_is_refused(declare: Declare, after: str) -> None:
    with pytest.raises(PolicyError, match="is not a DurationField of Purchase"):
        declare(Purchase, name="pay", after=after, **UNPAID)


def test_an_amount_that_is_no_number_is_refused(declare: Declare) -> None:
    with pytest.raises(PolicyError, match="is not a field of numbers of Purchase"):
        declare(Purchase, name="pay", after=Working(hours="status", calendar=ALWAYS), **UNPAID)
    assert str(Working(hours="channel__hours", calendar=ALWAYS)) == "channel__hours working hours, UTC"


def test_what_a_call_without_a_delay_computes_follows_the_data_as_if_it_were_armed(declare: Declare) -> None:
    declare(Purchase, name="pay", after="grace", **UNPAID)
    for verb in (lambda obj: dq.schedule_timeout(obj, "pay"), lambda obj: dq.schedule_timeouts([obj], "pay")):
        obj = bought(grace=30 * MINUTE)
        dq.extend_timeout(obj, "pay", minutes=5)
        for minutes, call in ((20, True), (40, False), (10, False)):
            obj.grace = minutes * MINUTE
            obj.save()
            if call:
                assert due(obj) == [35]
                verb(obj)
            assert due(obj) == [minutes]


def test_a_policy_hold_stays_added_when_the_data_changes(declare: Declare) -> None:
    policy = declare(Purchase, name="pay", after="grace", **UNPAID)
    obj = bought(grace=40 * MINUTE)
    operations.hold(policy, by="admin:a")
    with clock.set_to(at(10)):
        operations.resume(policy, by="admin:a")
        assert due(obj) == [50]
        obj.grace = 60 * MINUTE
        obj.save()
        assert due(obj) == [70]
        obj.status = "paid"
        obj.save()
        obj.status, obj.grace = "unpaid", 20 * MINUTE
        obj.save()
        assert due(obj) == [30]


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
