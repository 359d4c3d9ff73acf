"""sync and prune: which policies, how old, and how far a long run has come."""

from __future__ import annotations

import io
import itertools
from datetime import timedelta

import pytest
from django.core.management import CommandError, call_command
from django.utils import timezone

from django_delayq.models import Timeout
from tests.integration.commands.conftest import LINGER, REMIND, UNPAID, Do, Terminal, Types
from tests.integration.operations.conftest import as_if, pending
from tests.support.typed import Patch
from tests.testapp.models import Order

pytestmark = pytest.mark.django_db(transaction=True)

DAY = timedelta(days=1)
BACKFILL = ("delayq_sync", "--policy", UNPAID, "--backfill")


def unpaid(*ages: int) -> None:
    """Store orders that are unpaid since so many days, without a timeout."""
    Order.objects.bulk_create(Order(status="unpaid", created_at=timezone.now() - age * DAY) for age in ages)


def settled(*ages: int, policy: str = "remind") -> list[Timeout]:
    rows = [pending(Order.objects.create(), policy) for _ in ages]
    for row, age in zip(rows, ages, strict=True):
        at = timezone.now() - age * DAY
        as_if(row, "fired", "due", settled_at=at, due_at=at, first_due_at=at)
    return rows


def test_a_backfill_arms_only_rounds_that_are_new_enough(do: Do) -> None:
    unpaid(10, 80, 100, 400)
    newer = (*BACKFILL, "--newer-than", "90d")
    assert do(*newer, "--dry-run").out.startswith(f"{UNPAID}: 2 armed, 0 moved")
    assert not Timeout.objects.exists()
    assert do(*newer).out.startswith(f"{UNPAID}: 2 armed")
    since = [row.since_at for row in Timeout.objects.all()]
    assert all(at is not None and at > timezone.now() - 90 * DAY for at in since)
    assert do(*BACKFILL).out.startswith(f"{UNPAID}: 2 armed"), "the two others"


def test_a_sync_takes_several_policies_and_refuses_what_makes_no_sense(do: Do) -> None:
    expire = "testapp.voucher.expire"
    said = do("delayq_sync", "--policy", UNPAID, "--policy", expire, "--policy", UNPAID).out
    assert [line.partition(":")[0] for line in said.splitlines()] == [UNPAID, expire]
    for more, words in (
        (("--policy", REMIND), "is not automatic"),
        (("--newer-than", "90d"), "give both"),
        (("--backfill", "--newer-than", "long"), "is not a duration"),
    ):
        with pytest.raises(CommandError, match=words):
            do("delayq_sync", "--policy", UNPAID, *more)


def test_a_prune_takes_policies_and_an_age_and_can_be_tried(do: Do) -> None:
    kept, _old = settled(20, 60)
    (other,) = settled(60, policy="linger")
    assert do("delayq_prune", "--policy", REMIND, "--older-than", "50d", "--dry-run").out.startswith("1 timeout of")
    assert do("delayq_prune", "--older-than", "70d").out == "0 timeouts settled more than 70 days ago were deleted\n"
    tried = do("delayq_prune", "--dry-run").out
    assert tried == "2 timeouts settled more than 30 days ago (dry run: nothing was changed)\n"
    said = do("delayq_prune", "--policy", REMIND).out
    assert said == f"1 timeout of {REMIND} settled more than 30 days ago was deleted\n"
    assert set(Timeout.objects.values_list("pk", flat=True)) == {kept.pk, other.pk}
    Timeout.objects.filter(pk=other.pk).update(policy="testapp.order.forgotten")
    assert "1 timeout of testapp.order.forgotten" in do("delayq_prune", "--policy", "testapp.order.forgotten").out
    with pytest.raises(CommandError, match="rounds could fire again") as refused:
        do("delayq_prune", "--older-than", "14d")
    assert refused.value.returncode == 2
    with pytest.raises(CommandError, match="testapp.order.remin"):
        do("delayq_prune", "--policy", "testapp.order.remin")
    assert Timeout.objects.get() == kept
    do("delayq_prune", "--policy", REMIND, "--policy", LINGER, "--older-than", "15d")
    assert not Timeout.objects.exists()


@pytest.mark.parametrize("command", [("delayq_sync",), BACKFILL, ("delayq_prune",)])
def test_progress_is_shown_on_a_terminal_and_each_minute_elsewhere(
    command: tuple[str, ...], monkeypatch: Patch
) -> None:
    unpaid(*[0] * 3)
    settled(*[60] * 3)
    terminal, out = Terminal(), io.StringIO()
    call_command(*command, "--dry-run" if command[0] == "delayq_sync" else "--yes", stdout=out, stderr=terminal)
    assert "3 examined\r" in terminal.getvalue() and "examined" not in out.getvalue()
    settled(*[60] * 3)
    Timeout.objects.filter(policy=UNPAID).delete()
    clock = itertools.count(0, 61)
    monkeypatch.setattr("django_delayq.management.operating.time.monotonic", lambda: float(next(clock)))
    out, err = io.StringIO(), io.StringIO()
    call_command(*command, "--yes", stdout=out, stderr=err)
    assert "3 examined\n" in out.getvalue() and not err.getvalue()
    call_command(*command, "--yes", stdout=(out := io.StringIO()), verbosity=0)
    assert "examined" not in out.getvalue()


def test_a_backfill_and_pruning_ask_whoever_is_there_and_nobody_else(typing: Types, do: Do) -> None:
    long_ago = timezone.now() - timedelta(days=400)
    Order.objects.bulk_create(Order(created_at=long_ago) for _ in range(11))
    typing("n\n")
    with pytest.raises(CommandError, match="Nothing was changed"):
        do(*BACKFILL)
    assert not Timeout.objects.exists()
    assert "11 armed" in do(*BACKFILL, "--dry-run").out
    assert "11 armed" in do(*BACKFILL, "--yes").out
    old = [as_if(row, "fired", "due", due_at=long_ago, settled_at=long_ago) for row in Timeout.objects.all()]
    with pytest.raises(CommandError, match="Nothing was changed"):
        do("delayq_prune")
    assert Timeout.objects.count() == len(old)
    typing(None)  # cron
    assert do("delayq_prune").out.startswith("11 timeouts")
