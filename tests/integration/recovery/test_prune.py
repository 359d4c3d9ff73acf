"""Pruning deletes rows that were settled long ago, except those that still close a round."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.core.management import call_command

from django_delayq import clock
from django_delayq.ledger import settling
from django_delayq.models import Timeout
from django_delayq.recovery.prune import prune
from tests.e2e.races.sessions import impatient
from tests.integration.firing.conftest import locking, needs_row_locks
from tests.support.workers import due_orders

pytestmark = pytest.mark.django_db(transaction=True)


def settle(row: Timeout, *, settled: float, due: float) -> None:
    """So many days ago."""
    now = clock.now()
    Timeout.objects.filter(pk=row.pk).update(
        state="fired",
        cause="due",
        slot_taken=None,
        settled_at=now - timedelta(days=settled),
        due_at=now - timedelta(days=due),
    )


def test_only_rows_go_whose_settling_and_deadline_are_both_old(capsys: pytest.CaptureFixture[str]) -> None:
    old, young, pending, cancelled_long_before_its_deadline = due_orders("remind", 4, hours=1)
    settle(old, settled=31, due=31)
    settle(young, settled=29, due=29)
    settle(cancelled_long_before_its_deadline, settled=90, due=-200)
    Timeout.objects.filter(pk=pending.pk).update(due_at=clock.now() - timedelta(days=500))
    call_command("delayq_prune")
    assert set(Timeout.objects.values_list("pk", flat=True)) == {
        young.pk,
        pending.pk,
        cancelled_long_before_its_deadline.pk,
    }
    assert capsys.readouterr().out == "1 timeout settled more than 30 days ago was deleted\n"


def test_many_rows_go_page_by_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settling, "PRUNED_PAGE", 4)
    rows = due_orders("remind", 23, hours=1)
    for number, row in enumerate(rows):
        keep = number % 5 == 0
        settle(row, settled=40 if number % 2 else 40 + number, due=-100 if keep else 40)
    assert prune("default") == 18
    assert Timeout.objects.count() == 5
    assert prune("default") == 0


@needs_row_locks
def test_a_row_that_somebody_holds_stays_until_the_next_time() -> None:
    # Other rows, or MariaDB may read the whole table to delete most of it, and wait for the locked row on the way.
    kept = due_orders("remind", 50, hours=1)
    held, *others = due_orders("remind", 3, hours=1)
    for row in (held, *others):
        settle(row, settled=40, due=40)
    with locking(held), impatient():
        assert prune("default") == len(others)
    assert set(Timeout.objects.values_list("pk", flat=True)) == {held.pk, *(row.pk for row in kept)}
    assert prune("default") == 1


def test_another_age_may_be_asked_for() -> None:
    (row,) = due_orders("remind", 1, hours=1)
    settle(row, settled=3, due=3)
    assert prune("default", timedelta(days=4)) == 0
    assert prune("default", timedelta(days=2)) == 1
