"""pause, hold, resume, replan, policies: by command."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta

import pytest
from django.core.management import CommandError
from django.db import transaction
from django.utils import timezone

from django_delayq import get_policy, operations, pending_timeouts
from django_delayq.ledger import controls
from django_delayq.models import PolicyChange, PolicyControl, Timeout
from tests.integration.commands.conftest import CLI, Do
from tests.integration.commands.test_verbs import LINGER, REMIND
from tests.integration.operations.conftest import pending
from tests.testapp.models import Order

pytestmark = pytest.mark.django_db(transaction=True)

UNPAID = "testapp.order.cancel_unpaid"


def stop_of(label: str) -> str:
    return controls.policy_state(get_policy(label), "default").stop


def unpaid(count: int = 1) -> list[Order]:
    return [Order.objects.create(status="unpaid", created_at=timezone.now()) for _ in range(count)]


def waits(order: Order) -> timedelta:
    assert order.created_at is not None
    return pending_timeouts(order).get().due_at - order.created_at


def test_policies_are_paused_and_resumed(do: Do) -> None:
    pending(Order.objects.create())
    said = do("delayq_pause", REMIND, LINGER, "--until", "2h", "--reason", "outage").out
    assert f"{REMIND} (was running; 1 pending): paused until 20" in said
    assert (stop_of(REMIND), stop_of(LINGER)) == ("paused", "paused")
    change = PolicyChange.objects.filter(policy=REMIND).get()
    assert (change.by, change.reason, change.what) == (CLI, "outage", "paused")
    said = do("delayq_resume", REMIND).out
    assert f"{REMIND} (was paused until 20" in said
    assert ": outage; 1 pending): running" in said
    assert (stop_of(REMIND), stop_of(LINGER)) == ("", "paused")
    assert "nothing to change" in do("delayq_resume", REMIND).out


def test_a_pause_again_says_what_it_keeps_and_what_it_changes(do: Do) -> None:
    do("delayq_pause", REMIND, "--until", "2h", "--reason", "outage")
    until = PolicyControl.objects.get().until
    assert "nothing to change" in do("delayq_pause", REMIND).out
    assert PolicyControl.objects.get().until == until
    said = do("delayq_pause", REMIND, "--reason", "still down").out
    assert "(was paused until 20" in said and ": outage; 0 pending): paused until 20" in said
    assert said.rstrip().endswith(": still down")
    assert do("delayq_pause", REMIND, "--until", "never").out.rstrip().endswith("pending): paused: still down")
    assert PolicyControl.objects.get().until is None
    assert do("delayq_hold", REMIND).out.rstrip().endswith("(was paused: still down; 0 pending): held: still down")
    with pytest.raises(CommandError, match="on hold: resume it first"):
        do("delayq_pause", REMIND)


@pytest.mark.parametrize("command", ["delayq_pause", "delayq_hold", "delayq_resume"])
def test_a_reason_from_the_admin_does_not_control_the_terminal(do: Do, command: str) -> None:
    operations.pause(REMIND, by="admin:eve", reason="\x1b[2J\x1b[Houtage\nall is well")
    out = do(command, REMIND, "--dry-run").out
    assert "outage all is well" in out and "\x1b" not in out and out.count("\n") == 1


def test_a_hold_ends_with_a_shift_that_is_asked_for(do: Do, typing: Callable[[str | None], None]) -> None:
    rows = [pending(Order.objects.create()) for _ in range(11)]
    do("delayq_hold", REMIND)
    PolicyControl.objects.update(stopped_at=timezone.now() - timedelta(hours=1))
    Timeout.objects.update(created_at=timezone.now() - timedelta(hours=3))
    with pytest.raises(CommandError, match="Without a terminal"):
        do("delayq_resume", REMIND)
    assert stop_of(REMIND) == "held"
    assert "11 moved, 0 left unchanged" in do("delayq_resume", REMIND, "--yes").out
    assert Timeout.objects.get(pk=rows[0].pk).due_at >= rows[0].due_at + timedelta(hours=1)
    do("delayq_hold", REMIND)
    assert "moved" not in do("delayq_resume", REMIND, "--no-shift").out
    assert stop_of(REMIND) == ""


@pytest.mark.parametrize("command", ["delayq_pause", "delayq_hold", "delayq_resume"])
def test_a_dry_run_changes_no_policy(do: Do, command: str) -> None:
    if command == "delayq_resume":
        do("delayq_hold", REMIND)
    before = (stop_of(REMIND), PolicyChange.objects.count())
    assert "dry run: nothing was changed" in do(command, REMIND, "--dry-run").out
    assert (stop_of(REMIND), PolicyChange.objects.count()) == before


@pytest.mark.parametrize("dry_run", [(), ("--dry-run",)])
@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["delayq_pause", REMIND, "--until", "nonsense"], 2, "is not a time"),
        (["delayq_pause", REMIND, "--until", "1m ago"], 1, "is in the past"),
        (["delayq_pause", LINGER], 1, "on hold: resume it first"),
        (["delayq_brake", REMIND, "abc", "--per", "10m"], 2, "is not a number"),
        (["delayq_brake", REMIND, "5", "--per", "0s"], 2, "too short or too long"),
        (["delayq_late", REMIND, "soon"], 2, "is not a duration"),
        (["delayq_shadow", REMIND, "--share", "101"], 2, "must be 0 to 100"),
    ],
)
def test_a_dry_run_is_refused_as_the_command_is(
    do: Do, arguments: list[str], code: int, words: str, dry_run: tuple[str, ...]
) -> None:
    do("delayq_hold", LINGER)
    with pytest.raises(CommandError, match=words) as refused:
        do(*arguments, *dry_run)
    assert refused.value.returncode == code
    assert PolicyChange.objects.count() == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ("delayq_pause", LINGER),
        ("delayq_hold", UNPAID),
        ("delayq_resume", REMIND),
        ("delayq_brake", REMIND, "500", "--per", "10m"),
        ("delayq_late", REMIND, "declared"),
    ],
)
def test_a_dry_run_says_that_nothing_would_change(do: Do, arguments: tuple[str, ...]) -> None:
    do("delayq_pause", LINGER)
    do("delayq_hold", UNPAID)
    do("delayq_brake", REMIND, "500", "--per", "10m")
    assert do(*arguments, "--dry-run").out.rstrip().endswith(": nothing to change (dry run: nothing was changed)")
    assert do(*arguments).out.rstrip().endswith(": nothing to change")


def test_a_dry_run_in_a_transaction_leaves_it_usable(do: Do) -> None:
    do("delayq_hold", LINGER)
    with transaction.atomic():
        order = Order.objects.create()
        assert "would be resumed" in do("delayq_resume", LINGER, "--dry-run").out
        with pytest.raises(CommandError, match="on hold"):
            do("delayq_pause", LINGER, "--dry-run")
    assert Order.objects.filter(pk=order.pk).exists()
    assert stop_of(LINGER) == "held"


def test_a_wrong_name_among_several_changes_none(do: Do) -> None:
    with pytest.raises(CommandError, match="Did you mean"):
        do("delayq_pause", REMIND, "testapp.order.lingr")
    assert stop_of(REMIND) == ""
    do("delayq_hold", REMIND)
    with pytest.raises(CommandError, match="on hold"):
        do("delayq_pause", REMIND)
    with pytest.raises(CommandError, match="is in the past"):
        do("delayq_pause", LINGER, "--until", "1m ago")
    assert PolicyChange.objects.count() == 1


@pytest.mark.parametrize(("mode", "minutes"), [("keep", 30), ("recompute", 45), ("shift", 45)])
def test_a_delay_is_changed_with_a_preview(do: Do, mode: str, minutes: int) -> None:
    (order,) = unpaid()
    arguments = ("delayq_replan", UNPAID, "--after", "45m", "--mode", mode)
    said = do(*arguments, "--dry-run").out
    numbers = "1 deadline stays." if mode == "keep" else "1 deadline will change.\nNone is due now."
    assert f"{UNPAID}:\n{numbers}\nThe first: {order.pk}.\nDelay in force: 30 min.\nNew delay: 45 min." in said
    assert f"would {mode} 1 pending deadline (dry run: nothing was changed)" in said
    assert not PolicyChange.objects.exists()
    assert f"changed; {0 if mode == 'keep' else 1} moved" in do(*arguments, "--reason", "holidays").out
    assert waits(order) == timedelta(minutes=minutes)
    change = PolicyChange.objects.get()
    assert (change.by, change.reason) == (CLI, "holidays")
    do("delayq_replan", UNPAID, "--declared", "--mode", "recompute")
    assert waits(order) == timedelta(minutes=30)


def test_without_another_delay_what_is_pending_is_planned_anew(do: Do) -> None:
    (order,) = unpaid()
    do("delayq_replan", UNPAID, "--after", "45m", "--mode", "keep")
    assert "1 moved" in do("delayq_replan", UNPAID, "--mode", "recompute").out
    assert waits(order) == timedelta(minutes=45)
    assert controls.policy_state(get_policy(UNPAID), "default").after == timedelta(minutes=45)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([UNPAID], "--mode"),
        ([UNPAID, "--mode", "shift"], "need another delay"),
        ([UNPAID, "--mode", "keep", "--after", "1h", "--declared"], "not allowed with"),
        ([REMIND, "--mode", "keep", "--after", "1h"], "declares no delay"),
        (["testapp.order.cancel_unpayd", "--mode", "keep", "--after", "1h"], "Did you mean"),
    ],
)
def test_a_wrong_replan_is_refused(do: Do, arguments: list[str], words: str) -> None:
    with pytest.raises(CommandError, match=words):
        do("delayq_replan", *arguments)
    assert not PolicyChange.objects.exists()


def test_moving_many_is_asked_for(do: Do, typing: Callable[[str | None], None]) -> None:
    orders = unpaid(11)
    with pytest.raises(CommandError, match="recompute 11 timeouts"):
        do("delayq_replan", UNPAID, "--after", "45m", "--mode", "recompute")
    assert waits(orders[0]) == timedelta(minutes=30)
    typing("yes\n")
    assert "11 moved" in do("delayq_replan", UNPAID, "--after", "45m", "--mode", "recompute").out


def test_the_policies_are_listed_with_what_is_in_force(do: Do) -> None:
    unpaid(2)
    do("delayq_replan", UNPAID, "--after", "45m", "--mode", "keep")
    do("delayq_pause", UNPAID)
    lines = do("delayq_policies").out.splitlines()
    (line,) = [line for line in lines if line.startswith(UNPAID)]
    assert line.split()[1:6] == ["45", "min*", "paused", "2", "0"]
    found = {each["label"]: each for each in json.loads(do("delayq_policies", "--json").out)}
    assert found[UNPAID]["pending"] == {"value": 2, "is_capped": False}
    assert found[UNPAID]["state"]["after"] == found[UNPAID]["state"]["delay"] == 45 * 60
    assert found[UNPAID]["state"]["by"] == CLI
    assert len(found[UNPAID]["hours"]) == 24
