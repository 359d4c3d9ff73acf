"""cancel, fire, postpone, retry, list: what options and keywords choose, that they ask, what they refuse and say."""

from __future__ import annotations

import io
import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.utils import timezone

from django_delayq import get_policy, operations, schedule_timeout
from django_delayq.ledger import controls
from django_delayq.management.options import moment
from django_delayq.models import Timeout
from tests.integration.management.conftest import CLI, LINGER, REMIND, UNPAID, Do, Types
from tests.integration.operations.conftest import as_if, dead, pending, said
from tests.testapp.models import ExpressOrder, Order

pytestmark = pytest.mark.django_db(transaction=True)


def some(count: int = 1, policy: str = "remind", **delay: Any) -> list[Timeout]:
    return [pending(Order.objects.create(), policy, **delay) for _ in range(count)]


def states(rows: list[Timeout]) -> list[str]:
    found = dict(Timeout.objects.values_list("pk", "state"))
    return [found[row.pk] for row in rows]


def contents() -> list[tuple[Any, ...]]:
    rows = Timeout.objects.order_by("pk")
    return list(rows.values_list("pk", "state", "due_at", "run_at", "history", "settled_at"))


def listed(do: Do, *arguments: str) -> list[int]:
    return [row["id"] for row in json.loads(do("delayq_list", "--json", *arguments).out)]


def test_a_dry_run_changes_nothing_and_many_are_asked_for(do: Do, typing: Types) -> None:
    rows = some(12)
    as_if(rows[0], "dead", "retries")
    before, postpone = contents(), ("delayq_postpone", "--by", "2h", "--all")
    output = do(*postpone, "--dry-run").out
    assert output.startswith("11 ") and "dry run: nothing was changed" in output
    with pytest.raises(CommandError, match="11 timeouts. Without a terminal"):
        do(*postpone)
    for answer in ("n\n", "\n", ""):
        typing(answer)
        with pytest.raises(CommandError, match="Nothing was changed"):
            do(*postpone)
    assert contents() == before
    typing("y\n")
    assert do(*postpone).out.rpartition("] ")[2].startswith("11 ")
    assert do("delayq_retry", "--all").out == "1 pending again\n", "of few it does not ask"


@pytest.mark.parametrize("settled", [False, True])
def test_a_cancellation_of_a_firing_timeout_says_what_it_did(do: Do, settled: bool) -> None:
    firing = as_if(pending(Order.objects.create(), "send_outside"), "firing")
    (waits,) = some()
    words = rf"^1 left unchanged: firing now \({firing.pk}\)\n1 not found among the selected timeouts: 0$"
    with pytest.raises(CommandError, match=words) as refused:
        do("delayq_fire", "--id", str(firing.pk), "0")
    assert refused.value.returncode == 1
    rows = [firing, waits, *([as_if(pending(Order.objects.create()), "fired", "due")] if settled else [])]
    words = "1 not cancelled, may still succeed: firing now, without a further attempt"
    with pytest.raises(CommandError, match=rf"(?m)^{words} \({firing.pk}\)$") as refused:
        do("delayq_cancel", *(f"--id={row.pk}" for row in rows))
    assert refused.value.returncode == (1 if settled else 3)
    assert states([firing, waits]) == ["firing", "cancelled"]
    firing.refresh_from_db()
    assert firing.final_attempt


def test_timeouts_under_a_parent_model_are_chosen_by_the_child(do: Do) -> None:
    row, (other,) = pending(ExpressOrder.objects.create()), some()
    for named in (["--object", row.object_id], []):
        assert listed(do, "--model", "testapp.ExpressOrder", *named) == [row.pk]
    assert do("delayq_cancel", "--model", "testapp.ExpressOrder").out == "1 cancelled\n"
    assert states([row, other]) == ["cancelled", "pending"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["delayq_cancel"], "Which timeouts"),
        (["delayq_cancel", "--policy", "testapp.order.remin"], "Did you mean 'testapp.order.remind'"),
        (["delayq_cancel", "--object", "7"], "objects of several models may have the same id"),
        (["delayq_cancel", "--model", "Order"], "app.Model"),
        (["delayq_cancel", "--all", "--state", "fired"], "must be one of pending, held, firing, dead"),
        (["delayq_cancel", "--id", "x"], "'x' is not a number"),
        (["delayq_cancel", "--id", "9" * 20], "more than 18 digits"),
        (["delayq_postpone", "--all", "--by", "2 hours"], "is not a duration"),
        (["delayq_postpone", "--all", "--by", "9999999w99999999999w"], "is too long"),
        (["delayq_postpone", "--all", "--to", "2020-01-01"], "2020-01-01 00:00:00-03:00 is in the past"),
        (["delayq_list", "--due-before", "tomorrow"], "is not a time"),
        (["delayq_list", "--limit", "0"], "must be 1 or more"),
        (["delayq_list", "--key", "caf\udce9"], "is not text in the encoding of this shell"),
    ],
)
def test_what_makes_no_sense_is_refused_and_changes_nothing(do: Do, arguments: list[str], words: str) -> None:
    some()
    before = contents()
    with pytest.raises(CommandError, match=words):
        do(*arguments)
    assert contents() == before


def test_a_local_time_is_the_projects_own_and_refused_if_it_occurs_twice_or_never(do: Do) -> None:
    """PostgreSQL refuses offsets of 16 hours and more."""
    (row,) = some()
    assert listed(do, "--all", "--due-before", "2099-01-01T00:00:00+23:59") == [row.pk]
    do("delayq_postpone", "--id", str(row.pk), "--to", "2099-03-01T18:00")
    row.refresh_from_db()
    assert timezone.localtime(row.due_at).isoformat() == "2099-03-01T18:00:00-03:00"
    with timezone.override("Europe/Berlin"):
        for at, words in (("2027-10-31T02:30", "occurs twice when"), ("2027-03-28 02:30", "does not occur when")):
            with pytest.raises(CommandError, match=f"{words} the clocks change: add the offset") as refused:
                do("delayq_pause", REMIND, "--until", at)
            assert refused.value.returncode == 2
        assert moment("--to", "2027-10-31T03:00") == datetime(2027, 10, 31, 2, tzinfo=UTC)
        assert moment("--to", "2027-10-31T02:30+02:00") == datetime(2027, 10, 31, 0, 30, tzinfo=UTC)


def test_the_list_shows_the_next_first_and_says_that_there_is_more_and_why_nothing_fires(do: Do) -> None:
    late, early = *some(1, hours=9), *some(1, hours=1)
    lines = do("delayq_list", "--all").out.splitlines()
    assert [line.split()[0] for line in lines] == ["id", str(early.pk), str(late.pk)]
    assert timezone.localtime(early.due_at).strftime("%Y-%m-%d %H:%M:%S") in lines[1]
    lines = do("delayq_list", "--all", "--limit", "1").out.splitlines()
    assert len(lines) == 3 and lines[2].startswith("... and more")
    output = do("delayq_list", "--json", "--limit", "1")
    assert len(json.loads(output.out)) == 1
    assert output.err == "... and more: raise --limit, now 1, or select fewer\n"
    operations.pause(REMIND, by="brake", reason="21 timeouts fired within 10 min; the brake allows 20.")
    line = do("delayq_list").out.splitlines()[-1]
    assert line.startswith(f"{REMIND} fires nothing now: Its policy is paused by its brake until")
    assert "the brake allows 20." in line
    assert "fires nothing" not in do("delayq_list", "--state", "fired").out


@pytest.mark.django_db
def test_a_worker_in_a_transaction_says_why_it_would_fire_nothing(do: Do, order: Order) -> None:
    schedule_timeout(order, "remind", seconds=0)
    for options in (("--burst",), ("--max-timeouts", "1")):
        with pytest.raises(CommandError, match=r"rows of the transaction .* such as that of a TestCase\. .*fire_due"):
            do("delayq_worker", *options)


def call(*arguments: str, **options: Any) -> str:
    out = io.StringIO()
    call_command(*arguments, stdout=out, stderr=io.StringIO(), **options)
    return out.getvalue()


def chosen(**options: Any) -> list[int]:
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
    assert chosen() == [soon, late]
    assert chosen(policy=REMIND) == chosen(policy=[REMIND]) == chosen(policy="remind", model="testapp.Order") == [soon]
    assert chosen(policy=(REMIND, LINGER), limit="1") == [soon]
    assert chosen(policy=LINGER, object=int(rows["late"].object_id)) == [late]
    assert chosen(id=late) == chosen(id=str(late)) == [late]
    assert chosen(due_before="1h") == chosen(due_before=timezone.now() + timedelta(hours=1)) == [soon]
    assert chosen(state="dead") == [gone]
    # A value that is given twice selects once, and an empty list selects nothing.
    assert chosen(policy=[LINGER, LINGER]) == chosen(policy=LINGER, state=["pending", "pending"]) == [late]
    for option in ("policy", "id", "state"):
        assert chosen(**{option: []}) == []
    for restriction in ({"policy": LINGER}, {"model": "testapp.Order"}):
        assert chosen(**restriction, object=()) == []
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
    call("delayq_brake", REMIND, "500", per="10m")
    call("delayq_shadow", REMIND, "on")
    brake = state_of(REMIND).brake
    assert (state_of(UNPAID).after, brake and brake.most) == (timedelta(minutes=50), 500)
    assert state_of(REMIND).shadow == 100
    assert "queues    default, other\n" in call("delayq_worker", queue=["default", "other"], burst=True)
