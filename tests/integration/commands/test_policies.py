"""pause, hold, resume, replan, late, brake, shadow: what they say of one policy, of several, and of all."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.core.management import CommandError
from django.db.models import Q
from django.utils import timezone

from django_delayq import Late, get_policies, operations
from django_delayq.ledger import controls
from django_delayq.models import PolicyChange, PolicyControl, Timeout
from tests.integration.commands.conftest import CLI, LINGER, REMIND, UNPAID, Do, Types, stop_of
from tests.integration.operations.conftest import pending
from tests.testapp.models import Order

pytestmark = pytest.mark.django_db(transaction=True)

HOUR = timedelta(hours=1)


def stops() -> dict[str, tuple[str, bool]]:
    """Return the stop of each policy, and whether it has an end."""
    return {each.label: (each.stop, each.until is not None) for each in controls.policy_states("default")}


def test_a_stop_says_what_it_keeps_and_what_it_changes(do: Do) -> None:
    pending(Order.objects.create())
    said = do("delayq_pause", REMIND, LINGER, "--until", "2h", "--reason", "outage").out
    assert f"{REMIND} (was running; 1 pending): paused until 20" in said
    until = PolicyControl.objects.get(policy=REMIND).until
    assert "nothing to change" in do("delayq_pause", REMIND).out
    assert PolicyControl.objects.get(policy=REMIND).until == until
    said = do("delayq_pause", REMIND, "--reason", "still down").out
    assert "(was paused until 20" in said and ": outage; 1 pending): paused until 20" in said
    assert said.rstrip().endswith(": still down")
    assert do("delayq_hold", REMIND, "--until", "never").out.rstrip().endswith("): held: still down")
    assert PolicyControl.objects.get(policy=REMIND).until is None
    assert "(was held: still down; 1 pending): running" in do("delayq_resume", REMIND, "--no-shift").out
    assert (stop_of(REMIND), stop_of(LINGER)) == ("", "paused")
    PolicyControl.objects.update(reason="\x1b[2J\x1b[Houtage\nall is well")  # from the admin
    out = do("delayq_resume", LINGER, "--dry-run").out
    assert "outage all is well" in out and "\x1b" not in out and out.count("\n") == 1


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


@pytest.mark.parametrize(("command", "stop"), [("delayq_pause", "paused"), ("delayq_hold", "held")])
def test_everything_stops_for_an_hour(do: Do, command: str, stop: str) -> None:
    said = do(command, "--all", "--until", "1h", "--reason", "the database moves").out
    assert len(said.splitlines()) == len(get_policies())
    assert set(stops().values()) == {(stop, True)}
    assert f"{REMIND} until 20" in do("delayq_status").out
    assert do("delayq_resume", "--all", "--reason", "it is back").out.count(": running") == len(get_policies())
    assert set(stops().values()) == {("", False)}


def test_of_all_policies_those_that_are_stopped_for_longer_stay_as_they_are(do: Do) -> None:
    operations.pause(REMIND, by="admin:alice", reason="wrong price list")
    operations.hold(LINGER, by="admin:alice", until=timezone.now() + 2 * HOUR)
    operations.pause(UNPAID, by="admin:alice", until=timezone.now() + HOUR / 2)
    said = do("delayq_hold", "--all", "--until", "1h").out
    assert said.count("left as it is, because it is stopped for longer") == 2
    assert (stops()[REMIND], stops()[LINGER], stops()[UNPAID]) == (("paused", False), ("held", True), ("held", True))
    assert PolicyControl.objects.get(policy=REMIND).reason == "wrong price list"


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
