"""`call_command` with keywords does what the shell does; a state is a selection; who only reads need not choose."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.utils import timezone

from django_delayq import get_policy
from django_delayq.ledger import controls
from django_delayq.models import Timeout
from tests.integration.commands.conftest import CLI, Do
from tests.integration.commands.test_verbs import LINGER, REMIND
from tests.integration.operations.conftest import as_if, dead, pending, said
from tests.testapp.models import Order

pytestmark = pytest.mark.django_db(transaction=True)

UNPAID = "testapp.order.cancel_unpaid"


def call(*arguments: str, **options: Any) -> str:
    out = io.StringIO()
    call_command(*arguments, stdout=out, stderr=io.StringIO(), **options)
    return out.getvalue()


def listed(**options: Any) -> set[int]:
    return {row["id"] for row in json.loads(call("delayq_list", json=True, **options))}


@pytest.fixture
def rows() -> dict[str, Timeout]:
    """One that is due soon, one that is due late, and one that is dead."""
    return {
        "soon": pending(Order.objects.create(), "remind", minutes=5),
        "late": pending(Order.objects.create(), "linger", hours=5),
        "dead": dead(Order.objects.create()),
    }


def test_keywords_choose_as_options_do(rows: dict[str, Timeout]) -> None:
    soon, late, gone = rows["soon"].pk, rows["late"].pk, rows["dead"].pk
    assert listed() == {soon, late}
    assert listed(policy=REMIND) == listed(policy=[REMIND]) == {soon}
    assert listed(policy=(REMIND, LINGER), limit="1") == {soon}
    assert listed(policy=LINGER, object=int(rows["late"].object_id)) == {late}
    assert listed(id=late) == listed(id=str(late)) == {late}
    assert listed(due_before="1h") == listed(due_before=timezone.now() + timedelta(hours=1)) == {soon}
    assert listed(state="dead") == {gone}
    assert listed(policy="remind", model="testapp.Order") == {soon}


def test_keywords_steer_as_options_do(rows: dict[str, Timeout]) -> None:
    assert call("delayq_postpone", policy=LINGER, object=rows["late"].object_id, by="2h") == "1 postponed\n"
    assert call("delayq_cancel", policy=REMIND, key="", reason="by a program") == "1 cancelled\n"
    assert said(rows["soon"])[-1][1:] == (CLI, "by a program")
    call("delayq_pause", REMIND, until="2h")
    state = controls.policy_state(get_policy(REMIND), "default")
    assert state.stop == "paused"
    assert state.until is not None
    assert call("delayq_resume", policy=REMIND).endswith("running\n")
    call("delayq_replan", UNPAID, after="45m", mode="keep")
    assert controls.policy_state(get_policy(UNPAID), "default").after == timedelta(minutes=45)
    call("delayq_replan", policy=UNPAID, declared=True, mode="keep")
    assert controls.policy_state(get_policy(UNPAID), "default").after is None


def test_keywords_may_be_typed_values(rows: dict[str, Timeout]) -> None:
    before, until = rows["late"].due_at, timezone.now() + timedelta(hours=3)
    assert call("delayq_postpone", id=[rows["late"].pk], by=timedelta(hours=2)) == "1 postponed\n"
    rows["late"].refresh_from_db()
    assert rows["late"].due_at == before + timedelta(hours=2)
    assert call("delayq_postpone", id=rows["soon"].pk, to=until) == "1 postponed\n"
    call("delayq_pause", policy=[REMIND], until=until)
    assert controls.policy_state(get_policy(REMIND), "default").until == until
    call("delayq_pause", policy=REMIND, until=None)
    assert controls.policy_state(get_policy(REMIND), "default").until is None
    call("delayq_replan", UNPAID, after=timedelta(minutes=45), mode="keep")
    assert controls.policy_state(get_policy(UNPAID), "default").after == timedelta(minutes=45)


def test_one_queue_is_one_queue_and_not_its_letters() -> None:
    assert "queues    default\n" in call("delayq_worker", queue="default", burst=True)


def test_queues_stand_in_a_row_or_one_by_one() -> None:
    for arguments in (["--queue", "default", "other"], ["--queue", "default", "--queue", "other"]):
        assert "queues    default, other\n" in call("delayq_worker", *arguments, "--burst")
    assert "queues    default, other\n" in call("delayq_worker", queue=["default", "other"], burst=True)


def test_an_empty_list_selects_nothing(rows: dict[str, Timeout]) -> None:
    for option in ("policy", "id", "state"):
        assert listed(**{option: []}) == set(), option
    for restriction in ({"policy": LINGER}, {"model": "testapp.Order"}):
        assert listed(**restriction, object=()) == set()
        assert call("delayq_cancel", **restriction, object=[], yes=True) == "0 cancelled\n"
    assert call("delayq_cancel", policy=[], yes=True) == "0 cancelled\n"


def test_a_value_that_is_given_twice_selects_once(rows: dict[str, Timeout]) -> None:
    for options in ({"policy": [LINGER, LINGER]}, {"policy": LINGER, "state": ["pending", "pending"]}):
        found = json.loads(call("delayq_list", json=True, **options))
        assert [row["id"] for row in found] == [rows["late"].pk]


@pytest.mark.parametrize(
    ("command", "options", "words"),
    [
        ("delayq_list", {"state": "sleeping"}, "must be one of pending, held, firing"),
        ("delayq_list", {"due_after": "tomorrow"}, "is not a time"),
        ("delayq_list", {"limit": "many"}, "limit"),
        ("delayq_list", {"policy": "remind"}, "testapp.order.remind"),
        ("delayq_worker", {"concurrency": 0, "burst": True}, "must be 1 to"),
        ("delayq_pause", {}, "Which policies"),
        ("delayq_replan", {"mode": "keep"}, "Which policy"),
        ("delayq_cancel", {}, "Which timeouts"),
    ],
)
def test_keywords_that_make_no_sense_are_refused(command: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(CommandError, match=words):
        call(command, **options)


def test_a_state_is_a_selection(rows: dict[str, Timeout], do: Do) -> None:
    assert do("delayq_retry", "--state", "dead").out == "1 pending again\n"
    rows["dead"].refresh_from_db()
    assert rows["dead"].state == "pending"


def test_a_backfill_and_pruning_ask_whoever_is_there_and_nobody_else(
    typing: Callable[[str | None], None], do: Do
) -> None:
    long_ago = timezone.now() - timedelta(days=400)
    Order.objects.bulk_create(Order(created_at=long_ago) for _ in range(11))
    backfill = ("delayq_sync", "--policy", UNPAID, "--backfill")
    typing("n\n")
    with pytest.raises(CommandError, match="Nothing was changed"):
        do(*backfill)
    assert not Timeout.objects.exists()
    assert "11 armed" in do(*backfill, "--dry-run").out
    assert "11 armed" in do(*backfill, "--yes").out

    old = [as_if(row, "fired", "due", due_at=long_ago) for row in Timeout.objects.all()]
    Timeout.objects.update(settled_at=long_ago)
    with pytest.raises(CommandError, match="Nothing was changed"):
        do("delayq_prune")
    assert Timeout.objects.count() == len(old)
    typing(None)  # cron
    assert do("delayq_prune").out.startswith("11 timeouts")
