"""pause, hold, resume, replan, late, brake, shadow: what they say of one policy, of several, and of all."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.db import transaction
from django.db.models import Q
from django.utils import timezone

from django_delayq import Late, get_policies, get_policy, operations, pending_timeouts
from django_delayq.ledger import controls
from django_delayq.models import PolicyChange, PolicyControl, Timeout
from tests.integration.commands.conftest import CLI, LINGER, REMIND, UNPAID, Do, Types, stop_of
from tests.integration.operations.conftest import pending
from tests.testapp.models import Order

pytestmark = pytest.mark.django_db(transaction=True)

HOUR = timedelta(hours=1)
NOT_DONE = "(dry run: nothing was changed)"
each_stop = pytest.mark.parametrize(("command", "stop"), [("delayq_pause", "paused"), ("delayq_hold", "held")])


def stops() -> dict[str, tuple[str, bool]]:
    """Return the stop of each policy, and whether it has an end."""
    return {each.label: (each.stop, each.until is not None) for each in controls.policy_states("default")}


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
    said = do("delayq_resume", REMIND).out
    assert f"{REMIND} (was paused until 20" in said and ": outage; 1 pending): running" in said
    assert (stop_of(REMIND), stop_of(LINGER)) == ("", "paused")
    assert "nothing to change" in do("delayq_resume", REMIND).out


def test_a_stop_again_says_what_it_keeps_and_what_it_changes(do: Do) -> None:
    do("delayq_pause", REMIND, "--until", "2h", "--reason", "outage")
    until = PolicyControl.objects.get().until
    assert "nothing to change" in do("delayq_pause", REMIND).out
    assert PolicyControl.objects.get().until == until
    said = do("delayq_pause", REMIND, "--reason", "still down").out
    assert "(was paused until 20" in said and ": outage; 0 pending): paused until 20" in said
    assert said.rstrip().endswith(": still down")
    assert do("delayq_pause", REMIND, "--until", "never").out.rstrip().endswith("pending): paused: still down")
    assert PolicyControl.objects.get().until is None
    at = (timezone.localtime() + HOUR).isoformat(timespec="seconds")
    assert "(was paused: still down; 0 pending): held until 20" in do("delayq_hold", REMIND, "--until", at).out
    assert do("delayq_hold", REMIND, "--until", "never").out.rstrip().endswith(": held: still down")
    PolicyControl.objects.update(reason="\x1b[2J\x1b[Houtage\nall is well")  # from the admin
    out = do("delayq_resume", REMIND, "--dry-run").out
    assert "outage all is well" in out and "\x1b" not in out and out.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["delayq_pause", REMIND, "--until", "nonsense"], 2, "is not a time"),
        (["delayq_pause", REMIND, "--until", "1m ago"], 1, "is in the past"),
        (["delayq_pause", LINGER], 1, "on hold: resume it first"),
        (["delayq_pause", REMIND, "testapp.order.lingr"], 1, "Did you mean"),
        (["delayq_brake", REMIND, "abc", "--per", "10m"], 2, "is not a number"),
        (["delayq_brake", REMIND, "5", "--per", "0s"], 2, "too short or too long"),
        (["delayq_brake", REMIND, "500"], 2, "--per: This field is required"),
        (["delayq_brake", REMIND, "off", "--per", "10m"], 2, "Give either `NUMBER`, `--per`, or `off`"),
        (["delayq_brake", "--policy", REMIND, "500", "--per", "10m"], 1, "NUMBER|policy"),
        (["delayq_late", REMIND, "soon"], 2, "is not a duration"),
        (["delayq_late", REMIND, "400d"], 2, "DURATION: This duration is too short or too long"),
        (["delayq_late", REMIND, "off", "--then", "dead"], 2, "Give either `DURATION`, or `off`"),
        (["delayq_shadow", REMIND, "--share", "101"], 2, "must be 0 to 100"),
        (["delayq_shadow", REMIND], 2, "Give either `--share`, or `off`, or `declared`"),
        (["delayq_shadow", REMIND, "maybe"], 1, r"argument on\|off\|declared: invalid choice"),
        (["delayq_shadow", REMIND, "off", "--share", "10"], 2, "Give either"),
        (["delayq_replan", UNPAID], 1, "--mode"),
        (["delayq_replan", UNPAID, "--mode", "shift"], 1, "need another delay"),
        (["delayq_replan", UNPAID, "--mode", "keep", "--after", "1h", "--declared"], 1, "not allowed with"),
        (["delayq_replan", REMIND, "--mode", "keep", "--after", "1h"], 1, "declares no delay"),
        *((["delayq_" + name], 1, "or --all") for name in ("pause", "hold", "resume")),
        *((["delayq_" + name, "--all", REMIND], 1, "or --all") for name in ("pause", "hold", "resume")),
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


def test_a_dry_run_says_what_would_change_changes_nothing_and_leaves_a_transaction_usable(do: Do) -> None:
    do("delayq_pause", LINGER), do("delayq_hold", UNPAID), do("delayq_brake", REMIND, "500", "--per", "10m")
    before = PolicyChange.objects.count(), list(PolicyControl.objects.order_by("policy").values())
    for arguments in (
        *(("delayq_pause", LINGER), ("delayq_hold", UNPAID), ("delayq_resume", REMIND)),
        *(("delayq_brake", REMIND, "500", "--per", "10m"), ("delayq_late", REMIND, "declared")),
    ):
        assert do(*arguments, "--dry-run").out.rstrip().endswith(f": nothing to change {NOT_DONE}")
        assert do(*arguments).out.rstrip().endswith(": nothing to change")
    with transaction.atomic():
        order = Order.objects.create()
        assert "would be resumed" in do("delayq_resume", UNPAID, "--dry-run").out
        assert NOT_DONE in do("delayq_pause", REMIND, "--dry-run").out + do("delayq_hold", REMIND, "--dry-run").out
        with pytest.raises(CommandError, match="on hold"):
            do("delayq_pause", UNPAID, "--dry-run")
        said = do("delayq_shadow", REMIND, "on", "--dry-run").out.strip()
        assert said == f"{REMIND} (was off; 0 pending): would be changed. 0 timeouts are pending. {NOT_DONE}"
    assert Order.objects.filter(pk=order.pk).exists()
    assert (PolicyChange.objects.count(), list(PolicyControl.objects.order_by("policy").values())) == before


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
    do("delayq_hold", REMIND)
    assert "moved" not in do("delayq_resume", REMIND, "--no-shift").out
    assert stop_of(REMIND) == ""


@pytest.mark.parametrize(("mode", "minutes"), [("keep", 30), ("recompute", 45)])
def test_a_delay_is_changed_with_a_preview(do: Do, typing: Types, mode: str, minutes: int) -> None:
    (order,) = unpaid()
    arguments = ("delayq_replan", UNPAID, "--after", "45m", "--mode", mode)
    said = do(*arguments, "--dry-run").out
    numbers = "1 deadline stays." if mode == "keep" else "1 deadline will change.\nNone is due now."
    assert f"{UNPAID}:\n{numbers}\nThe first: {order.pk}.\nDelay in force: 30 min.\nNew delay: 45 min." in said
    assert f"would {mode} 1 pending deadline {NOT_DONE}" in said
    assert not PolicyChange.objects.exists()
    assert f"changed; {0 if mode == 'keep' else 1} moved" in do(*arguments).out
    assert waits(order) == timedelta(minutes=minutes)
    # Without another delay, pending deadlines are computed again.
    assert f"{int(mode == 'keep')} moved" in do("delayq_replan", UNPAID, "--mode", "recompute").out
    assert waits(order) == timedelta(minutes=45) == controls.policy_state(get_policy(UNPAID), "default").after
    unpaid(10)
    again = ("delayq_replan", UNPAID, "--declared", "--mode", "recompute")
    with pytest.raises(CommandError, match="recompute 11 timeouts"):
        do(*again)
    assert waits(order) == timedelta(minutes=45)
    typing("yes\n")
    assert "11 moved" in do(*again).out
    assert waits(order) == timedelta(minutes=30)


@each_stop
def test_everything_stops_for_an_hour(do: Do, command: str, stop: str) -> None:
    said = do(command, "--all", "--until", "1h", "--reason", "the database moves").out
    assert len(said.splitlines()) == len(get_policies())
    assert set(stops().values()) == {(stop, True)}
    ends = PolicyControl.objects.values_list("until", flat=True)
    assert all(end is not None and abs(end - timezone.now() - HOUR) < timedelta(minutes=5) for end in ends)
    assert f"{REMIND} until 20" in do("delayq_status").out
    assert do("delayq_resume", "--all", "--reason", "it is back").out.count(": running") == len(get_policies())
    assert set(stops().values()) == {("", False)}


@each_stop
def test_of_all_policies_those_that_are_stopped_for_longer_stay_as_they_are(do: Do, command: str, stop: str) -> None:
    operations.pause(REMIND, by="admin:alice", reason="wrong price list")
    operations.hold(LINGER, by="admin:alice", until=timezone.now() + 2 * HOUR)
    operations.pause(UNPAID, by="admin:alice", until=timezone.now() + HOUR / 2)
    said = do(command, "--all", "--until", "1h").out
    assert said.count("left as it is, because it is stopped for longer") == 2
    assert (stops()[REMIND], stops()[LINGER], stops()[UNPAID]) == (("paused", False), ("held", True), (stop, True))
    assert PolicyControl.objects.get(policy=REMIND).reason == "wrong price list"
    do("delayq_resume", LINGER)
    do(command, "--all")
    assert {stops()[UNPAID], stops()[LINGER]} == {(stop, False)}, "until they are resumed"


def test_one_policy_that_refuses_does_not_keep_the_others_running(do: Do) -> None:
    operations.hold(LINGER, by="admin:alice", until=timezone.now() + HOUR / 2)
    with pytest.raises(CommandError, match=f"{LINGER} is on hold: resume it first") as refused:
        do("delayq_pause", "--all", "--until", "1h")
    assert refused.value.returncode == 1
    found = stops()
    assert found.pop(LINGER) == ("held", True)
    assert set(found.values()) == {("paused", True)}
    with pytest.raises(CommandError, match="resume it first"):
        do("delayq_pause", LINGER, REMIND, "--reason", "again")
    assert PolicyControl.objects.get(policy=REMIND).reason == "again"


@pytest.mark.parametrize(
    ("command", "arguments", "stored", "shown"),
    [
        ("late", ["90m", "--then", "dead"], {"after": 5400, "then": "dead"}, "dead after 1 h 30 min"),
        ("late", ["off"], None, "off"),
        ("brake", ["500", "--per", "10m"], {"most": 500, "per": 600}, "500 in 10 min"),
        ("shadow", ["on"], 100, "100 %"),
        ("shadow", ["on", "--share", "10"], 10, "10 %"),
        ("shadow", ["off"], 0, "off"),
    ],
)
def test_a_guard_is_set_and_declared_again(do: Do, command: str, arguments: list[str], stored: Any, shown: str) -> None:
    pending(Order.objects.create())
    report = do(f"delayq_{command}", REMIND, *arguments).out
    assert report.strip() == f"{REMIND} (was off; 1 pending): {shown}, set by {CLI}"
    assert PolicyControl.objects.get().guards[command] == stored
    assert "nothing to change" in do(f"delayq_{command}", REMIND, *arguments).out
    assert do(f"delayq_{command}", REMIND, "declared").out.rstrip().endswith(": off")
    assert PolicyControl.objects.get().guards == {}


def test_programs_pass_numbers() -> None:
    call_command("delayq_brake", REMIND, 500, per="10m", stdout=None)
    call_command("delayq_shadow", REMIND, share=10)
    state = controls.policy_state(REMIND, "default")
    assert (state.brake and state.brake.most, state.shadow) == (500, 10)


@pytest.mark.parametrize("then", ["skip", "dead", "fire"])
def test_a_backfill_names_the_lateness_beyond_which_its_rounds_do_not_fire(declare: Any, do: Do, then: Any) -> None:
    """Otherwise all of them are closed as too late, and only the ledger shows it."""
    late = Late(6 * HOUR, then)
    policy = declare(Order, name="old", after=HOUR, since="created_at", when=Q(status="old"), late=late)
    Order.objects.bulk_create([Order(status="old", created_at=timezone.now() - timedelta(days=40))])
    backfill = ("delayq_sync", "--policy", policy.label, "--backfill", "--dry-run")
    result = do(*backfill)
    assert ("Those over 6 h late will not fire." in result.err) == (then != "fire")
    assert "1 armed, 0 moved, 0 cancelled (dry run" in result.out
    off = do("delayq_late", policy.label, "off").out
    assert f"(was {then} after 6 h, as declared; 0 pending): off, set by {CLI}" in off
    assert not do(*backfill).err
