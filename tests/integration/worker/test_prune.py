"""Pruning deletes rows that were settled long ago, except those that still close a round."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.core.checks import run_checks
from django.core.management import CommandError, call_command
from django.db.models import Q
from django.utils import timezone

from django_delayq import PolicyError, TimeoutPolicy, clock, operations, reschedule_timeout
from django_delayq.arming.sync import sync_policy
from django_delayq.models import Timeout
from django_delayq.testing import fire_due
from django_delayq.worker.sweep import count_old, prune
from tests.e2e.races.sessions import impatient
from tests.integration.firing.conftest import locking, needs_row_locks
from tests.support.workers import due_orders
from tests.testapp.models import Order

pytestmark = pytest.mark.django_db(transaction=True)

DAY = timedelta(days=1)
WAITING: dict[str, Any] = {"since": "created_at", "when": Q(status="waiting")}


def settle(row: Timeout, *, settled: float, due: float, first_due: float | None = None) -> None:
    """So many days ago. `first_due`: if the row was moved."""
    now = clock.now()
    Timeout.objects.filter(pk=row.pk).update(
        state="fired",
        cause="due",
        slot_taken=None,
        settled_at=now - timedelta(days=settled),
        due_at=now - timedelta(days=due),
        first_due_at=now - timedelta(days=due if first_due is None else first_due),
    )


@pytest.mark.dialect
def test_only_rows_go_whose_settling_and_deadlines_are_all_old(capsys: pytest.CaptureFixture[str]) -> None:
    old, young, pending, cancelled_early, moved, moved_long_ago = due_orders("remind", 6, hours=1)
    settle(old, settled=31, due=31)
    settle(young, settled=29, due=29)
    settle(cancelled_early, settled=90, due=-200)
    settle(moved, settled=40, due=40, first_due=29)
    settle(moved_long_ago, settled=40, due=40, first_due=31)
    Timeout.objects.filter(pk=pending.pk).update(due_at=clock.now() - timedelta(days=500))
    call_command("delayq_prune", "--dry-run")
    assert capsys.readouterr().out.startswith("2 timeouts settled")
    call_command("delayq_prune")
    assert set(Timeout.objects.all()) == {young, pending, cancelled_early, moved}
    assert capsys.readouterr().out == "2 timeouts settled more than 30 days ago were deleted\n"


@pytest.mark.parametrize("how", ["fire_now", "reschedule", "change_delay"])
def test_a_round_fires_once_although_it_was_moved_to_an_earlier_deadline_and_pruned(
    declare: Callable[..., TimeoutPolicy[Any]], controls_are_read_again: None, how: str
) -> None:
    policy = declare(Order, name="long", **WAITING, after=60 * DAY)
    began = timezone.now()
    order = Order.objects.create(status="waiting", created_at=began)
    with clock.set_to(began + DAY):
        if how == "fire_now":
            operations.fire_now(Timeout.objects.get(), by="admin:alice")
        elif how == "reschedule":
            reschedule_timeout(order, policy, seconds=0)
        else:
            operations.change_delay(policy, DAY, by="admin:alice", mode="recompute")
        assert fire_due() == 1
        if how == "change_delay":
            operations.change_delay(policy, None, by="admin:alice")
    with clock.set_to(began + 32 * DAY):
        prune("default")
        order.save()
    with clock.set_to(began + 92 * DAY):
        assert fire_due() == 0
        prune("default")
    assert not Timeout.objects.exists()


@pytest.mark.dialect
@needs_row_locks
def test_a_row_that_somebody_holds_stays_until_the_next_time() -> None:
    # Other rows, or MariaDB may read the whole table to delete most of it, and wait for the locked row on the way.
    kept = due_orders("remind", 50, hours=1)
    held, *others = due_orders("remind", 3, hours=1)
    for row in (held, *others):
        settle(row, settled=40, due=40)
    with locking(held), impatient():
        assert prune("default") == len(others)
    assert set(Timeout.objects.all()) == {held, *kept}
    assert prune("default") == 1


def settle_of(**ages: float) -> None:
    """Store a row of each policy that was settled so many days ago."""
    for name, days in ages.items():
        (row,) = due_orders("remind", 1, hours=1)
        settle(row, settled=days, due=days)
        Timeout.objects.filter(pk=row.pk).update(policy=f"testapp.order.{name}")


def kept() -> set[str]:
    return {label.rpartition(".")[2] for label in Timeout.objects.values_list("policy", flat=True)}


@pytest.mark.dialect
def test_a_policy_keeps_its_rows_for_longer_or_shorter_than_the_others(
    declare: Callable[..., Any], settings: Any
) -> None:
    declare(Order, name="audited", aliases=["formerly"], after=DAY, retention=730 * DAY)
    declare(Order, name="noisy", after=DAY, retention=2 * DAY)
    for setting, days, left in (
        (30, 1, {"audited", "formerly", "noisy", "remind"}),
        (30, 3, {"audited", "formerly", "remind"}),
        (4, 5, {"audited", "formerly"}),
        (30, 729, {"audited", "formerly"}),
        (30, 731, set()),
    ):
        settings.DELAYQ = {**settings.DELAYQ, "RETENTION": timedelta(days=setting)}
        Timeout.objects.all().delete()
        settle_of(audited=days, formerly=days, noisy=days, remind=days)
        assert count_old("default").value == 4 - len(left)
        assert prune("default") == 4 - len(left)
        assert kept() == left


def test_the_command_prunes_by_retention_or_by_an_age_of_at_least_half_of_it(
    declare: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    declare(Order, name="audited", after=DAY, retention=730 * DAY)
    audited = "testapp.order.audited"
    settle_of(audited=400, remind=400)
    call_command("delayq_prune")
    assert capsys.readouterr().out == "1 timeout settled longer ago than their policies retain them was deleted\n"
    with pytest.raises(CommandError, match=r"half of the longest retention of these policies \(365 d\)"):
        call_command("delayq_prune", "--policy", audited, "--older-than", "364d")
    call_command("delayq_prune", "--policy", audited, "--older-than", "366d", "--yes")
    assert not Timeout.objects.exists()
    assert capsys.readouterr().out.endswith(f"1 timeout of {audited} settled more than 366 days ago was deleted\n")


@pytest.mark.parametrize(("kept_days", "ages"), [(4, (2, 4)), (0, (0, 2))], ids=["some days", "nothing"])
def test_the_sync_arms_no_round_whose_row_may_have_been_pruned_by_its_policy(
    declare: Callable[..., Any], settings: Any, kept_days: int, ages: tuple[int, int]
) -> None:
    """It may have fired, and would fire again."""
    settings.DELAYQ = {**settings.DELAYQ, "SYNC_INTERVAL": 30 * DAY, "CATCH_UP": DAY / 2}
    policy = declare(Order, name="short", after=DAY, **WAITING, retention=kept_days * DAY)
    Order.objects.bulk_create(Order(status="waiting", created_at=timezone.now() - age * DAY) for age in ages)
    assert [sync_policy(policy, "default").armed for _ in range(2)] == [1, 0]


@pytest.mark.parametrize("kept_days", [14, 15])
def test_a_retention_is_a_duration_and_a_check_compares_catch_up_with_it(
    declare: Callable[..., Any], kept_days: int
) -> None:
    declare(Order, name="short", after=DAY, retention=kept_days * DAY, **WAITING)
    declare(Order, name="by_hand", after=DAY, retention=DAY)
    found = [str(each.msg) for each in run_checks() if each.id == "django_delayq.E002"]
    said = "CATCH_UP must be less than half of the retention of testapp.order.short, 14 d."
    assert found == ([said] if kept_days == 14 else [])
    for wrong in (30, "30d", -DAY, 40_000 * DAY):
        with pytest.raises(PolicyError, match="retention must be a timedelta from 0 to 36500 days"):
            declare(Order, name="wrong", after=DAY, retention=wrong)
