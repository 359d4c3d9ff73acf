"""`update()` and a sync end as `save()` does, for every order of events around the deadline.

Two orders have the same history. One is saved; the other is changed by `QuerySet.update`, which only the sync of the
workers notices: at once; or after other events, which then do not change `since`, as a firing does not compare it, and
do not take longer than `CATCH_UP`, because how old a round is then depends on when the sync sees it.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from django.db.models import Q
from django.utils import timezone
from hypothesis import event, example, given
from hypothesis import strategies as st

import django_delayq as dq
from django_delayq import clock, testing
from django_delayq.arming.row_state import CLOSING
from django_delayq.arming.sync import sync_policy
from django_delayq.models import Timeout
from tests.support.examples import examples
from tests.testapp.models import Order

if TYPE_CHECKING:
    from django_delayq import TimeoutPolicy

pytestmark = [pytest.mark.slow, pytest.mark.django_db]
MINUTE, AFTER, CATCH_UP = timedelta(minutes=1), timedelta(minutes=30), timedelta(hours=2)
BEGIN = timezone.now().replace(microsecond=0)
SHORT = st.sampled_from([1, 5, 20, 29, 31])
PLAIN = st.one_of(
    st.tuples(st.just("wait"), SHORT),
    st.tuples(st.sampled_from(["holds", "ends"]), st.just(0)),
    st.tuples(st.sampled_from(["fire", "cancel", "sync"]), st.just(0)),
)
EVENTS = st.one_of(
    PLAIN,
    st.tuples(st.just("wait"), st.sampled_from([90, 119, 121, 200])),
    st.tuples(st.just("since"), st.one_of(st.none(), st.integers(-3, 3))),
    st.tuples(st.just("extend"), SHORT),
)


class Round(NamedTuple):
    since_at: datetime | None
    due_at: datetime


class Histories:
    """The two orders, and the time."""

    def __init__(self, policy: TimeoutPolicy[Any], is_delayed: bool) -> None:
        Timeout.objects.all().delete()
        Order.objects.all().delete()
        self.policy, self.is_delayed, self.now = policy, is_delayed, BEGIN
        with clock.set_to(self.now):
            self.saved, self.updated = (Order.objects.create(status="twin", created_at=BEGIN) for _ in range(2))

    def do(self, what: str, value: Any) -> None:
        with clock.set_to(self.now):
            act: Callable[[Any], object] = getattr(self, f"_{what}")
            act(value)
            if not self.is_delayed:
                self._sync(0)

    def _wait(self, minutes: int) -> None:
        self.now += minutes * MINUTE

    def _change(self, **values: Any) -> None:
        order = Order.objects.get(pk=self.saved.pk)
        for name, value in values.items():
            setattr(order, name, value)
        order.save()
        Order.objects.filter(pk=self.updated.pk).update(**values)

    def _holds(self, _: Any) -> None:
        self._change(status="twin")

    def _ends(self, _: Any) -> None:
        self._change(status="other")

    def _since(self, hours: int | None) -> None:
        self._change(created_at=None if hours is None else BEGIN + hours * 60 * MINUTE)

    def _fire(self, _: Any) -> None:
        testing.fire_due(self.policy)

    def _cancel(self, _: Any) -> None:
        self._sync(0)  # cancelling closes the round that is pending: of an update that was not synced, the former one
        for order in (self.saved, self.updated):
            dq.cancel_timeout(Order.objects.get(pk=order.pk), self.policy)

    def _extend(self, minutes: int) -> None:
        for order in (self.saved, self.updated):
            dq.extend_timeout(order, self.policy, minutes=minutes)

    def _sync(self, _: Any) -> None:
        """Let the workers sync. Documented: they do not arm a forgotten round, which has no row and is overdue."""
        sync_policy(self.policy, "default")
        order = Order.objects.get(pk=self.updated.pk)
        if not self.rows(order).filter(since_at=order.created_at).exists():
            dq.sync_timeouts(order)

    def rows(self, order: Order) -> Any:
        return Timeout.objects.filter(policy=self.policy.label, object_id=str(order.pk))

    def pending(self, order: Order) -> list[Round]:
        return [Round(*row) for row in self.rows(order).pending().values_list("since_at", "due_at")]

    def closed(self, order: Order) -> set[datetime | None]:
        return set(self.rows(order).filter(CLOSING).values_list("since_at", flat=True))

    def compare(self) -> None:
        saved, updated = self.pending(self.saved), self.pending(self.updated)
        closed = self.closed(self.saved)
        if self.is_delayed:  # a round may have been armed and have fired between two syncs, which then see it too late
            assert self.closed(self.updated) <= closed
            updated = [each for each in updated if each.since_at not in closed]
        else:
            assert self.closed(self.updated) == closed
        assert saved == updated


@pytest.mark.parametrize("is_delayed", [False, True])
@pytest.mark.parametrize("kind", ["columns", "functions"])
def test_an_update_that_the_sync_finds_ends_as_a_save(declare: Any, settings: Any, kind: str, is_delayed: bool) -> None:
    settings.DELAYQ = {**settings.DELAYQ, "CATCH_UP": timedelta(days=7) if is_delayed else CATCH_UP, "REDIS": None}

    def end(order: Order, timeout: Timeout) -> None:
        Order.objects.filter(pk=order.pk).update(note="fired")

    since: Any = "created_at" if kind == "columns" else lambda order: order.created_at
    after: Any = AFTER if kind == "columns" else lambda order: AFTER
    policy = declare(Order, end, name="twins", since=since, after=after, when=Q(status="twin"))

    @examples(12)
    @example([("wait", 20), ("ends", 0), ("sync", 0), ("wait", 31), ("fire", 0), ("holds", 0)])
    @given(st.lists(PLAIN if is_delayed else EVENTS, min_size=3, max_size=9))
    def follow(events: list[tuple[str, Any]]) -> None:
        histories = Histories(policy, is_delayed)
        for what, value in events:
            histories.do(what, value)
            if not is_delayed:
                histories.compare()
        histories.do("sync", 0)
        histories.compare()
        event(f"pending: {bool(histories.pending(histories.saved))}, closed: {len(histories.closed(histories.saved))}")

    follow()
