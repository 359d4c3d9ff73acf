"""late, brake, shadow: by command, and what the reports show of them."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.db.models import Q
from django.utils import timezone

from django_delayq import Late, Limits, Rate, operations
from django_delayq.ledger.controls import policy_state
from django_delayq.models import PolicyChange, PolicyControl
from tests.integration.commands.conftest import CLI, Do
from tests.integration.commands.test_verbs import REMIND
from tests.integration.operations.conftest import pending
from tests.testapp.models import Order

pytestmark = pytest.mark.django_db(transaction=True)

UNPAID = "testapp.order.cancel_unpaid"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["delayq_brake", REMIND, "off", "--per", "10m"], "Give either `NUMBER`, `--per`, or `off`"),
        (["delayq_late", REMIND, "off", "--then", "dead"], "Give either `DURATION`, or `off`"),
        (["delayq_brake", "--policy", REMIND, "500", "--per", "10m"], "NUMBER|policy"),
        (["delayq_explain", "--id", "1", "--policy", "no_such_policy"], "does not go with it"),
    ],
)
def test_an_option_without_an_effect_is_refused(do: Do, arguments: list[str], words: str) -> None:
    with pytest.raises(CommandError, match=words):
        do(*arguments)
    assert not PolicyChange.objects.exists()


@pytest.mark.parametrize(
    ("command", "arguments", "stored", "shown"),
    [
        ("late", ["6h"], {"after": 21600, "then": "skip"}, "skip after 6 h"),
        ("late", ["90m", "--then", "dead"], {"after": 5400, "then": "dead"}, "dead after 1 h 30 min"),
        ("late", ["off"], None, "off"),
        ("brake", ["500", "--per", "10m"], {"most": 500, "per": 600}, "500 in 10 min"),
        ("shadow", ["on"], 100, "100 %"),
        ("shadow", ["--share", "10"], 10, "10 %"),
        ("shadow", ["on", "--share", "10"], 10, "10 %"),
        ("shadow", ["off"], 0, "off"),
    ],
)
def test_a_guard_is_set_and_declared_again(do: Do, command: str, arguments: list[str], stored: Any, shown: str) -> None:
    pending(Order.objects.create())
    report = do(f"delayq_{command}", REMIND, *arguments, "--reason", "a campaign").out
    assert report.strip() == f"{REMIND} (was off; 1 pending): {shown}, set by {CLI}"
    assert PolicyControl.objects.get().guards[command] == stored
    change = PolicyChange.objects.get()
    assert (change.what, change.by, change.reason) == (command, CLI, "a campaign")
    assert "nothing to change" in do(f"delayq_{command}", REMIND, *arguments).out
    assert do(f"delayq_{command}", REMIND, "declared").out.rstrip().endswith(": off")
    assert PolicyControl.objects.get().guards == {}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["delayq_late", REMIND, "400d"], "DURATION: This duration is too short or too long"),
        (["delayq_late", "testapp.order.remynd", "6h"], "Did you mean"),
        (["delayq_brake", REMIND, "500"], "--per: This field is required"),
        (["delayq_shadow", REMIND], "Give either `--share`, or `off`, or `declared`"),
        (["delayq_shadow", REMIND, "maybe"], r"argument on\|off\|declared: invalid choice"),
        (["delayq_shadow", REMIND, "off", "--share", "10"], "Give either"),
    ],
)
def test_a_wrong_setting_is_refused_and_changes_nothing(do: Do, arguments: list[str], words: str) -> None:
    with pytest.raises(CommandError, match=words):
        do(*arguments)
    assert not PolicyChange.objects.exists() and not PolicyControl.objects.exists()


def test_a_dry_run_sets_no_guard(do: Do) -> None:
    report = do("delayq_shadow", REMIND, "on", "--dry-run").out
    assert (
        report.strip()
        == f"{REMIND} (was off; 0 pending): would be changed. 0 timeouts are pending. (dry run: nothing was changed)"
    )
    assert policy_state(REMIND, "default").shadow == 0


def test_what_is_declared_is_shown_as_such(do: Do, declare: Any) -> None:
    policy = declare(Order, name="guarded", late=Late(timedelta(hours=6)))
    report = do("delayq_late", policy.label, "off").out
    assert report.strip() == f"{policy.label} (was skip after 6 h, as declared; 0 pending): off, set by {CLI}"


def test_programs_pass_numbers(do: Do) -> None:
    call_command("delayq_brake", REMIND, 500, per="10m", stdout=None)
    call_command("delayq_shadow", REMIND, share=10)
    state = policy_state(REMIND, "default")
    assert (state.brake and state.brake.most, state.shadow) == (500, 10)


def test_the_reports_show_the_guards_in_force(do: Do, declare: Any) -> None:
    rate = Rate(20, per=timedelta(seconds=1), by="status")
    limits = Limits(run=timedelta(seconds=30), rate=rate, snoozes=2, total=timedelta(1))
    declare(Order, name="watched", shadow=True, limits=limits)
    do("delayq_late", REMIND, "6h")
    do("delayq_brake", REMIND, "off")
    operations.pause(UNPAID, by="brake", reason="501 fired in 10 minutes")
    status = do("delayq_status").out.splitlines()
    assert f"paused    {UNPAID} by brake: 501 fired in 10 minutes; 0 due" in status
    for lines in (status, do("delayq_policies").out.splitlines()):
        listed = {line.split()[0]: line for line in lines}
        assert listed[REMIND].endswith("late skip after 6 h*, brake off*")
        limited = "shadow 100 %, run 30 s, rate 20 in 1 s by status, snoozes 2, total 1 d"
        assert listed["testapp.order.watched"].endswith(limited)
        assert not listed[UNPAID].endswith("%")
    found = {each["label"]: each["state"] for each in json.loads(do("delayq_policies", "--json").out)}
    assert found[REMIND]["late"] == {"after": 21600, "then": "skip"}
    assert found[REMIND]["guards"]["by"] == {"late": CLI, "brake": CLI}
    assert (found["testapp.order.watched"]["shadow"], found[UNPAID]["is_braked"]) == (100, True)


@pytest.mark.parametrize("then", ["skip", "dead", "fire"])
def test_a_backfill_names_the_lateness_beyond_which_its_rounds_do_not_fire(declare: Any, do: Do, then: Any) -> None:
    """Otherwise all of them are closed as too late, and only the ledger shows it."""
    late = Late(timedelta(hours=6), then)
    policy = declare(Order, name="old", after=timedelta(hours=1), since="created_at", when=Q(status="old"), late=late)
    Order.objects.bulk_create([Order(status="old", created_at=timezone.now() - timedelta(days=40))])
    backfill = ("delayq_sync", "--policy", policy.label, "--backfill", "--dry-run")
    result = do(*backfill)
    assert ("Those over 6 h late will not fire." in result.err) == (then != "fire")
    assert "1 armed, 0 moved, 0 cancelled (dry run" in result.out
    do("delayq_late", policy.label, "off")
    assert not do(*backfill).err
