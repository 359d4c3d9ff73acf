"""`call_command` with keywords does what the shell does; who only reads need not choose, and cron is asked nothing."""

from __future__ import annotations

import io
import json
from datetime import timedelta
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.utils import timezone

from django_delayq import get_policy
from django_delayq.ledger import controls
from django_delayq.models import Timeout
from tests.integration.commands.conftest import CLI, LINGER, REMIND, UNPAID, Do, Types
from tests.integration.operations.conftest import as_if, dead, pending, said
from tests.testapp.models import Order

pytestmark = pytest.mark.django_db(transaction=True)


def call(*arguments: str, **options: Any) -> str:
    out = io.StringIO()
    call_command(*arguments, stdout=out, stderr=io.StringIO(), **options)
    return out.getvalue()


def listed(**options: Any) -> list[int]:
    return sorted(row["id"] for row in json.loads(call("delayq_list", json=True, **options)))


def state_of(label: str) -> controls.PolicyState:
    return controls.policy_state(get_policy(label), "default")


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
    assert listed() == [soon, late]
    assert listed(policy=REMIND) == listed(policy=[REMIND]) == listed(policy="remind", model="testapp.Order") == [soon]
    assert listed(policy=(REMIND, LINGER), limit="1") == [soon]
    assert listed(policy=LINGER, object=int(rows["late"].object_id)) == [late]
    assert listed(id=late) == listed(id=str(late)) == [late]
    assert listed(due_before="1h") == listed(due_before=timezone.now() + timedelta(hours=1)) == [soon]
    assert listed(state="dead") == [gone]
    # A value that is given twice selects once, and an empty list selects nothing.
    assert listed(policy=[LINGER, LINGER]) == listed(policy=LINGER, state=["pending", "pending"]) == [late]
    for option in ("policy", "id", "state"):
        assert listed(**{option: []}) == []
    for restriction in ({"policy": LINGER}, {"model": "testapp.Order"}):
        assert listed(**restriction, object=()) == []
        assert call("delayq_cancel", **restriction, object=[], yes=True) == "0 cancelled\n"
    for name, nothing in (("policy", ()), ("id", ()), ("search", "nothing")):
        assert call("delayq_cancel", **{name: nothing}, yes=True) == "0 cancelled\n"
    assert call("delayq_retry", state="dead") == "1 pending again\n"


def test_keywords_steer_as_options_do_and_may_be_typed_values(rows: dict[str, Timeout]) -> None:
    before, until = rows["late"].due_at, timezone.now() + timedelta(hours=3)
    assert call("delayq_postpone", id=[rows["late"].pk], by=timedelta(hours=2)) == "1 postponed\n"
    rows["late"].refresh_from_db()
    assert rows["late"].due_at == before + timedelta(hours=2)
    assert call("delayq_postpone", id=rows["soon"].pk, to=until) == "1 postponed\n"
    assert call("delayq_cancel", policy=REMIND, key="", reason="by a program") == "1 cancelled\n"
    assert said(rows["soon"])[-1][1:] == (CLI, "by a program")
    for end in (until, None):
        call("delayq_pause", policy=[REMIND], until=end)
        assert state_of(REMIND).until == end
    call("delayq_replan", UNPAID, after=timedelta(minutes=50), mode="keep")
    call("delayq_brake", REMIND, 500, per="10m")
    brake = state_of(REMIND).brake
    assert (state_of(UNPAID).after, brake and brake.most) == (timedelta(minutes=50), 500)
    assert "queues    default, other\n" in call("delayq_worker", queue=["default", "other"], burst=True)


def test_a_backfill_and_pruning_ask_whoever_is_there_and_nobody_else(typing: Types, do: Do) -> None:
    long_ago = timezone.now() - timedelta(days=400)
    Order.objects.bulk_create(Order(created_at=long_ago) for _ in range(11))
    backfill = ("delayq_sync", "--policy", UNPAID, "--backfill")
    typing("n\n")
    with pytest.raises(CommandError, match="Nothing was changed"):
        do(*backfill)
    assert not Timeout.objects.exists()
    assert "11 armed" in do(*backfill, "--dry-run").out
    assert "11 armed" in do(*backfill, "--yes").out
    old = [as_if(row, "fired", "due", due_at=long_ago, settled_at=long_ago) for row in Timeout.objects.all()]
    with pytest.raises(CommandError, match="Nothing was changed"):
        do("delayq_prune")
    assert Timeout.objects.count() == len(old)
    typing(None)  # cron
    assert do("delayq_prune").out.startswith("11 timeouts")
