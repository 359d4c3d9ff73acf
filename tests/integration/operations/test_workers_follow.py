"""Workers, with Redis and without, follow what operators put in force."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from django.utils import timezone

from django_delayq.models import PolicyChange, PolicyControl, Timeout
from django_delayq.operations import fire_now, hold, pause, resume
from django_delayq.operations.changes import ABANDONED_AFTER
from tests.integration.operations.conftest import BY, pending, running
from tests.integration.operations.names import DAY, REMIND
from tests.support.waiting import wait_until
from tests.support.workers import due_orders
from tests.testapp.models import Effect, Order

pytestmark = [pytest.mark.slow, pytest.mark.django_db(transaction=True)]


@pytest.fixture
def worker(source: str, frequent_sweeps: None) -> Iterator[None]:
    with running(concurrency=2):
        yield


def fires(label: str) -> int:
    return Timeout.objects.filter(policy=label, state="fired").count()


def witness(label: str = "linger") -> None:
    """A timeout of another policy that is due last has fired: the worker has checked all others."""
    row = due_orders(label)[0]
    wait_until(lambda: Timeout.objects.filter(pk=row.pk, state="fired").exists())


def test_what_is_stopped_fires_when_it_goes_on_and_what_is_told_to_at_once(worker: None) -> None:
    pause(REMIND, by=BY)
    due_orders("remind", 20)
    later = pending(Order.objects.create(), hours=5)
    witness()
    witness()
    assert fires(REMIND) == 0
    assert not Effect.objects.filter(what="remind").exists()
    resume(REMIND, by=BY)
    wait_until(lambda: fires(REMIND) == 20)
    assert Effect.objects.filter(what="remind").count() == 20
    pause(REMIND, by=BY, until=timezone.now() + DAY)
    due_orders("remind", 5)
    witness()
    assert fires(REMIND) == 20
    PolicyControl.objects.update(until=timezone.now())
    wait_until(lambda: fires(REMIND) == 25)
    assert fire_now(later, by=BY).changed == 1
    wait_until(lambda: fires(REMIND) == 26)


def test_a_worker_carries_on_with_a_release_whose_process_died(worker: None, monkeypatch: pytest.MonkeyPatch) -> None:
    hold(REMIND, by=BY)
    rows = due_orders("remind", 3)
    with monkeypatch.context() as patched:
        patched.setattr("django_delayq.operations.policies.run_move", lambda change, *_: change)
        resume(REMIND, by=BY)
    witness()
    assert fires(REMIND) == 0
    PolicyChange.objects.update(touched_at=timezone.now() - 2 * ABANDONED_AFTER)
    wait_until(lambda: fires(REMIND) == len(rows))
    for row in Timeout.objects.filter(pk__in=[row.pk for row in rows]):
        assert row.due_at > row.first_due_at
        assert row.settled_at is not None and row.settled_at >= row.due_at, "at its new deadline"
