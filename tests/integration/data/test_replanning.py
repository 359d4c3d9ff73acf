"""Deadlines are computed again, by an operator: of a selection, or of a whole policy. Those set by hand stay."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

import django_delayq as dq
from django_delayq import pending_timeouts
from django_delayq.models import Timeout
from django_delayq.operations import Refusal, replan
from django_delayq.policy.policies import registry
from tests.integration.data.conftest import MINUTE, UNPAID, Declare, at, bought, due
from tests.testapp.market import Purchase

pytestmark = [pytest.mark.dialect, pytest.mark.django_db(transaction=True)]
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


def broken(purchase: Purchase) -> timedelta:
    raise ValueError("broken")


def test_what_cannot_be_computed_stays_and_says_why(declare: Declare) -> None:
    redeclared(declare, 30 * MINUTE)
    gone, unknown, fired, obj = (bought(grace=grace) for grace in (*[MINUTE] * 3, None))
    rows = {each.pk: row_of(each).pk for each in (gone, unknown, fired)}
    for after in ("grace", broken, timedelta(days=100 * 365)):
        redeclared(declare, after)
        assert replan(pending_timeouts(obj), by=BY).refused == {Refusal.NO_DEADLINE: 1}
    assert due(obj) == [30]
    redeclared(declare, "grace")
    dq.cancel_timeout(fired, "pay")
    Timeout.objects.filter(object_id=str(unknown.pk)).update(policy="testapp.purchase.former")
    Purchase.objects.filter(pk=gone.pk)._raw_delete("default")
    refused = {each.id: each.why for each in replan(Timeout.objects.filter(pk__in=rows.values()), by=BY).refusals}
    assert refused == {
        rows[gone.pk]: Refusal.OBJECT_GONE,
        rows[unknown.pk]: Refusal.POLICY_UNKNOWN,
        rows[fired.pk]: Refusal.SETTLED,
    }
