"""A policy that is renamed while old and new code run: each finds the round that the other has armed or fired."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.core.management import call_command
from django.db.models import Q
from django.utils import timezone

import django_delayq as dq
from django_delayq.arming.sync import sync_policy
from django_delayq.contrib.countdown import countdown_of
from django_delayq.models import Timeout
from django_delayq.policy.policies import registry
from django_delayq.testing import fire_due
from tests.support.typed import Declare
from tests.support.workers import states_in_order as states
from tests.testapp.models import Order

pytestmark = pytest.mark.django_db(transaction=True)
Release = Callable[[str], Any]
HOUR = timedelta(hours=1)
OLD, NEW = "dun", "chase"
ALIASES = {OLD: (), NEW: (OLD,)}
both_orders = pytest.mark.parametrize(("first", "second"), [(OLD, NEW), (NEW, OLD)])


@pytest.fixture
def order() -> Order:
    return Order.objects.create(status="new", created_at=timezone.now())


@pytest.fixture
def fired() -> list[str]:
    """The names of the releases whose handler was called."""
    return []


@pytest.fixture
def release(declare: Declare, fired: list[str]) -> Release:
    """`release(NEW)` makes this process one of that release, and returns its policy."""

    def do(name: str) -> Any:
        for policy in [each for each in dq.get_policies(Order) if each.name in ALIASES]:
            registry.remove(policy)
        options: Any = {"name": name, "aliases": ALIASES[name], "since": "created_at", "after": HOUR}
        return declare(Order, lambda *_: fired.append(name), when=Q(status="new"), **options)

    return do


def arm_in_every_way(order: Order, policy: Any) -> None:
    order.save()
    sync_policy(policy, "default")
    dq.sync_timeouts([order])
    dq.schedule_timeout(order, policy, on_conflict="keep")
    dq.schedule_timeout(order, policy)
    dq.schedule_timeouts([order], policy)
    with pytest.raises(dq.TimeoutConflict):
        dq.schedule_timeout(order, policy, on_conflict="error")
    with pytest.raises(dq.TimeoutConflict):
        dq.schedule_timeouts([order], policy, on_conflict="error")


@both_orders
def test_both_releases_arm_move_and_show_one_round(
    order: Order, release: Release, first: str, second: str, tmp_path: Path
) -> None:
    rows, row = set[int](), Timeout()
    for name in (first, second, first):
        arm_in_every_way(order, policy := release(name))
        row = Timeout.objects.get()
        assert (row.state, row.since_at) == ("pending", order.created_at)
        assert dq.get_deadline(order, name) == row.due_at
        assert countdown_of(order, policy).timeout_id == row.pk
        assert countdown_of(Order.objects.prefetch_related("timeouts").get(), policy).timeout_id == row.pk
        verbs: Any = (dq.reschedule_timeout, dq.extend_timeout, dq.schedule_timeout)
        rows |= {row.pk, *(verb(order, policy, hours=2).pk for verb in verbs)}
    assert rows == {row.pk}
    call_command("dumpdata", "django_delayq.timeout", output=str(tmp_path / "rows.json"), verbosity=0)
    Timeout.objects.all().delete()
    call_command("loaddata", str(tmp_path / "rows.json"), verbosity=0)
    assert Timeout.objects.get().slot == row.slot, "also one that a fixture loads"
    for name in (first, second):
        assert dq.schedule_timeout(order, release(name), hours=2).pk == row.pk


@both_orders
def test_a_round_fires_once_whichever_release_has_armed_it(
    order: Order, release: Release, fired: list[str], first: str, second: str
) -> None:
    release(first)
    order.created_at = timezone.now() - HOUR
    order.save()
    for name in (second, first, second):
        policy = release(name)
        fire_due()
        order.save()
        sync_policy(policy, "default")
        fire_due()
    assert (len(fired), states()) == (1, ["fired"])
    for name in (first, second):
        assert dq.cancel_timeout(order, release(name)) is False


@pytest.mark.parametrize(
    ("name", "aliases", "oldest"),
    [
        ("dun", [], "testapp.order.dun"),
        ("collect", ["dun", "chase"], "testapp.order.dun"),
        ("dun", ["dun", "chase"], "testapp.order.dun"),
        ("chase", ["sales.order.dun", "sales.order.chase"], "sales.order.dun"),
    ],
)
def test_the_oldest_name_is_the_first_alias(
    order: Order, declare: Declare, name: str, aliases: list[str], oldest: str
) -> None:
    policy = declare(Order, name=name, aliases=aliases)
    assert policy.oldest_label == oldest
    assert policy.labels[0] == f"testapp.order.{name}"
    assert len(set(policy.labels)) == len(policy.labels)
