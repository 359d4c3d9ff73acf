"""`batch_by`: one call for all due timeouts of one value, whatever a worker has leased of them."""

from __future__ import annotations

import threading
from collections import Counter
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection
from django.db.models import Q, QuerySet
from django.test.utils import CaptureQueriesContext

from django_delayq import (
    Limits,
    PolicyError,
    Rate,
    Retry,
    Skip,
    clock,
    reschedule_timeout,
    schedule_timeout,
    schedule_timeouts,
)
from django_delayq.firing import Work, plan, run
from django_delayq.firing.handler import set_checkpoint_hook
from django_delayq.ledger import controls
from django_delayq.models import Timeout
from django_delayq.testing import fire_due, perform, travel
from tests.integration.firing.by_value import Calls, Policy, Shops, due_of, run_of
from tests.integration.firing.conftest import FIRED, WAIT, Declare, fire, state, work_of
from tests.testapp.market import Purchase

pytestmark = [pytest.mark.dialect, pytest.mark.django_db(transaction=True)]


# The declaration


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"batch_by": "channel"}, "batch_by needs batch"),
        ({"batch_by": "channel", "together": 5}, "batch_by needs batch"),
        ({"batch_by": ["channel"], "batch": 5}, "batch_by must be the name of a column or a path, not"),
        ({"batch_by": "channel", "batch": 5, "limits": Limits(rate=Rate(5))}, "give no Rate with it"),
        ({"batch_by": "channel", "batch": 5, "atomic": False}, "batch needs atomic=True"),
        ({"batch_by": "chanel", "batch": 5}, "Did you mean 'channel'"),
        ({"batch_by": "payments__status", "batch": 5}, "batch_by='payments__status' is not a column, or a path"),
        ({"batch_by": "labels", "batch": 5}, "is not a column, or a path over foreign keys to one, of Purchase"),
    ],
)
def test_wrong_declarations_are_refused(options: dict[str, Any], words: str, declare: Declare) -> None:
    with pytest.raises(PolicyError, match="^Timeout policy") as raised:
        declare(Purchase, name="by", **options)
    assert words in str(raised.value)


@pytest.mark.parametrize("path", ["channel", "channel_id", "channel__merchant", "channel__merchant__name"])
def test_a_path_over_foreign_keys_is_a_value(path: str, declare: Declare, shops: Shops, calls: Calls) -> None:
    policy = declare(Purchase, calls, name="by", batch=10, batch_by=path)
    rows = [*due_of(policy, shops[0], 2), *due_of(policy, shops[1], 3)]
    merchants: list[Any] = [shop.merchant for shop in shops]
    names = {"channel__merchant": [str(each.pk) for each in merchants], "channel__merchant__name": ["A", "B", "C"]}
    own = names.get(path, [str(shop.pk) for shop in shops])
    assert Counter(row.share for row in rows) == {own[0]: 2, own[1]: 3}
    fire(*rows)
    assert sorted(calls.sizes) == [2, 3]
    assert calls.of_one_value()


# The calls


def test_a_leased_timeout_fires_with_all_others_of_its_value(policy: Policy, shops: Shops, calls: Calls) -> None:
    rows, others = due_of(policy, shops[0], 20), due_of(policy, shops[1], 20)
    report = run_of(rows[7])
    assert calls.all == [[shops[0].pk] * 20]
    assert {state(row) for row in rows} == {FIRED}
    assert set(report.fired) == {row.pk for row in rows}
    assert {row.state for row in Timeout.objects.filter(pk__in=[row.pk for row in others])} == {"pending"}


def test_what_another_work_has_fired_is_acknowledged(policy: Policy, shops: Shops, calls: Calls) -> None:
    rows = due_of(policy, shops[0], 6)
    first, second = work_of(*rows[:3]), work_of(*rows[3:])
    run(first, "default")
    report = run(second, "default")
    assert (sorted(report.done), report.fired, report.again) == (sorted(second.ids), (), {})
    assert sorted(report.before) == sorted(second.ids)
    assert calls.sizes == [6]


def test_a_work_has_no_two_values(policy: Policy, shops: Shops, calls: Calls) -> None:
    rows = [row for _ in range(4) for shop in shops for row in due_of(policy, shop)]
    works, _ = plan({row.pk: 1 for row in rows}, "default")
    assert [len(work.ids) for work in works] == [4, 4, 4]
    assert [work.share for work in works] == [str(shop.pk) for shop in shops]
    assert not {"share", "only", "alone"} & works[0].as_dict().keys()


def test_a_forged_work_of_two_values_makes_two_calls(
    policy: Policy, declare: Declare, shops: Shops, calls: Calls
) -> None:
    rows = [*due_of(policy, shops[0], 2), *due_of(policy, shops[1], 2), *due_of(policy, None, 2)]
    other = declare(Purchase, name="other", batch=5)
    [foreign] = due_of(other, shops[0])
    named = [*rows, foreign]
    work = Work(policy.label, tuple(row.pk for row in named), tuple(row.object_id for row in named))
    report = run(work, "default")
    assert calls.all == [[None], [None], [shops[0].pk] * 2, [shops[1].pk] * 2]
    assert foreign.pk in report.again
    assert state(foreign) == ("pending", "")


def test_timeouts_without_a_value_are_alone(policy: Policy, calls: Calls) -> None:
    fire(*due_of(policy, None, 3))
    assert calls.sizes == [1, 1, 1]


def test_more_than_a_batch_are_several_calls_of_one_value(declare: Declare, shops: Shops, calls: Calls) -> None:
    policy = declare(Purchase, calls, name="by", batch=4, batch_by="channel")
    rows = [*due_of(policy, shops[0], 10), *due_of(policy, shops[1], 2)]
    fire(*rows)
    assert calls.all == [[shops[0].pk] * 4, [shops[0].pk] * 4, [shops[0].pk] * 2, [shops[1].pk] * 2]
    assert {state(row) for row in rows} == {FIRED}


def test_what_is_due_later_is_not_in_the_call(policy: Policy, shops: Shops, calls: Calls) -> None:
    now, later = due_of(policy, shops[0], 3), due_of(policy, shops[0], 3, minutes=1)
    run_of(now[0])
    assert calls.sizes == [3]
    with clock.set_to(clock.now() + timedelta(minutes=2)):
        run_of(later[0])
    assert calls.sizes == [3, 3]


def test_two_timeouts_of_one_object_are_in_two_calls(policy: Policy, shops: Shops, calls: Calls) -> None:
    first = due_of(policy, shops[0], 2)
    second = schedule_timeout(Purchase.objects.get(pk=first[0].object_id), policy, key="second", seconds=0)
    fire(*first, second)
    assert calls.sizes == [2, 1]


def test_rows_under_a_former_name_are_gathered_too(declare: Declare, shops: Shops, calls: Calls) -> None:
    policy = declare(Purchase, calls, name="now", aliases=("then",), batch=50, batch_by="channel")
    rows = due_of(policy, shops[0], 4)
    Timeout.objects.filter(pk__in=[row.pk for row in rows[:2]]).update(policy="testapp.purchase.then")
    run_of(rows[3])
    assert calls.sizes == [4]


def test_values_are_those_of_the_policy(declare: Declare, shops: Shops, calls: Calls) -> None:
    """Two policies have timeouts with the same value, and one does not gather those of the other."""
    policies = [declare(Purchase, calls, name=name, batch=50, batch_by="channel") for name in ("one", "two")]
    rows = [due_of(policy, shops[0], 2) for policy in policies]
    run_of(rows[0][0])
    assert {state(row) for row in rows[1]} == {("pending", "")}


def test_a_member_that_does_not_match_is_skipped(declare: Declare, shops: Shops, calls: Calls) -> None:
    policy = declare(Purchase, calls, name="by", batch=50, batch_by="channel", when=Q(status="unpaid"), since=None)
    rows = due_of(policy, shops[0], 4)
    Purchase.objects.filter(pk=rows[2].object_id).update(status="paid")
    Purchase.objects.filter(pk=rows[3].object_id)._raw_delete("default")
    run_of(rows[0])
    assert calls.sizes == [2]
    assert [state(row)[0] for row in rows] == ["fired", "fired", "skipped", "skipped"]


# The value on the locked object


def test_the_value_of_an_object_that_has_another_owner_now_is_corrected(
    policy: Policy, shops: Shops, calls: Calls
) -> None:
    rows, others = due_of(policy, shops[0], 3), due_of(policy, shops[1], 2)
    Purchase.objects.filter(pk=rows[1].object_id).update(channel=shops[1])
    report = run_of(rows[1])
    assert calls.all == [[shops[0].pk] * 2]
    assert set(report.again) == {rows[1].pk}
    assert report.untried == (rows[1].pk,)
    assert state(rows[1]) == ("pending", "")
    assert rows[1].share == str(shops[1].pk)
    run_of(rows[1])
    assert calls.all[1:] == [[shops[1].pk] * 3]
    assert {state(row) for row in [*rows, *others]} == {FIRED}


def test_a_value_that_is_gone_or_new_is_corrected(policy: Policy, shops: Shops, calls: Calls) -> None:
    [lost], [found], own = due_of(policy, shops[0]), due_of(policy, None), due_of(policy, shops[1], 2)
    Purchase.objects.filter(pk=lost.object_id).update(channel=None)
    Purchase.objects.filter(pk=found.object_id).update(channel=shops[1])
    assert set(fire(lost, found).again) == {lost.pk, found.pk}
    assert calls.all == []
    run_of(lost)
    run_of(found)
    assert calls.all == [[None], [shops[1].pk] * 3]
    assert {state(row) for row in own} == {FIRED}


def test_a_move_that_begins_a_new_round_reads_the_value_again(declare: Declare, shops: Shops) -> None:
    policy = declare(Purchase, name="by", batch=50, batch_by="channel")
    purchase = Purchase.objects.create(channel=shops[0])
    schedule_timeout(purchase, policy, minutes=1)
    Purchase.objects.update(channel=shops[1])
    reschedule_timeout(purchase, policy, minutes=2)
    assert [row.share for row in Timeout.objects.all()] == [str(shops[0].pk)]
    schedule_timeout(purchase, policy, minutes=1)
    assert [row.share for row in Timeout.objects.all()] == [str(shops[1].pk)]


# Errors


def test_a_call_that_raises_is_repeated_with_each_alone(declare: Declare, shops: Shops) -> None:
    sizes: list[int] = []
    bad: list[str] = []

    def handler(purchases: QuerySet[Purchase], timeouts: list[Timeout]) -> None:
        sizes.append(len(timeouts))
        if any(timeout.object_id in bad for timeout in timeouts):
            raise ValueError("bad")

    policy = declare(Purchase, handler, name="by", batch=50, batch_by="channel", retry=Retry([60]))
    rows = due_of(policy, shops[0], 4)
    bad.append(rows[2].object_id)
    report = run_of(rows[0])
    assert sizes == [4, 1, 1, 1, 1]
    assert [state(row)[0] for row in rows] == ["fired", "fired", "pending", "fired"]
    rows[2].refresh_from_db()
    assert rows[2].attempts == 1
    assert report.again == {}, "only those of the work are reported"
    assert set(report.errors) == {rows[2].pk}


def test_a_call_that_takes_too_long_is_repeated_with_each_alone(declare: Declare, shops: Shops) -> None:
    sizes: list[int] = []
    end = threading.Event()

    def handler(purchases: QuerySet[Purchase], timeouts: list[Timeout]) -> None:
        sizes.append(len(timeouts))
        if len(timeouts) > 1:
            end.wait(WAIT)

    limits = Limits(run=timedelta(seconds=0.3))
    policy = declare(Purchase, handler, name="by", batch=50, batch_by="channel", limits=limits)
    rows = due_of(policy, shops[0], 3)
    try:
        report = run_of(rows[0])
    finally:
        end.set()
    assert sizes == [3, 1, 1, 1]
    assert {state(row) for row in rows} == {FIRED}
    assert report.done


# Asking first


def test_each_member_is_asked_about_before_the_call(declare: Declare, shops: Shops, calls: Calls) -> None:
    policy = declare(Purchase, calls, name="by", batch=50, batch_by="channel", retry=Retry([60]))
    rows = due_of(policy, shops[0], 6)
    asked: list[str] = []

    @policy.confirm()
    def ask(purchase: Purchase, timeout: Timeout) -> Skip | None:
        asked.append(timeout.object_id)
        if timeout.object_id == rows[4].object_id:
            raise LookupError("no answer")
        return Skip("paid") if timeout.object_id == rows[2].object_id else None

    report = run_of(rows[0])
    assert asked == [row.object_id for row in rows]
    assert calls.sizes == [4]
    assert [state(row)[0] for row in rows] == ["fired", "fired", "skipped", "fired", "pending", "fired"]
    assert (rows[4].attempts, set(report.errors)) == (1, {rows[2].pk, rows[4].pk})


def test_a_confirm_function_that_hangs_splits_no_call(declare: Declare, shops: Shops, calls: Calls) -> None:
    policy = declare(Purchase, calls, name="by", batch=50, batch_by="channel", retry=Retry([60]))
    rows = due_of(policy, shops[0], 4)
    end = threading.Event()

    @policy.confirm(timeout=timedelta(seconds=0.3))
    def ask(purchase: Purchase, timeout: Timeout) -> None:
        if timeout.object_id == rows[1].object_id:
            end.wait(WAIT)

    try:
        run_of(rows[0], rows[2])
    finally:
        end.set()
    assert (calls.sizes, state(rows[1]), rows[1].attempts) == ([], ("pending", ""), 1)
    run_of(rows[0])
    assert calls.sizes == [3]


# Tests of a project


def test_fire_due_makes_one_call_for_each_value(policy: Policy, shops: Shops, calls: Calls) -> None:
    purchases = [Purchase.objects.create(channel=shop) for _ in range(5) for shop in shops]
    schedule_timeouts(purchases, policy, minutes=5)
    with travel(minutes=6):
        assert fire_due() == 15
    assert calls.sizes == [5, 5, 5]
    assert calls.of_one_value()


def test_fire_due_of_one_object_fires_only_that(policy: Policy, shops: Shops, calls: Calls) -> None:
    rows = due_of(policy, shops[0], 4)
    purchase = Purchase.objects.get(pk=rows[1].object_id)
    assert fire_due(policy, purchase) == 1
    assert fire_due(policy, limit=2) == 2
    assert (calls.sizes, fire_due(policy), calls.sizes) == ([1, 2], 1, [1, 2, 1])
    perform(policy, Purchase.objects.create(channel=shops[0]))
    assert calls.sizes == [1, 2, 1, 1]


@pytest.mark.parametrize("option", ["batch", "together"])
def test_fire_due_makes_the_works_of_workers(declare: Declare, shops: Shops, option: Any) -> None:
    """Neither objects twice, nor other queues, nor suspects are in one."""
    policy, begun = declare(Purchase, name="plain", **{option: 3}), list[str]()
    rows = [row for shop in shops for row in due_of(policy, shop, 2)]
    schedule_timeout(Purchase.objects.get(pk=rows[0].object_id), policy, key="twice", at=rows[0].due_at)
    Timeout.objects.filter(pk=rows[3].pk).update(queue="other")
    Timeout.objects.filter(pk=rows[4].pk).update(deaths=1)
    ordered = Timeout.objects.pending().order_by("run_at", "id")
    works, _ = plan(dict.fromkeys(ordered.values_list("pk", flat=True), 1), "default")
    set_checkpoint_hook(lambda step: begun.append(step) if step == "begun" else None)
    assert fire_due() == 7
    assert len(begun) == len(works) == 4


def test_one_value_costs_few_queries(
    declare: Declare, shops: Shops, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(controls, "CACHE_SECONDS", 600.0)  # else a slow run reads once more what is stopped
    policy = declare(Purchase, calls, name="by", batch=500, batch_by="channel")
    counts = []
    for size in (2, 2, 200):
        rows = due_of(policy, shops[0], size)
        with CaptureQueriesContext(connection) as queries:
            run_of(rows[0])
        counts.append(len(queries))
    assert counts[1] == counts[2]
