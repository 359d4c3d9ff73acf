"""A pending round that is not the newest, and two at once: what answers "it will not fire" cancels each of them.

An old dead round may be made pending in SQL after a newer one has settled. While a rename is deployed, old and
new code may each arm a round, one for each label.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from django.db import transaction
from django.db.models import Q
from django.utils import timezone

import django_delayq as dq
from django_delayq import timeout_cancelled
from django_delayq.arming.sync import sync_policy
from django_delayq.ledger import writing
from django_delayq.ledger.history import record
from django_delayq.models import Timeout
from django_delayq.policies import registry
from django_delayq.scheduling.queries import countdown_of
from django_delayq.testing import fire_due
from tests.testapp.models import Order

pytestmark = pytest.mark.django_db(transaction=True)
Declare = Callable[..., dq.TimeoutPolicy[Any]]
HOUR = timedelta(hours=1)
DEAD = {"state": "dead", "cause": "retries", "slot_taken": None, "settled_at": timezone.now()}


@pytest.fixture
def order() -> Order:
    return Order.objects.create(status="new", created_at=timezone.now())


@pytest.fixture
def cancelled() -> Iterator[list[int]]:
    """The ids of the rows for which `timeout_cancelled` was sent."""
    ids: list[int] = []

    def remember(sender: Any, timeout: Timeout, **_: Any) -> None:
        ids.append(timeout.pk)

    timeout_cancelled.connect(remember)
    yield ids
    timeout_cancelled.disconnect(remember)


def revived(order: Order, newer: str = "cancelled") -> Timeout:
    """Return a pending row that was made so by hand, in SQL, after a newer one settled as `newer`."""
    old = dq.schedule_timeout(order, "remind", hours=1)
    Timeout.objects.filter(pk=old.pk).update(**DEAD)
    new = dq.schedule_timeout(order, "remind", hours=1)
    Timeout.objects.filter(pk=new.pk).update(
        **DEAD | {"state": newer, "cause": "hand" if newer == "cancelled" else "gone"}
    )
    old.refresh_from_db()
    record(old, "retried", timezone.now(), by="ada")
    with transaction.atomic():
        writing.revive([old], "default", timezone.now())
    return old


def armed_twice(order: Order, declare: Declare, first: str, **options: Any) -> dq.TimeoutPolicy[Any]:
    """Return the policy "present", which was "former", with a pending row of `order` under each; `first` is older."""
    for name, hours in sorted({"former": 1, "present": 2}.items(), key=lambda item: item[0] != first):
        dq.schedule_timeout(order, declare(Order, name=name), hours=hours)
    for name in ("former", "present"):
        registry.remove(dq.get_policy((Order, name)))
    return declare(Order, name="present", aliases=("former",), **options)


def states() -> list[str]:
    return list(Timeout.objects.order_by("id").values_list("state", flat=True))


@pytest.mark.parametrize("newer", ["cancelled", "skipped", "dead"])
@pytest.mark.parametrize("way", ["cancel", "guard", "strict"])
def test_a_round_that_was_revived_is_cancelled_with_what_came_after_it(
    order: Order, newer: str, way: str, cancelled: list[int]
) -> None:
    row = revived(order, newer)
    if way == "cancel":
        assert dq.cancel_timeout(order, "remind", reason="paid") is True
    else:
        with dq.before_deadline(order, "remind", reason="paid", strict=way == "strict") as timeout:
            assert timeout is not None and timeout.state == "cancelled"
    assert states() == ["cancelled", "skipped" if newer == "skipped" else "cancelled"]
    row.refresh_from_db()
    assert (row.cause, row.reason) == ("hand", "paid")
    assert row.pk in cancelled


@pytest.mark.parametrize("newer", ["cancelled", "skipped", "dead"])
def test_a_revived_round_that_is_firing_makes_a_cancel_too_late(order: Order, newer: str) -> None:
    row = revived(order, newer)
    Timeout.objects.filter(pk=row.pk).update(state="firing", slot_taken=None)
    assert dq.cancel_timeout(order, "remind") is False
    with pytest.raises(dq.DeadlinePassed), dq.before_deadline(order, "remind"):
        pytest.fail("ran")
    row.refresh_from_db()
    assert row.final_attempt


def test_a_firing_whose_next_round_was_cancelled_may_be_cancelled_again(order: Order) -> None:
    row = dq.schedule_timeout(order, "remind", hours=1)
    Timeout.objects.filter(pk=row.pk).update(state="firing", slot_taken=None)
    dq.schedule_timeout(order, "remind", hours=1)
    assert [dq.cancel_timeout(order, "remind") for _ in range(2)] == [True, True]


def test_a_strict_guard_refuses_a_revived_round_whose_deadline_has_passed(order: Order) -> None:
    row = revived(order)
    Timeout.objects.filter(pk=row.pk).update(due_at=timezone.now() - HOUR)
    with pytest.raises(dq.DeadlinePassed) as refused, dq.before_deadline(order, "remind", strict=True):
        pytest.fail("ran")
    assert refused.value.timeout == row
    assert states() == ["pending", "cancelled"]


def test_a_round_that_was_revived_is_what_is_displayed(order: Order) -> None:
    row = revived(order)
    assert dq.get_deadline(order, "remind") == row.due_at
    assert countdown_of(order, "remind").timeout_id == row.pk
    prefetched = Order.objects.prefetch_related("timeouts").get()
    assert countdown_of(prefetched, "remind").timeout_id == row.pk
    assert "Nothing is pending" not in str(dq.explain_timeout(order, "remind"))


@pytest.mark.parametrize("first", ["former", "present"])
@pytest.mark.parametrize("way", ["cancel", "guard", "strict"])
def test_rounds_under_two_labels_are_cancelled_together(
    order: Order, declare: Declare, first: str, way: str, cancelled: list[int]
) -> None:
    policy = armed_twice(order, declare, first)
    if way == "cancel":
        assert dq.cancel_timeout(order, policy) is True
    else:
        with dq.before_deadline(order, policy, strict=way == "strict"):
            pass
    assert states() == ["cancelled", "cancelled"]
    assert sorted(cancelled) == list(Timeout.objects.order_by("id").values_list("id", flat=True))


@pytest.mark.parametrize("older", ["former", "present"])
def test_rounds_under_two_labels_are_cancelled_although_one_counts_from_an_older_since(
    order: Order, declare: Declare, older: str
) -> None:
    policy = armed_twice(order, declare, "former", since="created_at", after=HOUR, when=Q(status="new"))
    Timeout.objects.exclude(policy__endswith=older).update(since_at=order.created_at)
    Timeout.objects.filter(policy__endswith=older).update(since_at=timezone.now() - HOUR)
    assert dq.cancel_timeout(order, policy) is True
    assert states() == ["cancelled", "cancelled"]


@pytest.mark.parametrize("late", ["former", "present"])
def test_a_strict_guard_refuses_if_one_of_two_deadlines_has_passed(order: Order, declare: Declare, late: str) -> None:
    policy = armed_twice(order, declare, "former")
    Timeout.objects.filter(policy__endswith=late).update(due_at=timezone.now() - HOUR)
    with pytest.raises(dq.DeadlinePassed), dq.before_deadline(order, policy, strict=True):
        pytest.fail("ran")
    assert states() == ["pending", "pending"]


def test_rounds_under_two_labels_are_armed_again_if_the_condition_holds_again(order: Order, declare: Declare) -> None:
    options = {"since": "created_at", "after": HOUR, "when": Q(status="new")}
    policy = armed_twice(order, declare, "former", **options)
    Timeout.objects.update(since_at=order.created_at)
    with dq.before_deadline(order, policy):
        order.status = "paid"
        order.save()
    order.status = "new"
    order.save()
    assert states() == ["cancelled", "cancelled", "pending"]


@pytest.mark.parametrize("first", ["former", "present"])
@pytest.mark.parametrize("verb", ["reschedule", "extend", "keep", "replace"])
def test_what_moves_or_keeps_a_round_leaves_one(order: Order, declare: Declare, first: str, verb: str) -> None:
    policy = armed_twice(order, declare, first)
    if verb == "reschedule":
        row = dq.reschedule_timeout(order, policy, hours=5)
    elif verb == "extend":
        row = dq.extend_timeout(order, policy, hours=5)
    elif verb == "keep":
        row = dq.schedule_timeout(order, policy, hours=5, on_conflict="keep")
    else:
        row = dq.schedule_timeout(order, policy, hours=5)
    assert list(Timeout.objects.pending()) == [row]
    assert Timeout.objects.get(state="cancelled").cause == "superseded"


def test_what_is_refused_leaves_both(order: Order, declare: Declare) -> None:
    policy = armed_twice(order, declare, "former", max_extensions=0)
    with pytest.raises(dq.TimeoutConflict):
        dq.schedule_timeout(order, policy, hours=5, on_conflict="error")
    with pytest.raises(dq.ExtensionLimit):
        dq.extend_timeout(order, policy, hours=5)
    assert states() == ["pending", "pending"]


ONE_RELEASE = [("former", ()), ("present", ("former",))]
TWO_RELEASES = [("former", ("present",)), ("present", ("former",))]


@pytest.mark.parametrize(("releases", "reminders"), [(ONE_RELEASE, 2), (TWO_RELEASES, 1)], ids=["one", "two"])
def test_old_and_new_processes_fire_a_round_once_if_a_release_before_the_rename_lists_the_new_name(
    order: Order, declare: Declare, releases: list[Any], reminders: int
) -> None:
    """After a rename in one release, old processes do not know the rounds that new ones have fired."""
    called: list[str] = []

    def as_in(release: tuple[str, tuple[str, ...]]) -> dq.TimeoutPolicy[Any]:
        name, aliases = release
        options = {"since": "created_at", "after": HOUR, "when": Q(status="new"), "aliases": aliases}
        return declare(Order, lambda *_: called.append(name), name=name, **options)

    Order.objects.filter(pk=order.pk).update(created_at=timezone.now() - HOUR)
    for release in [releases[1], releases[0], releases[1]]:
        policy = as_in(release)
        order.refresh_from_db()
        order.save()
        sync_policy(policy, "default")
        fire_due()
        registry.remove(policy)
    assert len(called) == Timeout.objects.filter(state="fired").count() == reminders
