"""cancel, fire, postpone, retry, list: what they choose, that they ask, and that they say who did it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from django.core.management import CommandError
from django.utils import timezone

from django_delayq import operations
from django_delayq.models import Timeout
from tests.integration.commands.conftest import Do
from tests.integration.operations.conftest import as_if, pending
from tests.testapp.models import ExpressOrder, Order, Parcel, Voucher

pytestmark = pytest.mark.django_db(transaction=True)

REMIND, LINGER = "testapp.order.remind", "testapp.order.linger"


def some(count: int = 1, policy: str = "remind", **delay: Any) -> list[Timeout]:
    return [pending(Order.objects.create(), policy, **delay) for _ in range(count)]


def states(rows: list[Timeout]) -> list[str]:
    found = dict(Timeout.objects.values_list("pk", "state"))
    return [found[row.pk] for row in rows]


def contents() -> list[tuple[Any, ...]]:
    rows = Timeout.objects.order_by("pk")
    return list(rows.values_list("pk", "state", "due_at", "run_at", "history", "settled_at"))


VERBS = {
    "cancel": ("delayq_cancel", "--all"),
    "fire": ("delayq_fire", "--all"),
    "postpone": ("delayq_postpone", "--by", "2h", "--all"),
    "reschedule": ("delayq_reschedule", "--by=-2h", "--all"),
    "retry": ("delayq_retry", "--all"),
    "refire": ("delayq_refire", "--state", "dead", "--all"),
    "erase": ("delayq_erase", "--state", "dead", "--all"),
}


@pytest.mark.parametrize("name", VERBS)
def test_a_dry_run_changes_nothing_and_says_so(do: Do, name: str) -> None:
    rows = some(12)
    as_if(rows[0], "dead", "retries")
    before = contents()
    output = do(*VERBS[name], "--dry-run").out
    assert output.startswith("1 " if name in {"retry", "refire", "erase"} else "11 ")
    assert "dry run: nothing was changed" in output
    assert contents() == before


@pytest.mark.parametrize("name", ["cancel", "fire", "postpone"])
def test_many_are_asked_for_and_without_a_terminal_refused(
    do: Do, typing: Callable[[str | None], None], name: str
) -> None:
    some(11)
    before = contents()
    with pytest.raises(CommandError, match="11 timeouts. Without a terminal"):
        do(*VERBS[name])
    for answer in ("n\n", "\n", ""):
        typing(answer)
        with pytest.raises(CommandError, match="Nothing was changed"):
            do(*VERBS[name])
    assert contents() == before
    typing("y\n")
    assert do(*VERBS[name]).out.rpartition("] ")[2].startswith("11 ")
    assert contents() != before


def test_yes_asks_nobody(do: Do, typing: Callable[[str | None], None]) -> None:
    rows = some(11)
    assert do("delayq_cancel", "--all", "--yes").out == "11 cancelled\n"
    assert set(states(rows)) == {"cancelled"}


@pytest.mark.parametrize("settled", [False, True])
def test_a_cancellation_of_a_firing_timeout_says_what_it_did(do: Do, settled: bool) -> None:
    firing = as_if(pending(Order.objects.create(), "send_outside"), "firing")
    (waits,) = some()
    rows = [firing, waits, *([as_if(pending(Order.objects.create()), "fired", "due")] if settled else [])]
    words = "1 not cancelled, may still succeed: firing now, without a further attempt"
    with pytest.raises(CommandError, match=rf"(?m)^{words} \({firing.pk}\)$") as refused:
        do("delayq_cancel", *(f"--id={row.pk}" for row in rows))
    assert refused.value.returncode == (1 if settled else 3)
    assert states([firing, waits]) == ["firing", "cancelled"]
    firing.refresh_from_db()
    assert firing.final_attempt


def test_a_timeout_that_cannot_be_fired_stays_and_the_command_says_why(do: Do) -> None:
    firing = as_if(pending(Order.objects.create(), "send_outside"), "firing")
    with pytest.raises(CommandError, match=rf"^1 left unchanged: firing now \({firing.pk}\)$") as refused:
        do("delayq_fire", "--id", str(firing.pk))
    assert refused.value.returncode == 1


def test_an_option_takes_several_values_or_is_repeated(do: Do) -> None:
    one, two, three = some(3)
    objects = [row.object_id for row in (one, two)]
    do("delayq_cancel", "--model", "testapp.order", "--object", *objects)
    assert states([one, two, three]) == ["cancelled", "cancelled", "pending"]
    assert "No timeouts" in do("delayq_list", "--id", str(one.pk), "--id", str(two.pk), "--state", "dead", "fired").out
    do("delayq_cancel", "--policy", REMIND, LINGER, "--state", "pending", "dead")
    assert states([three]) == ["cancelled"]


def test_rows_are_chosen_by_all_that_is_said_together(do: Do) -> None:
    early, late, other = *some(2, hours=1), *some(1, "linger", hours=1)
    keyed = pending(Order.objects.create(), hours=1)
    Timeout.objects.filter(pk=keyed.pk).update(key="second")
    chosen = {
        ("--policy", REMIND, "--policy", LINGER, "--key", ""): {early, late, other},
        ("--model", "testapp.Order"): {early, late, other, keyed},
        ("--model", "testapp.parcel"): set(),
        ("--policy", LINGER, "--object", other.object_id): {other},
        ("--policy", REMIND, "--object", other.object_id): set(),
        ("--id", str(late.pk), "--id", str(other.pk)): {late, other},
        ("--all",): {early, late, other, keyed},
        ("--all", "--state", "dead"): set(),
    }
    for arguments, rows in chosen.items():
        shown = json.loads(do("delayq_list", "--json", *arguments).out)
        assert {row["id"] for row in shown} == {row.pk for row in rows}, arguments


def test_rows_of_a_forgotten_policy_can_be_chosen_by_its_label(do: Do, declare: Callable[..., Any]) -> None:
    (row,) = some()
    Timeout.objects.filter(pk=row.pk).update(policy="testapp.order.forgotten")
    declare(Voucher, name="other")
    forgotten = ("--policy", "testapp.order.forgotten", "--object", row.object_id)
    for more in ((), ("--policy", "testapp.voucher.other")):  # which has another model
        with pytest.raises(CommandError, match="--object needs --model, or policies that are declared"):
            do("delayq_list", *forgotten, *more)
    for more in ((), ("--policy", REMIND)):
        assert str(row.pk) in do("delayq_list", *forgotten, *more, "--model", "testapp.order").out
    assert do("delayq_cancel", "--policy", "testapp.order.forgotten").out == "1 cancelled\n"


@pytest.mark.parametrize("named", [True, False], ids=["one object", "all of the model"])
def test_timeouts_under_a_parent_model_are_chosen_by_the_child(do: Do, named: bool) -> None:
    row = pending(ExpressOrder.objects.create())
    (other,) = some()
    chosen = ["--model", "testapp.ExpressOrder", *(["--object", row.object_id] if named else [])]
    assert row.object_id in do("delayq_list", *chosen).out
    assert do("delayq_cancel", *chosen).out == "1 cancelled\n"
    assert states([row, other]) == ["cancelled", "pending"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["delayq_cancel"], "Which timeouts"),
        (["delayq_cancel", "--policy", "testapp.order.remin"], "Did you mean 'testapp.order.remind'"),
        (["delayq_cancel", "--object", "7"], "objects of several models may have the same id"),
        (["delayq_cancel", "--object", "seven", "--model", "testapp.Order"], "seven is not a key of Order"),
        (["delayq_cancel", "--model", "testapp.Ordr"], "no model 'testapp.Ordr'"),
        (["delayq_cancel", "--model", "Order"], "app.Model"),
        (["delayq_cancel", "--all", "--state", "fired"], "must be one of pending, held, firing, dead"),
        (["delayq_cancel", "--all", "--id", "x"], "'x' is not a number"),
        (["delayq_retry", "--all", "--state", "pending"], "must be one of dead"),
        (["delayq_postpone", "--all", "--by", "2 hours"], "is not a duration"),
        (["delayq_postpone", "--all", "--by", "9999999w99999999999w"], "is too long"),
        (["delayq_postpone", "--all", "--to", "2020-01-01"], "2020-01-01 00:00:00-03:00 is in the past"),
        (["delayq_postpone", "--all", "--to", "2026-13-01"], "is not a time"),
        (["delayq_list", "--all", "--due-before", "tomorrow"], "is not a time"),
        (["delayq_list", "--limit", "0"], "must be 1 or more"),
        (["delayq_list", "--limit", "9" * 20], "more than 18 digits"),
        (["delayq_list", "--id", "9" * 5000], "more than 18 digits"),
        (["delayq_cancel", "--id", "9" * 20], "more than 18 digits"),
        (["delayq_explain", "--id", "9" * 20], "more than 18 digits"),
        (["delayq_cancel", "--object", "a\0b", "--model", "testapp.Voucher"], "is not text"),
    ],
)
def test_what_makes_no_sense_is_refused_and_changes_nothing(do: Do, arguments: list[str], words: str) -> None:
    some()
    before = contents()
    with pytest.raises(CommandError, match=words):
        do(*arguments)
    assert contents() == before


def test_a_moment_without_a_zone_is_the_projects_own(do: Do) -> None:
    (row,) = some()
    do("delayq_postpone", "--id", str(row.pk), "--to", "2099-03-01T18:00")
    row.refresh_from_db()
    assert timezone.localtime(row.due_at).isoformat() == "2099-03-01T18:00:00-03:00"


def test_a_moment_in_a_zone_that_no_database_knows_is_read(do: Do) -> None:
    """PostgreSQL refuses offsets of 16 hours and more."""
    (row,) = some()
    shown = do("delayq_list", "--json", "--all", "--due-before", "2099-01-01T00:00:00+23:59").out
    assert [each["id"] for each in json.loads(shown)] == [row.pk]


def test_uuid_keys_are_found_as_people_write_them(do: Do) -> None:
    parcel = Parcel.objects.create(sent_at=timezone.now())
    arguments = ("--model", "testapp.Parcel", "--object", parcel.pk.hex.upper())
    assert [row["object_id"] for row in json.loads(do("delayq_list", "--json", *arguments).out)] == [str(parcel.pk)]


def test_the_list_shows_the_next_first_and_says_that_there_is_more(do: Do) -> None:
    late, early = *some(1, hours=9), *some(1, hours=1)
    lines = do("delayq_list", "--all").out.splitlines()
    assert [line.split()[0] for line in lines] == ["id", str(early.pk), str(late.pk)]
    assert timezone.localtime(early.due_at).strftime("%Y-%m-%d %H:%M:%S") in lines[1]
    lines = do("delayq_list", "--all", "--limit", "1").out.splitlines()
    assert len(lines) == 3
    assert lines[2].startswith("... and more")


def test_an_empty_list_says_so(do: Do) -> None:
    assert do("delayq_list").out == "No timeouts.\n"
    assert json.loads(do("delayq_list", "--json").out) == []


def test_the_list_as_json_has_every_public_column(do: Do) -> None:
    row = pending(Order.objects.create(), hours=1, key="part", payload={"parcel": [7]}, reason="a test")
    as_if(row, "cancelled", "hand", settled_at=row.created_at, since_at=row.due_at, extensions=2, attempts=1)
    (shown,) = json.loads(do("delayq_list", "--id", str(row.pk), "--json").out)
    row.refresh_from_db()
    public = {field.name for field in row._meta.fields if field.editable or field.name == "idempotency_key"}
    columns = public - {"content_type", "history"}
    expected = {name: getattr(row, name) for name in columns} | {
        "model": "testapp.order",
        "failing": False,
        "last_error": "",
        "is_computed": False,
    }
    expected |= {"is_computed": False, "keeps_deadline": False, "erased_at": None}
    assert shown == {name: getattr(value, "isoformat", lambda v=value: v)() for name, value in expected.items()}


def test_the_list_as_json_shows_rows_whose_model_is_gone(do: Do) -> None:
    (row,) = some()
    Timeout.objects.filter(pk=row.pk).update(content_type=10_000)
    assert [each["model"] for each in json.loads(do("delayq_list", "--json").out)] == [None]


def test_the_list_as_json_says_beside_it_that_there_is_more(do: Do) -> None:
    some(3)
    output = do("delayq_list", "--json", "--limit", "2")
    assert len(json.loads(output.out)) == 2
    assert output.err == "... and more: raise --limit, now 2, or select fewer\n"
    assert do("delayq_list", "--json", "--limit", "3").err == ""


def test_a_list_states_why_its_timeouts_do_not_fire(do: Do) -> None:
    some()
    assert "fires nothing" not in do("delayq_list").out
    operations.pause(REMIND, by="brake", reason="21 timeouts fired within 10 min; the brake allows 20.")
    line = do("delayq_list").out.splitlines()[-1]
    assert line.startswith(f"{REMIND} fires nothing now: Its policy is paused by its brake until")
    assert "the brake allows 20." in line
    assert "fires nothing" not in do("delayq_list", "--state", "fired").out
