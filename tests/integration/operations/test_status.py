"""The snapshot: its content, its limits, each running worker, and why due timeouts do not fire."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from django.utils import timezone

from django_delayq import Limits, Rate
from django_delayq.ledger import search
from django_delayq.models import Timeout
from django_delayq.monitoring import reports
from django_delayq.monitoring import snapshot as status
from django_delayq.operations import pause
from django_delayq.redis_clients import get_engine
from tests.integration.operations.conftest import BY, as_if, dead, many, pending, running
from tests.integration.operations.names import HOUR, LINGER, MINUTE, REMIND, Declare
from tests.support.lines import remove_ids
from tests.support.waiting import wait_until
from tests.testapp.models import Order

if TYPE_CHECKING:
    import redis

pytestmark = pytest.mark.django_db(transaction=True)
SECOND = timedelta(seconds=1)


def of(label: str, hours: bool = True) -> status.PolicyStatus:
    (found,) = [each for each in status.policy_statuses(hours=hours) if each.label == label]
    return found


def test_a_policy_is_counted_by_what_its_rows_do() -> None:
    now = timezone.now()
    for minutes in (30, 90, 95, 60 * 30, 0):
        pending(Order.objects.create(), minutes=minutes)
    dead(Order.objects.create())
    days_ago = now - timedelta(days=3)
    at: list[tuple[str, dict[str, Any]]]
    at = [("pending", {"run_at": now - HOUR}), ("pending", {"run_at": now + 40 * MINUTE, "attempts": 1})]
    at += [("fired", {"run_at": now - HOUR, "settled_at": now - HOUR + late * SECOND}) for late in (1, 2, 30)]
    at += [("fired", {"run_at": days_ago, "settled_at": days_ago}), ("skipped", {"run_at": now - HOUR})]
    for state, values in at:
        due = {"due_at": values["run_at"]} if state == "fired" else {}
        as_if(pending(Order.objects.create()), state, "" if state == "pending" else "due", **due, **values)
    found = of(REMIND)
    assert (found.pending.value, found.due.value, found.overdue.value) == (7, 2, 1)
    assert found.failing.value == 1, "a dead row with attempts, or one that fired after some, is not failing"
    assert (found.dead.value, found.fired.value, found.skipped.value, found.firing.value) == (1, 3, 1, 0)
    assert (found.lag_p50, found.lag_p99) == (2.0, 30.0)
    assert found.oldest_due_at == now - HOUR
    assert [count.value for count in found.hours] == [2, 2, *[0] * 22]
    assert of(LINGER).pending == search.NOTHING
    assert of(REMIND, hours=False).hours == ()


def test_the_hours_of_a_policy_with_very_many_pending_timeouts_are_counted_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reports, "MAX_COUNT", 2)
    monkeypatch.setattr(reports, "MAX_EACH", 6)
    for minutes in (10, 20, 30, 90, 150, 160):
        pending(Order.objects.create(), minutes=minutes)
    pending(Order.objects.create(), "linger", minutes=70)
    found, other = of("testapp.order.remind"), of("testapp.order.linger")
    assert (str(found.pending), [str(count) for count in found.hours[:4]]) == ("2+", ["2+", "1", "2", "0"])
    assert (str(other.pending), [str(count) for count in other.hours[:3]]) == ("1", ["0", "1", "0"])


@pytest.mark.parametrize(("examined", "cap", "fired"), [(5, 5, "3"), (2, 5, "3"), (2, 2, "2+")])
def test_what_fired_more_than_a_day_late_is_counted_in_the_day_in_which_it_fired(
    monkeypatch: pytest.MonkeyPatch, declare: Declare, examined: int, cap: int, fired: str
) -> None:
    declare(Order, name="nudge", aliases=["remind_before"])
    monkeypatch.setattr(reports, "MAX_LATE", examined)
    monkeypatch.setattr(reports, "MAX_COUNT", cap)
    now, two_days = timezone.now(), timedelta(days=2)
    for number, settled_at in enumerate([now - two_days, now - two_days, *[now - HOUR] * 3]):
        row = pending(Order.objects.create(), "nudge")
        due_at = now - two_days + number * timedelta(minutes=1)
        as_if(row, "fired", "due", due_at=due_at, run_at=due_at, settled_at=max(due_at, settled_at))
    skipped = pending(Order.objects.create(), "nudge")
    as_if(skipped, "skipped", "late", policy="testapp.order.remind_before", run_at=now - two_days)
    found = of("testapp.order.nudge")
    assert (str(found.fired), str(found.skipped)) == (fired, "1")
    assert found.lag_p50 is not None and found.lag_p50 > 46 * 3600
    assert of(REMIND).lag_p50 is None


def test_redis_is_in_step_until_it_has_lost_what_is_due_soon(redis_client: redis.Redis) -> None:
    rows = [pending(Order.objects.create(), seconds=1) for _ in range(3)]
    pending(Order.objects.create(), minutes=4)
    seen = status.snapshot().redis
    assert (seen.is_in_step, seen.compared, seen.missing) == (True, 3, 0)
    assert [(queue.name, queue.entries) for queue in seen.queues if queue.entries] == [("default", 4)]
    engine = get_engine("default")
    assert engine is not None
    remove_ids(engine.queue("default", 0), [row.pk for row in rows[:2]])
    assert status.snapshot().redis.missing == 2
    pause(REMIND, by=BY)
    assert status.snapshot().redis.compared == 0


@pytest.mark.usefixtures("redis_client")
def test_due_timeouts_that_wait_for_a_rate_are_not_missing_in_redis(declare: Declare) -> None:
    declare(Order, name="paced", limits=Limits(rate=Rate(1, per=HOUR)))
    many(3, "paced", seconds=0)
    with running():
        wait_until(lambda: Timeout.objects.pending().count() == 2)
        seen = status.snapshot().redis
    # Workers claim them from the ledger, and remove their entries some time.
    assert (seen.is_in_step, seen.compared) == (True, 0)
