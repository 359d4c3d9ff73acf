"""pause, hold, resume, replan, late, brake, shadow, sync, prune: what they do to one policy, to several, and to all."""

from __future__ import annotations

import io
import itertools
from datetime import timedelta
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.db.models import Q
from django.utils import timezone

from django_delayq import Late, operations
from django_delayq.ledger import controls
from django_delayq.models import PolicyChange, PolicyControl, Timeout
from tests.integration.management.conftest import CLI, LINGER, REMIND, UNPAID, Do, Terminal, Types, stop_of
from tests.integration.operations.conftest import as_if, pending
from tests.support.typed import Patch
from tests.testapp.models import Order

pytestmark = pytest.mark.django_db(transaction=True)

HOUR, DAY = timedelta(hours=1), timedelta(days=1)


def stops() -> dict[str, tuple[str, bool]]:
    """Return the stop of each policy, and whether it has an end."""
    return {each.label: (each.stop, each.until is not None) for each in controls.policy_states("default")}


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["delayq_pause"], 1, "or --all"),
        (["delayq_pause", "--all", REMIND], 1, "or --all"),
        (["delayq_pause", LINGER], 1, "on hold: resume it first"),
        (["delayq_pause", REMIND, "testapp.order.lingr"], 1, "Did you mean"),
        (["delayq_pause", REMIND, "--until", "1m ago"], 1, "is in the past"),
        (["delayq_brake", REMIND, "500"], 2, "--per: This field is required"),
        (["delayq_brake", REMIND, "off", "--per", "10m"], 2, "Give either `NUMBER`, `--per`, or `off`"),
        (["delayq_late", REMIND, "soon"], 2, "is not a duration"),
        (["delayq_shadow", REMIND, "maybe"], 1, r"argument on\|off\|declared: invalid choice"),
        (["delayq_replan", UNPAID], 1, "--mode"),
        (["delayq_replan", "--mode", "keep"], 1, "Which policy"),
        (["delayq_replan", REMIND, "--mode", "keep", "--after", "1h"], 1, "declares no delay"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_is_wrong_is_refused_with_a_dry_run_too(do: Do, arguments: list[str], code: int, words: str) -> None:
    do("delayq_hold", LINGER)
    for dry_run in ((), ("--dry-run",)):
        with pytest.raises(CommandError, match=words) as refused:
            do(*arguments, *dry_run)
        assert refused.value.returncode == code
    assert PolicyChange.objects.count() == 1


def test_a_hold_ends_with_a_shift_that_is_asked_for(do: Do, typing: Types) -> None:
    rows = [pending(Order.objects.create()) for _ in range(11)]
    do("delayq_hold", REMIND), do("delayq_pause", LINGER)
    PolicyControl.objects.update(stopped_at=timezone.now() - HOUR)
    Timeout.objects.update(created_at=timezone.now() - 3 * HOUR)
    for chosen in (REMIND, "--all"):
        with pytest.raises(CommandError, match="Without a terminal"):
            do("delayq_resume", chosen)
        assert (stop_of(REMIND), stop_of(LINGER)) == ("held", "paused"), "before the first is resumed"
    assert "11 moved, 0 left unchanged" in do("delayq_resume", "--all", "--yes").out
    assert Timeout.objects.get(pk=rows[0].pk).due_at >= rows[0].due_at + HOUR
    assert stop_of(LINGER) == ""


def test_one_policy_that_refuses_does_not_keep_the_others_running(do: Do) -> None:
    operations.hold(LINGER, by="admin:alice", until=timezone.now() + HOUR / 2)
    with pytest.raises(CommandError, match=f"{LINGER} is on hold: resume it first") as refused:
        do("delayq_pause", "--all", "--until", "1h")
    assert refused.value.returncode == 1
    found = stops()
    assert found.pop(LINGER) == ("held", True)
    assert set(found.values()) == {("paused", True)}


def test_a_backfill_names_the_lateness_beyond_which_its_rounds_do_not_fire(declare: Any, do: Do) -> None:
    """Otherwise all of them are closed as too late, and only the ledger shows it."""
    late = Late(6 * HOUR)
    policy = declare(Order, name="old", after=HOUR, since="created_at", when=Q(status="old"), late=late)
    Order.objects.bulk_create([Order(status="old", created_at=timezone.now() - timedelta(days=40))])
    backfill = ("delayq_sync", "--policy", policy.label, "--backfill", "--dry-run")
    result = do(*backfill)
    assert "Those over 6 h late will not fire." in result.err
    assert "1 armed, 0 moved, 0 cancelled (dry run" in result.out
    off = do("delayq_late", policy.label, "off").out
    assert f"(was skip after 6 h, as declared; 0 pending): off, set by {CLI}" in off
    assert not do(*backfill).err


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
