"""pause, hold and resume with --all: everything stops for an hour, and what others have stopped stays stopped."""

from __future__ import annotations

import json
from datetime import timedelta

import pytest
from django.core.management import CommandError
from django.utils import timezone

from django_delayq import get_policies, operations
from django_delayq.ledger import controls
from django_delayq.models import PolicyChange, PolicyControl, Timeout
from tests.integration.commands.conftest import Do
from tests.integration.commands.test_verbs import LINGER, REMIND
from tests.integration.operations.conftest import pending
from tests.testapp.models import Order

pytestmark = pytest.mark.django_db(transaction=True)

HOUR = timedelta(hours=1)


def stops() -> dict[str, tuple[str, bool]]:
    """Return the stop of each policy, and whether it has an end."""
    return {each.label: (each.stop, each.until is not None) for each in controls.policy_states("default")}


@pytest.mark.parametrize(("command", "stop"), [("delayq_pause", "paused"), ("delayq_hold", "held")])
def test_everything_stops_for_an_hour(do: Do, command: str, stop: str) -> None:
    said = do(command, "--all", "--until", "1h", "--reason", "the database moves").out
    assert len(said.splitlines()) == len(get_policies())
    assert set(stops().values()) == {(stop, True)}
    ends = PolicyControl.objects.values_list("until", flat=True)
    assert all(end is not None and abs(end - timezone.now() - HOUR) < timedelta(minutes=5) for end in ends)
    assert f"{REMIND} until 20" in do("delayq_status").out
    said = do("delayq_resume", "--all", "--reason", "it is back").out
    assert said.count(": running") == len(get_policies())
    assert set(stops().values()) == {("", False)}


@pytest.mark.parametrize(("command", "stop"), [("delayq_pause", "paused"), ("delayq_hold", "held")])
def test_a_policy_that_is_stopped_for_longer_is_left_as_it_is(do: Do, command: str, stop: str) -> None:
    operations.pause(REMIND, by="admin:alice", reason="wrong price list")
    operations.hold(LINGER, by="admin:alice", until=timezone.now() + 2 * HOUR)
    unpaid = "testapp.order.cancel_unpaid"
    operations.pause(unpaid, by="admin:alice", until=timezone.now() + HOUR / 2)
    said = do(command, "--all", "--until", "1h").out
    assert said.count("left as it is, because it is stopped for longer") == 2
    assert (stops()[REMIND], stops()[LINGER], stops()[unpaid]) == (("paused", False), ("held", True), (stop, True))
    assert PolicyControl.objects.get(policy=REMIND).reason == "wrong price list"


def test_without_an_end_all_policies_stop_until_they_are_resumed(do: Do) -> None:
    operations.pause(REMIND, by="admin:alice", until=timezone.now() + HOUR)
    do("delayq_pause", "--all")
    assert set(stops().values()) == {("paused", False)}


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


def test_resuming_all_asks_before_the_first_is_resumed(do: Do) -> None:
    operations.pause(LINGER, by="admin:alice")
    operations.hold(REMIND, by="admin:alice")
    for _ in range(11):
        pending(Order.objects.create())
    with pytest.raises(CommandError, match="Without a terminal"):
        do("delayq_resume", "--all")
    assert (stops()[LINGER], stops()[REMIND]) == (("paused", False), ("held", False))
    said = do("delayq_resume", "--all", "--dry-run").out
    assert f"{LINGER} (was paused" in said and "would be resumed" in said
    do("delayq_resume", "--all", "--yes")
    assert set(stops().values()) == {("", False)}
    assert Timeout.objects.filter(state="pending").count() == 11


@pytest.mark.parametrize("command", ["delayq_pause", "delayq_hold", "delayq_resume"])
def test_all_does_not_go_with_labels(do: Do, command: str) -> None:
    with pytest.raises(CommandError, match="or --all"):
        do(command)
    with pytest.raises(CommandError, match="or --all"):
        do(command, "--all", REMIND)
    assert not PolicyChange.objects.exists()


def test_a_hold_of_one_policy_gets_an_end_and_loses_it(do: Do) -> None:
    at = (timezone.localtime() + HOUR).isoformat(timespec="seconds")
    assert "held until" in do("delayq_hold", REMIND, "--until", at, "--reason", "outage").out
    assert "nothing to change" in do("delayq_hold", REMIND).out
    assert json.loads(do("delayq_policies", "--json").out)
    assert do("delayq_hold", REMIND, "--until", "never").out.rstrip().endswith(": held: outage")
