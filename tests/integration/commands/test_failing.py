"""Timeouts whose attempts fail are one number, on which everything agrees that an operator reads."""

from __future__ import annotations

import json
from datetime import datetime, timedelta
from typing import Any

import pytest
from django.core.checks import ERROR, WARNING, CheckMessage
from django.core.management import call_command
from django.utils import timezone

from django_delayq.models import Timeout
from django_delayq.monitoring.doctor import examine
from django_delayq.monitoring.snapshot import snapshot
from django_delayq.operations import pause
from django_delayq.rounds.memory import record
from tests.integration.commands.conftest import Do, a_worker
from tests.integration.operations.conftest import BY, as_if, dead, pending
from tests.testapp.models import Order

ERROR_OF = {"error": "SMTPError", "message": "421", "traceback": ""}
pytestmark = pytest.mark.django_db(transaction=True)

REMIND = "testapp.order.remind"


def failing(attempts: int = 1, policy: str = "remind") -> None:
    as_if(pending(Order.objects.create(), policy, minutes=30), "pending", attempts=attempts)


def test_status_and_policies_count_the_failing_timeouts(do: Do) -> None:
    failing()
    failing(4)
    pending(Order.objects.create())
    dead(Order.objects.create())
    assert snapshot().failing == (2, False)
    assert "failing   2\n" in do("delayq_status").out
    assert json.loads(do("delayq_status", "--json").out)["failing"] == {"value": 2, "is_capped": False}
    for command in ("delayq_policies", "delayq_status"):
        lines = do(command).out.splitlines()
        (head,), (line,) = ([each for each in lines if each.startswith(name)] for name in ("policy ", f"{REMIND} "))
        assert line[head.index("failing") :].split()[0] == "2"


def failed(minutes_ago: float, attempts: int = 1, *, policy: str = "remind", **values: Any) -> Timeout:
    """Return a failing timeout whose first attempt failed so long ago, and its last one half a minute ago."""
    now, row = timezone.now(), pending(Order.objects.create(), policy, minutes=30)
    times = [now - timedelta(minutes=ago) for ago in (minutes_ago, 0.5)][: max(1, attempts)]
    return as_if(row, "pending", attempts=attempts, **failed_at(row, *times), **values)


def failed_at(row: Timeout, *times: datetime) -> dict[str, Any]:
    """Return the columns of `row` after failed attempts at these times."""
    for at in times:
        record(row, "failed", at, attempt=1, **ERROR_OF)
    return {"history": row.history, "first_failed_at": times[0], "last_failed_at": times[-1]}


def fired(minutes_ago: float, policy: str = "remind") -> None:
    at = timezone.now() - timedelta(minutes=minutes_ago)
    as_if(pending(Order.objects.create(), policy), "fired", "due", due_at=at, run_at=at, settled_at=at)


def test_the_list_shows_the_last_error_of_each_failing_timeout(do: Do) -> None:
    failed(2, attempts=2)
    pending(Order.objects.create())
    head, *lines = do("delayq_list").out.splitlines()
    assert [line[head.index("last error") :].strip() for line in lines] == ["SMTPError: 421", ""]
    (row,) = json.loads(do("delayq_list", "--failing", "--json").out)
    assert (row["failing"], row["last_error"]) == (True, "SMTPError: 421")


def finding() -> CheckMessage | None:
    return next((each for each in examine(quick=True) if each.id == "failing"), None)


@pytest.mark.usefixtures("without_redis")
def test_the_doctor_warns_from_the_third_failure_of_a_timeout_on() -> None:
    a_worker()
    failed(1, attempts=2)
    assert finding() is None, "two failures may be transient"
    worst = failed(2, attempts=3)
    found = finding()
    assert found is not None and found.level == WARNING
    words = f"2 of {REMIND} are failing. Timeout {worst.pk} has failed 3 times, last: SMTPError: 421."
    assert found.msg == words
    assert f"delayq_explain --id {worst.pk}" in str(found.hint)


@pytest.mark.usefixtures("without_redis")
def test_the_doctor_names_an_error_without_a_message() -> None:
    a_worker()
    row = failed(2, attempts=3)
    events = [{name: value for name, value in event.items() if name != "message"} for event in row.history]
    Timeout.objects.filter(pk=row.pk).update(history=events)
    assert (found := finding()) is not None and found.msg.endswith(" has failed 3 times, last: SMTPError.")


@pytest.mark.usefixtures("without_redis")
def test_the_doctor_blames_no_process_for_a_failure_whose_error_the_row_does_not_have() -> None:
    a_worker()
    failing(3)
    found = finding()
    assert found is not None and found.msg.endswith(" has failed 3 times, last: see its story.")
    Timeout.objects.all().delete()
    times = {f"{name}_failed_at": timezone.now() - timedelta(minutes=ago) for name, ago in (("first", 20), ("last", 1))}
    dead(Order.objects.create(), reason="the account is closed", **times)
    assert (found := finding()) is not None and found.msg.endswith(" has failed 3 times, last: the account is closed.")


@pytest.mark.usefixtures("without_redis")
def test_it_is_an_error_if_all_attempts_of_a_policy_have_failed_for_ten_minutes() -> None:
    a_worker()
    failed(9, attempts=5)
    assert (found := finding()) is not None and found.level == WARNING
    failed(11)
    fired(12)
    found = finding()
    assert found is not None and found.level == ERROR
    assert f"No attempt of {REMIND} has succeeded for 11 min" in found.msg  # and the seconds that this test took
    assert found.msg.partition(": ")[2].startswith("2 are failing")
    with pytest.raises(SystemExit, match="1"):
        call_command("delayq_doctor", "--quick")
    fired(5, "linger")
    assert (found := finding()) is not None and found.level == ERROR, "another policy fires"
    fired(10)
    assert (found := finding()) is not None and found.level == WARNING, "one has fired after that failure"


@pytest.mark.usefixtures("without_redis")
def test_timeouts_without_a_retry_that_die_one_after_the_other_are_an_error_too() -> None:
    a_worker()
    for minutes in (30, 20, 1):
        at = timezone.now() - timedelta(minutes=minutes)
        row = dead(Order.objects.create())
        as_if(row, "dead", "retries", **failed_at(row, at), run_at=at, settled_at=at)
    assert (found := finding()) is not None and found.level == ERROR
    Timeout.objects.filter(run_at__gt=timezone.now() - timedelta(minutes=10)).delete()
    assert finding() is None, "nothing has been tried for ten minutes: that they are dead is a finding of its own"


@pytest.mark.usefixtures("without_redis")
def test_a_policy_that_is_stopped_because_it_fails_is_a_warning() -> None:
    a_worker()
    failed(11, attempts=4)
    pause(REMIND, by=BY, reason="the mail server is down")
    assert (found := finding()) is not None and found.level == WARNING


def test_the_list_shows_which_timeouts_fail_and_lists_them_alone(do: Do) -> None:
    failing()
    pending(Order.objects.create(), "linger")
    dead(Order.objects.create())
    (line,) = do("delayq_list", "--failing").out.splitlines()[1:]
    assert f"{REMIND} " in line and "pending, failing" in line
    assert do("delayq_list", "--all").out.count("failing") == 1
    told = json.loads(do("delayq_list", "--json").out)
    assert [(each["state"], each["failing"]) for each in told] == [("pending", True), ("pending", False)]
    assert "No timeouts." in do("delayq_list", "--failing", "--policy", "testapp.order.linger").out
