"""`Rate(by=...)`: each value has a rate of its own, and the backlog of one delays no other."""

from __future__ import annotations

import random
import time
from collections import defaultdict
from datetime import timedelta
from typing import Any

import pytest
from django.db.models import Value

import django_delayq as dq
from django_delayq import clock, operations
from django_delayq.firing import Report, plan
from django_delayq.ledger import claiming
from django_delayq.ledger.claiming import TURN_SECONDS, Slot, Spacing
from django_delayq.models import RateShare, Timeout
from django_delayq.worker.lines import Lines
from django_delayq.worker.sources.ledger import Batch
from django_delayq.worker.sweep import prune
from tests.integration.worker.test_rates import Silent, claim, dispatch_to, four_threads, made_sources
from tests.support.purchases import UNPAID, Declare, bought, only_row
from tests.testapp.market import Channel, Merchant, Purchase

pytestmark = [pytest.mark.slow, pytest.mark.django_db(transaction=True)]
Policy = dq.TimeoutPolicy[Any]


def limited(count: int = 1, by: str | None = "channel_id", **per: float) -> dq.Limits:
    """So many within an hour, or within `per`."""
    return dq.Limits(rate=dq.Rate(count, per=timedelta(**per or {"hours": 1}), by=by))


@pytest.fixture
def shops() -> list[Channel]:
    return Channel.objects.bulk_create(Channel(merchant=Merchant.objects.create(name=name)) for name in "ABC")


@pytest.fixture
def by_shop(declare: Declare) -> Policy:
    return declare(Purchase, name="by", limits=limited(20, seconds=2))


@pytest.fixture
def slow(declare: Declare) -> Policy:
    return declare(Purchase, name="by", limits=limited())


def due(policy: dq.TimeoutPolicy[Any], shop: Channel | None, count: int = 1, minutes: float = 10) -> list[int]:
    """So many due timeouts of a shop, the first `minutes` ago; their ids in due order."""
    purchases = Purchase.objects.bulk_create(Purchase(channel=shop) for _ in range(count))
    with clock.set_to(clock.now() - timedelta(minutes=minutes)):
        dq.schedule_timeouts(purchases, policy, seconds=0)
    objects = [str(purchase.pk) for purchase in purchases]
    return list(Timeout.objects.filter(object_id__in=objects).order_by("run_at", "id").values_list("pk", flat=True))


def shares() -> list[str]:
    """Those of all rounds, in the order of their objects: rows are inserted in the order of their slots."""
    return [row.share for row in sorted(Timeout.objects.all(), key=lambda row: (int(row.object_id), row.pk))]


# The value


def test_a_round_has_the_value_of_the_moment_in_which_it_begins(by_shop: Policy, shops: list[Channel]) -> None:
    first, second, third = (str(shop.pk) for shop in shops)
    purchase = bought(channel=shops[0])
    row = dq.schedule_timeout(purchase, by_shop, minutes=1)
    Purchase.objects.update(channel=shops[1])
    dq.reschedule_timeout(purchase, by_shop, minutes=2)
    assert shares() == [first], "a move does not begin a round"
    dq.schedule_timeout(purchase, by_shop, minutes=1)
    assert shares() == [second]
    Purchase.objects.update(channel=shops[2])
    dq.schedule_timeouts([purchase], by_shop, minutes=1)
    assert shares() == [third]
    operations.cancel(row, by="script:test")
    Purchase.objects.update(channel=shops[0])
    operations.refire(row, by="script:test")
    assert shares() == [third, first]
    dq.schedule_timeouts([bought(channel=shops[1]), bought(channel=None)], by_shop, minutes=1)
    assert shares() == [third, first, second, ""]


def test_an_automatic_round_has_the_value_of_its_armed_object(declare: Declare, shops: list[Channel]) -> None:
    declare(Purchase, name="by", after=timedelta(minutes=30), limits=limited(), **UNPAID)
    purchase = bought(channel=shops[0], created_at=clock.now())
    assert only_row().share == str(shops[0].pk)
    purchase.channel, purchase.created_at = shops[1], clock.now()
    purchase.save()
    assert only_row().share == str(shops[1].pk), "a new round"
    Timeout.objects.all().delete()
    Purchase.objects.filter(pk=purchase.pk).update(status="unpaid")
    assert only_row().share == str(shops[1].pk), "armed in bulk"


def test_the_value_may_lie_beyond_relations(declare: Declare, shops: list[Channel]) -> None:
    policy = declare(Purchase, name="by", limits=limited(by="channel__merchant__name"))
    dq.schedule_timeouts([bought(channel=shops[0]), bought(channel=None)], policy, minutes=1)
    assert shares() == ["A", ""]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"limits": limited(by="chanel")}, "is not a column.*of Purchase.*Did you mean 'channel'"),
        ({"limits": limited(by="labels")}, "It has:"),
        ({"limits": limited(), "batch": 5}, "give neither batch nor together"),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)
def test_what_leads_to_no_column_or_to_works_of_several_is_refused(
    options: dict[str, Any], words: str, declare: Declare
) -> None:
    with pytest.raises(dq.PolicyError, match=f"(?s){words}"):
        declare(Purchase, name="by", **options)
    wrong: Any = ["merchant_id"]
    with pytest.raises(TypeError, match="by must be the name of a column"):
        dq.Rate(1, by=wrong)


# The claims


def test_a_flood_of_one_value_leaves_the_first_claim_to_others_too(by_shop: Policy, shops: list[Channel]) -> None:
    flood = due(by_shop, shops[0], 2_000, minutes=60)
    [other], [third] = due(by_shop, shops[1], minutes=2), due(by_shop, shops[2], minutes=1)
    granted = claim(by_shop, 4)
    assert list(granted.claimed.claims) == [flood[0], other, third, flood[1]]
    [later] = due(by_shop, shops[2], minutes=0)
    assert later in claim(by_shop, 4).slots, "however often the first value had its turn"
    assert granted.wait_seconds == 0, "more may be claimed when there is room"


def test_a_value_that_has_used_its_slots_is_asked_for_when_the_next_one_is_free(
    slow: Policy, shops: list[Channel]
) -> None:
    due(slow, shops[0], 60)
    assert len(claim(slow).slots) == 1
    soonest = due(slow, shops[1], 60)
    assert list(claim(slow).slots) == soonest[:1]
    of_second = RateShare.objects.filter(share=str(shops[1].pk))
    of_second.update(free_at=clock.now() + timedelta(seconds=1))
    nothing = claim(slow, 4)
    assert nothing.slots == {}
    assert 0.3 < nothing.wait_seconds < 1.0 - TURN_SECONDS + 0.01, "found although the first page has none of it"
    of_second.update(free_at=clock.now() + timedelta(seconds=TURN_SECONDS / 2))
    assert list(claim(slow, 4).slots) == soonest[1:2]
    interval = Spacing.of(dq.Rate(1, per=timedelta(hours=1))).interval
    assert claim(slow, 4).wait_seconds == pytest.approx(interval - TURN_SECONDS, abs=30)
    last = due(slow, shops[2], minutes=1)
    assert list(claim(slow, 1).slots) == last, "those that wait hide no other"
    dq.schedule_timeout(bought(channel=None), slow, seconds=20)
    assert 15 < claim(slow).wait_seconds <= 20, "a deadline that comes soon ends the wait"


def test_a_worker_looks_for_other_values_each_second(slow: Policy, shops: list[Channel]) -> None:
    due(slow, shops[0], 3)
    lines = four_threads()
    assert len(made_sources().take(lines, 100).deliveries) == 1
    assert slow.label not in lines.declared()
    assert 0.9 < lines.seconds_left <= 1.0, "and not its next slot in an hour"


def test_workers_share_the_slots_of_each_value_and_free_ones_are_forgotten(slow: Policy, shops: list[Channel]) -> None:
    for shop in shops:
        due(slow, shop, 5)
    taken = [made_sources().take(Lines("default", 2, 0.5), 100) for _ in range(3)]
    assert [len(batch.deliveries) for batch in taken] == [2, 1, 0]
    assert len({slot.share for batch in taken for slot in batch.slots.values()}) == 3
    RateShare.objects.exclude(share=str(shops[1].pk)).update(free_at=clock.now() - timedelta(seconds=1))
    prune("default")
    assert [row.share for row in RateShare.objects.all()] == [str(shops[1].pk)]


def test_a_standing_clock_frees_each_slot(slow: Policy, shops: list[Channel]) -> None:
    due(slow, shops[0], 20)
    with clock.set_to(clock.now()):
        assert [len(claim(slow, 4).slots) for _ in range(3)] == [1] * 3


def test_no_value_exceeds_its_rate_whatever_is_due(declare: Declare, shops: list[Channel], monkeypatch: Any) -> None:
    """Random floods and claims of random sizes; the clock advances by the wait that a claim returns, or more."""
    chance = random.Random(7)
    policy = declare(Purchase, name="by", limits=limited(3, seconds=1))
    begins, moment = defaultdict[str, list[float]](list), 0.0
    start = clock.now()
    monkeypatch.setattr(claiming, "database_now", lambda _: start + timedelta(seconds=moment))
    monkeypatch.setattr(claiming, "monotonic", lambda: moment)
    monkeypatch.setattr(claiming, "DatabaseNow", lambda: Value(start + timedelta(seconds=moment)))
    for _ in range(40):
        if chance.random() < 0.5:
            due(policy, chance.choice([None, *shops]), chance.randint(1, 12), minutes=chance.randint(1, 60))
        granted = claim(policy, chance.randint(1, 9))
        for slot in granted.slots.values():
            begins[slot.share] += [slot.begin_at if chance.random() < 0.5 else slot.begin_by]
        moment += granted.wait_seconds + chance.choice([0.0, 0.01, 0.3])
    assert len(begins) == 4
    for found in begins.values():
        found.sort()
        assert all(fourth - first >= 1 for first, fourth in zip(found, found[3:], strict=False))


# The works


def test_a_work_begins_only_in_a_slot_of_its_own_value(by_shop: Policy, shops: list[Channel]) -> None:
    """A slot of A that is over delays the works of A, and none of B begins in it."""
    first, second = due(by_shop, shops[0], 2)
    [other] = due(by_shop, shops[1])
    dispatch, now = dispatch_to(executor := Silent()), time.monotonic()
    slots = {
        first: Slot(now - 9, now - 8, "A"),
        second: Slot(now - 1, now + 60, "A"),
        other: Slot(now + 60, now + 90, "B"),
    }
    works, _ = plan({second: 1, other: 1}, "default", slots=slots)
    assert {(work.ids, work.share) for work in works} == {((second,), "A"), ((other,), "B")}
    assert "share" not in works[0].as_dict()
    dispatch.add(Batch(dict.fromkeys(slots, 1), slots=slots))
    assert [work.ids for work, _ in executor.works] == [(first,)]
    assert 30 < dispatch.seconds_left <= 60, "that of B comes later, and the second one of A is left without a slot"
    work, done = executor.works[0]
    done(work, Report(missed=True))
    assert dispatch.collect() == 1
    dispatch.submit_due()
    assert len(executor.works) == 1, "it is released: there is no slot of A any more"
    assert dispatch.in_flight == 1
