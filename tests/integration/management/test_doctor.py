"""`delayq_doctor` about timeouts, policies and workers: what it finds, how it exits, and what it leaves alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.contenttypes.models import ContentType
from django.core.checks import ERROR, INFO, WARNING
from django.db import connection
from django.db.models import Q
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

import django_delayq as dq
from django_delayq import operations
from django_delayq.models import PolicyChange, PolicyControl, Timeout, WorkerSeen
from django_delayq.monitoring import doctor
from django_delayq.monitoring.doctor import examine
from django_delayq.monitoring.misfits import matching_again
from django_delayq.policy.policies import registry
from django_delayq.rounds.memory import record
from tests.docs.pages import ROOT
from tests.integration.management.conftest import LINGER, REMIND, UNPAID, Do, a_worker, exit_code, found, says, worst
from tests.integration.operations.conftest import BY, as_if, dead, pending
from tests.support.typed import Declare, Patch
from tests.testapp.models import Order

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("without_redis")]

HOUR = timedelta(hours=1)
FORGOTTEN = "testapp.order.forgotten"


def overdue(**ago: float) -> Timeout:
    return as_if(pending(Order.objects.create()), "pending", run_at=timezone.now() - timedelta(**ago))


def test_a_healthy_installation_is_told_so_and_what_is_wrong_ends_with_1(
    do: Do, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code() == 1, "no worker is running"
    a_worker()
    pending(Order.objects.create())
    assert {finding.level for finding in examine()} == {INFO}
    said = do("delayq_doctor").out
    assert "shop1:7" in said and "All indexes exist" in said
    assert (exit_code(), exit_code("--strict"), exit_code("--quick")) == (0, 0, 0)
    dead(Order.objects.create())
    assert (exit_code(), exit_code("--strict")) == (0, 1), "warnings only if that is asked for"
    capsys.readouterr()
    exit_code("--json")
    told = json.loads(capsys.readouterr().out)
    assert (told[0]["name"], told[0]["level"]) == ("dead", "warning"), "the worst comes first"
    assert {"name", "level", "text", "hint"} == set(told[0])


def test_workers_that_are_gone_hang_or_serve_other_queues_are_found(declare: Any, do: Do) -> None:
    assert worst("workers")[0] == ERROR
    a_worker(seen_at=timezone.now() - timedelta(minutes=5))
    assert worst("workers")[0] == ERROR
    hanging = a_worker(queues=["mail"], stuck=timedelta(minutes=3), stuck_threads=2)
    assert worst("workers")[0] == INFO
    says("workers.stuck", ERROR, "shop1:7 has not checked for due timeouts for 3 min")
    told = "shop1:7 has 2 threads whose handlers do not end after the time limit."
    says("workers.stuck_threads", WARNING, told)
    assert "2 stuck threads" in do("delayq_status").out
    says("workers.queues", WARNING, "delayq_worker --queue default")  # before its first deadline
    overdue(hours=1)
    assert worst("workers.queues")[0] == ERROR
    other = a_worker(version="0.0.9")
    assert found("workers.queues") == []
    says("workers", WARNING, f"of version 0.0.9 are running; this process has {dq.__version__}")
    WorkerSeen.objects.exclude(pk=other.pk).update(version="0.0.9")
    assert worst("workers")[0] == WARNING, "all workers have one version, and this process has another"
    hanging.delete()
    assert found("workers.stuck") == found("workers.stuck_threads") == []


def test_what_waits_for_too_long_is_found_unless_somebody_has_paused_it() -> None:
    row = overdue(minutes=5)
    says("overdue", WARNING, f"1 of {REMIND} is overdue, for 5 min")
    as_if(row, "pending", run_at=timezone.now() - HOUR / 2)
    assert worst("overdue")[0] == ERROR
    operations.pause(REMIND, by=BY, reason="outage")
    assert worst("overdue")[0] == worst("stopped")[0] == INFO
    PolicyControl.objects.update(stopped_at=timezone.now() - timedelta(days=3))
    says("stopped", WARNING, "paused for 3 d, by admin:alice. outage")


def test_rows_and_objects_that_nobody_will_fire_are_found() -> None:
    a_worker()
    for _ in range(4):
        Timeout.objects.filter(pk=dead(Order.objects.create()).pk).update(policy=FORGOTTEN)
    Order.objects.bulk_create([Order(status="unpaid", created_at=timezone.now() - timedelta(days=300))])
    told = f"{FORGOTTEN} is not declared, but has timeouts: 0 pending, 0 firing, 4 dead."
    says("unknown_policy", WARNING, told, f"delayq_retire {FORGOTTEN}")
    says("dead", WARNING, f"4 of {FORGOTTEN} are dead.", f"delayq_cancel --policy {FORGOTTEN} --state dead")
    says("too_old", WARNING, f"1 object matches {UNPAID}, but its deadline passed")
    assert found("too_old", quick=True) == []


@pytest.mark.usefixtures("own_kinds")
def test_rows_with_the_content_type_of_a_model_that_was_moved_are_found(declare: Declare) -> None:
    row = pending(Order.objects.create())
    declare(Order, name="renamed", aliases=["former", "shop.order.moved"])
    Timeout.objects.filter(pk=row.pk).update(policy="testapp.order.former")
    assert not found("moved_models"), "a policy or model that was only renamed keeps its content type"
    kind = ContentType.objects.create(app_label="shop", model="order")
    Timeout.objects.filter(pk=row.pk).update(policy="shop.order.moved", content_type=kind)
    told = "of shop.order.moved have the content type of another model than testapp.order.renamed"
    says("moved_models", WARNING, told)


def test_a_change_that_nobody_carries_on_is_found_and_its_hint_ends_no_pause(monkeypatch: Patch) -> None:
    operations.hold(REMIND, by=BY)
    with monkeypatch.context() as patched:
        patched.setattr("django_delayq.operations.policies.run_move", lambda change, *_: change)
        operations.resume(REMIND, by=BY)
    assert found("changes") == []
    PolicyChange.objects.update(touched_at=timezone.now() - HOUR)
    says("changes", ERROR, f"run delayq_resume {REMIND}")
    PolicyControl.objects.all().delete(), PolicyChange.objects.all().delete()
    operations.pause(REMIND, by=BY)
    at = timezone.now() - HOUR
    PolicyChange.objects.create(policy=REMIND, what=PolicyChange.What.DELAY, at=at, touched_at=at)
    assert "delayq_resume" not in says("changes", ERROR, "delayq_worker")


def test_the_constants_of_the_capacity_are_those_of_the_latest_benchmark_within_a_factor_of_three() -> None:
    measured = json.loads((ROOT / "benchmarks" / "results.json").read_text())["capacity"]
    off = {name: (value, measured[name]) for name, value in doctor.CAPACITY.items() if name in measured}
    assert off, "make bench has measured none of them"
    off = {name: pair for name, pair in off.items() if not 1 / 3 <= pair[0] / pair[1] <= 3}
    assert off == {}, "copy these constants (here, measured) from benchmarks/results.json to monitoring/doctor.py"


# Deadlines of a delay that was changed in the code: a new declaration moves none of them.


@pytest.fixture
def pay_by(declare: Any) -> Callable[[timedelta], None]:
    """Declare the policy `pay_by` with this `after`, in place of the one before, as a deployment does."""
    declared: list[Any] = []

    def deploy(after: timedelta) -> None:
        for policy in declared:
            registry.remove(policy)
        declared.append(declare(Order, name="pay_by", after=after, since="created_at", when=Q(status="open")))

    return deploy


def opened(**moment: Any) -> Order:
    return Order.objects.create(status="open", created_at=timezone.now().replace(**moment))


def test_deadlines_of_a_delay_that_the_code_has_changed_are_found_until_they_are_replanned(pay_by: Any, do: Do) -> None:
    pay_by(HOUR)
    for _ in range(3):
        opened()
    assert worst("delays")[0] == INFO
    pay_by(2 * HOUR)
    opened()
    told = "Of 4 checked timeouts of testapp.order.pay_by, 3 are due 1 h after"
    says("delays", WARNING, told, "its delay is 2 h now", "delayq_replan testapp.order.pay_by --mode recompute")
    assert found("delays", quick=True) == []
    do("delayq_replan", "testapp.order.pay_by", "--mode", "recompute", "--yes")
    assert worst("delays")[0] == INFO


def test_deadlines_that_differ_on_purpose_are_not_found(pay_by: Any) -> None:
    pay_by(HOUR)
    kept = [opened() for _ in range(2)]
    for _ in range(2):  # one alone would not be found in any case
        extended, moved, own = (opened() for _ in range(3))
        dq.extend_timeout(extended, "pay_by", minutes=5)
        dq.reschedule_timeout(moved, "pay_by", hours=3)
        dq.cancel_timeout(own, "pay_by")
        dq.schedule_timeout(own, "pay_by", minutes=5)
    assert worst("delays")[0] == INFO
    operations.change_delay("testapp.order.pay_by", 2 * HOUR, by=BY)
    assert all(dq.get_deadline(order, "pay_by") is not None for order in kept)
    assert worst("delays")[0] == INFO


@pytest.mark.parametrize(("by_hand", "armed", "level"), [(1, 0, INFO), (2, 19, INFO), (2, 18, WARNING)])
def test_a_few_deadlines_set_by_hand_are_not_found(pay_by: Any, by_hand: int, armed: int, level: int) -> None:
    pay_by(HOUR)
    for number in range(by_hand + armed):
        order = opened(microsecond=0)
        if number < by_hand and order.created_at:
            dq.cancel_timeout(order, "pay_by")
            dq.schedule_timeout(order, "pay_by", at=order.created_at + 5 * HOUR)
    assert worst("delays")[0] == level


# Objects that match a policy although its round has fired: lost updates, revived orders, forgotten saves.


def fired_orders(count: int, status: str = "cancelled", hours_ago: float = 1) -> list[Order]:
    """Return orders whose round has fired so long ago, and which have this status since."""
    orders, at = [], timezone.now() - timedelta(hours=hours_ago)
    for _ in range(count):
        order = Order.objects.create(status="unpaid", created_at=at)
        as_if(dq.pending_timeouts(order).get(), "fired", "due", settled_at=at, run_at=at)
        Order.objects.filter(pk=order.pk).update(status=status)
        orders.append(order)
    return orders


def test_an_order_that_a_stale_save_has_revived_is_found() -> None:
    a_worker()
    fired_orders(10)
    assert not found("fired_again")
    with CaptureQueriesContext(connection) as few:
        list(matching_again("default"))
    fired_orders(10)
    with CaptureQueriesContext(connection) as many:
        list(matching_again("default"))
    assert len(few) == len(many), "it reads few firings and few objects"
    old, new = *fired_orders(1, hours_ago=100), *fired_orders(1)
    for order in (old, new):
        order.save()  # as it was before the timeout fired
    told = f"2 objects match {UNPAID} although their rounds have fired, such as object {new.pk}"
    assert says("fired_again", WARNING, "delayq_refire").startswith(told)
    assert not found("fired_again", quick=True), "it reads the table of the objects"


# Timeouts whose attempts fail.


def failing(minutes_ago: float, attempts: int = 1) -> Timeout:
    """Return a timeout whose first attempt failed so long ago, and its last one half a minute ago."""
    now, row = timezone.now(), pending(Order.objects.create(), minutes=30)
    times = [now - timedelta(minutes=ago) for ago in (minutes_ago, 0.5)][:attempts]
    for at in times:
        record(row, "failed", at, attempt=1, error="SMTPError", message="421", traceback="")
    moments: dict[str, Any] = {"first_failed_at": times[0], "last_failed_at": times[-1]}
    return as_if(row, "pending", attempts=attempts, history=row.history, **moments)


def fired(minutes_ago: float, policy: str = "remind") -> None:
    at = timezone.now() - timedelta(minutes=minutes_ago)
    as_if(pending(Order.objects.create(), policy), "fired", "due", due_at=at, run_at=at, settled_at=at)


def failures() -> tuple[int, str]:
    """Return level and words of the finding about failing timeouts."""
    findings = found("failing", quick=True)
    return (findings[0].level, findings[0].msg) if findings else (INFO, "")


def test_the_doctor_warns_from_the_third_failure_of_a_timeout_on_and_names_its_last_error() -> None:
    a_worker()
    failing(1, attempts=2)
    assert failures() == (INFO, ""), "two failures may be transient"
    row = failing(2, attempts=3)
    told = f"2 of {REMIND} are failing. Timeout {row.pk} has failed 3 times, last: SMTPError: 421."
    assert failures() == (WARNING, told)
    assert f"delayq_explain --id {row.pk}" in worst("failing")[1]
    Timeout.objects.filter(pk=row.pk).update(history=[])
    assert failures()[1].endswith(" has failed 3 times, last: see its story."), "the row does not have its error"


def test_it_is_an_error_if_all_attempts_of_a_policy_have_failed_for_ten_minutes() -> None:
    a_worker()
    failing(9, attempts=5)
    assert failures()[0] == WARNING
    failing(11)
    fired(12)
    level, words = failures()
    assert level == ERROR and exit_code("--quick") == 1
    assert f"No attempt of {REMIND} has succeeded for 11 min" in words  # and the seconds that this test took
    assert words.partition(": ")[2].startswith("2 are failing")
    fired(5, LINGER)
    assert failures()[0] == ERROR, "another policy fires"
    fired(10)
    assert failures()[0] == WARNING, "one has fired after that failure"
    Timeout.objects.all().delete()
    for minutes in (30, 20, 1):
        at = timezone.now() - timedelta(minutes=minutes)
        as_if(failing(minutes), "dead", "retries", run_at=at, settled_at=at)
    assert failures()[0] == ERROR, "without a retry, they die one after the other"
    Timeout.objects.filter(run_at__gt=timezone.now() - timedelta(minutes=10)).delete()
    assert failures() == (INFO, ""), "nothing was tried for ten minutes: that they are dead is a finding of its own"
